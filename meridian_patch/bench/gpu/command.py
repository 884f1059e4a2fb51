"""``scripts/gpu_suite``: everything that only a GPU can show, in one command and one report.

Kernel tests and times, a server under vLLM's check for host synchronisations, the lag of a forced
close, stock beside patched servers, and a cost model of the machine.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console

from meridian_patch import envs
from meridian_patch.bench.gpu import cost, kernels, served
from meridian_patch.bench.gpu.report import describe_origin, write_report
from meridian_patch.bench.gpu.shapes import SHAPES, write_shape
from meridian_patch.bench.gpu.suite import FAILED, Context, Part, run_suite
from meridian_patch.bench.interrupts import EXIT_FAILED, EXIT_INTERRUPTED, run_program
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.options import read_positive, read_whole
from meridian_patch.bench.served.plan import any_settings, find_model, packaged_model
from meridian_patch.engine.device import accelerator_name
from meridian_patch.errors import BenchError

_MINUTES = "45"
_SCRIPT = "scripts/gpu_suite"
# Tokens of a request: three servers on one GPU have no room for a model's whole context.
_CONTEXT = 8192

PARTS = (
    Part("kernel-tests", "the kernels compute what float64 does", 0.12, kernels.run_tests),
    Part("kernel-bench", "how near to a copy's bandwidth they come", 0.10, kernels.run_bench),
    Part(
        "sync-check",
        "probes and measuring never wait for the GPU, and requests survive the context's end",
        0.16,
        served.run_sync_check,
    ),
    Part("close-lag", "how many tokens a forced close takes", 0.12, served.run_close_lag),
    Part(
        "served",
        "what patched servers change, beside what two stock servers differ by",
        0.34,
        served.run_comparison_part,
    ),
    Part("cost-model", "how long a step of this machine takes", 0.16, cost.run_fit),
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the suite; exits with 1 when a part failed and 130 on Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    command = shlex.join([_SCRIPT, *arguments])
    run_program("gpu_suite", lambda: _run(_parse(arguments), command))


def _run(args: argparse.Namespace, command: str) -> int:
    minutes = read_positive("--minutes", args.minutes)
    parts = choose_parts(args.parts)
    console = Console()
    date = datetime.now().astimezone()
    folder: Path = args.out or Path("out/gpu-suite") / date.strftime("%Y-%m-%d-%H%M%S")
    # Before vLLM is imported, which leaves variables of its own behind.
    base_env = dict(envs.environment())
    machine = replace(describe_machine(), accelerator=accelerator_name())
    if machine.accelerator is None and not args.rehearse:
        raise BenchError(
            "vLLM finds no GPU here, and only a GPU's figures mean anything; --rehearse runs the "
            "same code with tiny sizes"
        )
    folder = folder.resolve()
    context = _context(args, folder, machine.accelerator, base_env, command)
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"{machine}\nreport: {folder}", highlight=False)
    origin = describe_origin(context, machine, date.isoformat(timespec="seconds"), minutes)
    records, was_interrupted = run_suite(context, parts, minutes, console)
    page = write_report(folder, origin, records)
    console.print(f"report: {page}", highlight=False)
    if was_interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED if any(record.verdict == FAILED for record in records) else 0


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
    if args.shape is not None:
        model: Path | str = write_shape(args.shape, folder, rehearse=args.rehearse)
        # The parser names the markers, which thinking_token_budget needs.
        extra = ("--load-format", "dummy", "--reasoning-parser", "deepseek_r1", *extra)
    else:
        model = find_model(args.model)
    is_tiny = model == packaged_model()
    if not is_tiny:
        extra = ("--max-model-len", str(_CONTEXT), *extra)
    elif accelerator is not None:
        extra = ("--dtype", "bfloat16", *extra)
    if args.rehearse:
        # Compiling takes longer than what is then run.
        extra = ("--enforce-eager", *extra)
    blocks = read_whole("--blocks", args.blocks) if args.blocks is not None else None
    settings = any_settings(model, blocks, extra)
    if is_tiny and args.rehearse:
        settings = replace(settings, max_num_seqs=8)
    root = Path(__file__).resolve().parents[3]
    return Context(
        model=model,
        settings=settings,
        is_tiny=is_tiny,
        is_dummy=args.shape is not None,
        rehearse=args.rehearse,
        accelerator=accelerator,
        folder=folder,
        checkout=root if (root / "tests" / "kernels").is_dir() else None,
        base_env=base_env,
        command=command,
    )


def choose_parts(names: str | None) -> list[Part]:
    """The parts of these names, in their order, with shares that add up to 1; None: all."""
    known = {part.name: part for part in PARTS}
    if names is None:
        return list(PARTS)
    for name in names.split(","):
        if name not in known:
            raise BenchError(f"--parts: unknown part {name!r}; known: {', '.join(known)}")
    chosen = [part for part in PARTS if part.name in names.split(",")]
    whole = sum(part.share for part in chosen)
    return [replace(part, share=part.share / whole) for part in chosen]


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=_SCRIPT, description=__doc__)
    parser.add_argument(
        "--minutes", default=_MINUTES, help=f"of all parts together (default: {_MINUTES})"
    )
    parser.add_argument("--parts", help=f"comma list of {', '.join(p.name for p in PARTS)}")
    parser.add_argument("--model", help="directory, or owner/name (default: the tiny reasoner)")
    parser.add_argument("--shape", help=f"random weights of this size: {', '.join(SHAPES)}")
    parser.add_argument("--blocks", help="KV pool of each server (default: vLLM's choice)")
    parser.add_argument(
        "--serve-args", default="", metavar="OPTIONS", help="vLLM's options, for every server"
    )
    parser.add_argument("--out", type=Path, help="folder (default: out/gpu-suite/DATE)")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, also without a GPU")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
