"""The demo: stock and patched vLLM in turn, on the same requests, under the same KV pressure.

Four servers of the tiny reasoner: stock vLLM, stock vLLM again (what these two differ by is chance,
and so is as much between the others), patched, and patched with the early exit that was calibrated
for this model. They run on an emulated GPU, beside a real one, too: a step lasts as long as its
cost model says, whatever this machine takes. They take turns on several short traces. All first
requests of a trace come at once, so that the queues are alike on a slower machine. ``python -P -m
meridian_patch.demo.run`` is ``meridian bench serve`` with settings that suit any machine. It takes
the same options; only ``--seeds`` is a number.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from importlib.resources import files

from meridian_patch.bench.interrupts import run_program
from meridian_patch.bench.options import read_whole
from meridian_patch.bench.served.arms import NOOP
from meridian_patch.bench.served.command import add_serve, run_serve
from meridian_patch.bench.served.plan import SIZES
from meridian_patch.emulation.options import DEFAULT_DEVICE

_MODULE = "meridian_patch.demo.run"
# Its requests and memory were chosen on seeds below.
_FIRST_SEED = 61
# One client, so that requests come in the same order to each server.
_DEFAULTS = "--workload mixed --clients 1 --headlines --out out/demo"
# As long as half a second where a token takes 2.8 ms.
_PAUSE_TOKENS = "180"
_ARMS = "stock,stock-again,patched"
# With what `meridian calibrate` chose for the tiny reasoner.
_EXIT_ARM = "exit"
_PROFILE = files("meridian_patch.configs").joinpath("profiles/tiny_reasoner_exit.yaml")


def main(argv: list[str] | None = None) -> None:
    """Run the demo; exits with 1 when an arm failed and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else argv
    run_program("demo", lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    return run_serve(parse(arguments), shlex.join(["python", "-P", "-m", _MODULE, *arguments]))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The demo's options as those of ``meridian bench serve``.

    Raises:
        BenchError: a wrong number of seeds.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -P -m {_MODULE}",
        description=__doc__,
        epilog=f"Further options are those of 'meridian bench serve'. Defaults here: {_DEFAULTS} "
        f"--pause-tokens {_PAUSE_TOKENS}",
    )
    parser.add_argument("--seeds", default="6", help="traces per arm, a whole number above 0")
    parser.add_argument(
        "--noop", action="store_true", help="one more arm: our scheduler deciding as stock does"
    )
    parser.add_argument(
        "--bare",
        action="store_true",
        help=f"steps take what they take here, and not as long as on {DEFAULT_DEVICE}",
    )
    own, others = parser.parse_known_args(arguments)
    pairs = read_whole("--seeds", own.seeds)
    has_trace = any(option.startswith("--trace") for option in others)
    last = _FIRST_SEED + pairs - 1
    traces = ["--pairs", own.seeds] if has_trace else ["--seeds", f"{_FIRST_SEED}-{last}"]
    serve = add_serve(argparse.ArgumentParser(prog=parser.prog).add_subparsers())
    serve.set_defaults(arms=None)
    parsed = serve.parse_args([*_DEFAULTS.split(), *traces, *others])
    if not has_trace and parsed.pause is None and parsed.pause_tokens is None:
        parsed.pause_tokens = _PAUSE_TOKENS
    if parsed.emulate is None and parsed.model is None and not own.bare:
        parsed.emulate = DEFAULT_DEVICE
    parsed.emulate_beside_gpu = parsed.emulate is not None
    if parsed.emulate is not None and parsed.blocks is None:
        # The device's own pool would hold all of so short a trace.
        parsed.blocks = str(SIZES[parsed.workload][0])
    if parsed.arms is None:
        parsed.arms = f"{_ARMS},{NOOP}" if own.noop else _ARMS
        if parsed.model is None and not parsed.arm:
            parsed.arm = [f"{_EXIT_ARM}:config={_PROFILE}"]
    return parsed


if __name__ == "__main__":
    main()
