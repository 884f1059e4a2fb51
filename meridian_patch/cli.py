"""The ``meridian`` command."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meridian_patch import __version__, envs
from meridian_patch.bench.commands import add_bench
from meridian_patch.calibrate.command import add_calibrate
from meridian_patch.config.load import load_config
from meridian_patch.errors import MeridianError
from meridian_patch.operate.doctor.command import add_doctor
from meridian_patch.operate.policy_command import add_policy
from meridian_patch.operate.top.command import add_top

# Packages that some commands need and may lack: those of the engine, and of the extra `bench`.
_OPTIONAL = frozenset(
    ("aiohttp", "jinja2", "matplotlib", "numpy", "tokenizers", "torch", "transformers", "vllm")
)
# Entries of a list in a table's cell.
_MOST_SHOWN = 8


def main(argv: list[str] | None = None) -> None:
    """Entry point; exits with 1 and one sentence on an error of ours, or about a file."""
    arguments = sys.argv[1:] if argv is None else argv
    if arguments[:1] == ["serve"]:
        _exit_with(lambda: _serve(arguments[1:]))
    parsed = _parser().parse_args(arguments)
    _exit_with(lambda: parsed.run(parsed))


def _exit_with(command: Callable[[], int]) -> None:
    try:
        sys.exit(command())
    except MeridianError as error:
        print(f"meridian: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        # Of a file or folder that was named on the command line, such as --out.
        if error.filename is None:
            raise
        print(f"meridian: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(1)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _OPTIONAL:
            raise
        print(
            f"meridian: the package {error.name} is missing; this command needs vLLM beside it, "
            "and a bench or calibration also 'pip install meridian-patch[bench]'",
            file=sys.stderr,
        )
        sys.exit(1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meridian", description="Phase-aware scheduling for stock vLLM."
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve", help="vllm serve, patched: meridian serve MODEL [vLLM's own options]"
    )
    serve.set_defaults(run=lambda _: _serve([]))

    status = commands.add_parser("status", help="what is live in which process")
    status.add_argument("--json", action="store_true", dest="as_json", help="all, for programs")
    status.add_argument("--verbose", action="store_true", help="each patch and what was checked")
    status.set_defaults(run=_status)

    add_doctor(commands)
    add_top(commands)
    add_policy(commands)

    boundaries = commands.add_parser(
        "boundaries", help="which think boundaries a model would be served with, and why"
    )
    boundaries.add_argument("model", help="model directory, or a name in the Hugging Face cache")
    boundaries.add_argument("--reasoning-parser", help="as given to vLLM")
    boundaries.add_argument("--family", help="take this family file, whatever matches")
    boundaries.add_argument("--json", action="store_true", dest="as_json")
    boundaries.set_defaults(run=_boundaries)

    config = commands.add_parser("config", help="every configuration value and its origin")
    config.set_defaults(run=_config)

    add_calibrate(commands)
    add_bench(commands)
    return parser


def _serve(arguments: list[str]) -> int:
    from meridian_patch.serve import serve

    return serve(arguments)


def _boundaries(parsed: argparse.Namespace) -> int:
    from meridian_patch.engine.boundaries_command import run

    return run(parsed.model, parsed.reasoning_parser, parsed.family, parsed.as_json)


def _config(parsed: argparse.Namespace) -> int:
    del parsed
    table = Table("key", "value", "origin")
    for key, value, origin in load_config(envs.environment()).rows():
        # Not as rich's markup: a value may hold brackets.
        table.add_row(*map(Text, (key, _shown(value), _in_line(origin))))
    Console().print(table)
    return 0


def _shown(value: Any) -> str:
    """A value for the table, in one line; of a long list, how long it is."""
    is_long = isinstance(value, list) and len(value) > _MOST_SHOWN
    return f"{len(value)} entries" if is_long else _in_line(str(value))


def _in_line(text: str) -> str:
    """The same with escapes, as Python writes them, for what may steer a terminal."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def _status(parsed: argparse.Namespace) -> int:
    from meridian_patch.operate.status_command import run

    return run(as_json=parsed.as_json, verbose=parsed.verbose)


if __name__ == "__main__":
    main()
