"""The demo: stock and patched vLLM in turn, on the same requests, under the same KV pressure.

``python -P -m meridian_patch.demo.run`` is ``meridian bench serve`` on the tiny reasoner with
settings that suit any machine. It takes the same options; only ``--seeds`` is a number.
"""

import argparse
import shlex
import sys

from meridian_patch.bench.interrupts import run_program
from meridian_patch.bench.options import read_whole
from meridian_patch.bench.served.command import add_serve, run_serve

_MODULE = "meridian_patch.demo.run"
_DEFAULTS = "--arms stock,noop,patched --rate auto --restart --out out/demo"


def main(argv: list[str] | None = None) -> None:
    """Run the demo; exits with 1 when an arm failed and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    run_program("demo", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python -P -m {_MODULE}",
        description=__doc__,
        epilog=f"Further options are those of 'meridian bench serve'. Defaults here: {_DEFAULTS}",
    )
    parser.add_argument("--seeds", default="1", help="traces per arm, a whole number above 0")
    own, others = parser.parse_known_args(arguments)
    pairs = read_whole("--seeds", own.seeds)
    has_trace = any(option.startswith("--trace") for option in others)
    traces = ["--pairs", own.seeds] if has_trace else ["--seeds", f"1-{pairs}"]
    serve = add_serve(argparse.ArgumentParser(prog=parser.prog).add_subparsers())
    parsed = serve.parse_args([*_DEFAULTS.split(), *traces, *others])
    return run_serve(parsed, shlex.join(["python", "-P", "-m", _MODULE, *arguments]))


if __name__ == "__main__":
    main()
