"""``scripts/gpu_suite``: everything that only a GPU can show, in one command and one report.

Kernel tests and times, all defaults beside stock, a cost model of the machine, what observing
costs, a server under vLLM's check for host synchronisations, stock beside patched servers, and the
lag of a forced close.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console

from gpu_suite import checks, comparison, cost, kernels, observing
from gpu_suite.cost import SIZES_OF_SHAPES
from gpu_suite.report import describe_origin, write_report
from gpu_suite.shapes import SHAPES, write_shape
from gpu_suite.suite import FAILED, Context, Part, Record, Served, run_suite
from meridian_patch import envs
from meridian_patch.bench.interrupts import EXIT_FAILED, EXIT_INTERRUPTED, run_program
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.options import read_positive, read_whole
from meridian_patch.bench.served.plan import any_settings, find_model, packaged_model
from meridian_patch.bench.served.server import NOT_STARTED, ServerSettings
from meridian_patch.errors import BenchError

_MINUTES = "45"
_SCRIPT = "scripts/gpu_suite"
# Tokens of a request of a model that was given.
_CONTEXT = 8192

# The part whose servers are the first to start with vLLM's compilation.
_FIRST_SERVERS = "served"

# What is worth most comes first: an early end leaves it.
PARTS = (
    Part("kernel-tests", "the kernels compute what float64 does", 0.10, kernels.run_tests),
    Part("kernel-bench", "how near to a copy's bandwidth they come", 0.12, kernels.run_bench),
    Part(
        "served",
        "what a patched server changes, beside what two runs of stock differ by",
        0.40,
        comparison.run_comparison_part,
    ),
    Part(
        "sync-check",
        "probes and measuring never wait for the GPU, and requests survive the context's end",
        0.17,
        checks.run_sync_check,
    ),
    Part("close-lag", "how many tokens a forced close takes", 0.14, checks.run_close_lag),
    Part("observing", "what observing early exit costs", 0.18, observing.run_observing),
    Part("cost-model", "how long a step of this machine takes", 0.16, cost.run_fit),
    Part(
        "defaults",
        "all defaults serve what stock serves, and doctor reports no failure",
        0.24,
        checks.run_defaults,
    ),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite; exits with 1 when a part failed and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = shlex.join([_SCRIPT, *arguments])
    run_program("gpu_suite", lambda: _run(_parse(arguments), command))


def _run(args: argparse.Namespace, command: str) -> int:
    minutes = read_positive("--minutes", args.minutes)
    parts = choose_parts(args.parts)
    console = Console(markup=False, emoji=False)
    date = datetime.now().astimezone()
    folder: Path = args.out or Path("out/gpu-suite") / date.strftime("%Y-%m-%d-%H%M%S")
    # Before vLLM is imported, which leaves variables of its own behind.
    base_env = dict(envs.environment())
    machine = replace(describe_machine(), accelerator=gpu_name())
    if machine.accelerator is None and not args.rehearse:
        raise BenchError(
            "torch finds no GPU here, and only a GPU's figures mean anything; --rehearse runs the "
            "same code with tiny sizes"
        )
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    context = _context(args, folder, machine.accelerator, base_env, command)
    console.print(f"{machine}\nreport: {folder}", highlight=False)
    origin = describe_origin(context, machine, date.isoformat(timespec="seconds"), minutes)

    def after_part(context: Context, records: Sequence[Record]) -> Context:
        # As it goes: an early end leaves what there is.
        adapted = adapt(context, records)
        write_report(folder, origin, records)
        return adapted

    records, was_interrupted = run_suite(context, parts, minutes, console, after_part)
    page = write_report(folder, origin, records)
    console.print(f"report: {page}", highlight=False)
    if was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(record.verdict == FAILED for record in records) else 0


def adapt(context: Context, records: Sequence[Record]) -> Context:
    """The context of later parts: without compilation where servers with it do not start."""
    for record in records:
        failed = record.name == _FIRST_SERVERS and record.verdict == FAILED
        if failed and not context.is_eager and NOT_STARTED.search(record.reason):
            record.notes.append("The later parts run with --enforce-eager.")
            return context.eager()
    return context


def gpu_name() -> str | None:
    """Name of the first GPU that torch finds; None without one."""
    import torch

    return str(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def _context(
    args: argparse.Namespace,
    folder: Path,
    accelerator: str | None,
    base_env: dict[str, str],
    command: str,
) -> Context:
    if args.shape is not None and args.model is not None:
        raise BenchError("--shape makes a model and --model gives one; leave one of them out")
    extra = tuple(shlex.split(args.serve_args))
    blocks = read_whole("--blocks", args.blocks) if args.blocks is not None else None
    thinking = _served(find_model(args.model), blocks, extra, accelerator, rehearse=args.rehearse)
    sized = thinking
    if args.shape is not None:
        model = write_shape(args.shape, folder, rehearse=args.rehearse)
        # The parser names the markers, which thinking_token_budget needs.
        dummy = ("--load-format", "dummy", "--reasoning-parser", "deepseek_r1", *extra)
        if not args.rehearse:
            dummy = (*SIZES_OF_SHAPES, *dummy)
        sized = _served(model, blocks, dummy, accelerator, rehearse=args.rehearse)
        sized = replace(sized, is_dummy=True)
    roots = (Path(__file__).resolve().parents[3], Path.cwd())
    checkout = next((root for root in roots if (root / "tests" / "kernels").is_dir()), None)
    context = Context(
        thinking=thinking,
        sized=sized,
        rehearse=args.rehearse,
        accelerator=accelerator,
        folder=folder,
        checkout=checkout,
        base_env=base_env,
        command=command,
        surprises=tuple(args.surprise),
    )
    # Compiling takes longer than what a rehearsal runs.
    return context.eager() if args.rehearse else context


def _served(
    model: Path,
    blocks: int | None,
    extra: tuple[str, ...],
    accelerator: str | None,
    *,
    rehearse: bool,
) -> Served:
    is_tiny = model == packaged_model()
    if not is_tiny:
        extra = ("--max-model-len", str(_CONTEXT), *extra)
    elif accelerator is not None:
        extra = ("--dtype", "bfloat16", *extra)
    settings = any_settings(model, blocks, extra)
    if is_tiny and rehearse:
        settings = replace(settings, max_num_seqs=8)
    elif is_tiny and accelerator is not None:
        # Not the sizes of a CPU: a GPU serves it with vLLM's defaults.
        settings = ServerSettings(model, blocks, reasoning_parser="deepseek_r1", extra=extra)
    return Served(model, settings, is_tiny)


def choose_parts(names: str | None) -> list[Part]:
    """The parts of these names, in their order; None: all."""
    known = {part.name: part for part in PARTS}
    if names is None:
        return list(PARTS)
    for name in names.split(","):
        if name not in known:
            raise BenchError(f"--parts: unknown part {name!r}; known: {', '.join(known)}")
    return [part for part in PARTS if part.name in names.split(",")]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_SCRIPT, description=__doc__)
    parser.add_argument(
        "--minutes", default=_MINUTES, help=f"of all parts together (default: {_MINUTES})"
    )
    parser.add_argument("--parts", help=f"comma list of {', '.join(p.name for p in PARTS)}")
    parser.add_argument("--model", help="directory, or a cached name (default: the tiny reasoner)")
    parser.add_argument("--shape", help=f"random weights of this size: {', '.join(SHAPES)}")
    parser.add_argument("--blocks", help="KV pool of each server (default: vLLM's choice)")
    parser.add_argument(
        "--serve-args", default="", metavar="OPTIONS", help="vLLM's options, for every server"
    )
    parser.add_argument("--out", type=Path, help="folder (default: out/gpu-suite/DATE)")
    parser.add_argument(
        "--surprise",
        action="append",
        default=[],
        metavar="SENTENCE",
        help="shown on the page, for a machine that differs from what was expected",
    )
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, also without a GPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
