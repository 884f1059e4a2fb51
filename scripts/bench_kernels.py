"""Times the kernels against torch and torch.compile on a GPU; writes CSV rows.

    python -P scripts/bench_kernels.py [--csv FILE] [--rounds N] [--rows N..] [--columns N..]
    python -P scripts/bench_kernels.py --tune

Each variant is compared with float64 first; --no-check leaves that out. Every call finds a cold L2
cache, and the variants take turns. GB/s counts what an operation must read and write once; beside
it stands the bandwidth of a large copy on the same device.
"""

import argparse
import csv
import itertools
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from meridian_patch.kernels import _launch
from meridian_patch.kernels.eat_update import EatColumn, eat_update, eat_update_ref
from meridian_patch.kernels.row_signals import (
    Signal,
    _launch_row_signals,
    row_signals,
    row_signals_ref,
)

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = (32000, 128256, 151936, 262144)
ROWS = (1, 8, 64, 256)
# vLLM's samplers hold logits in float32; models write bfloat16.
TYPES = (torch.bfloat16, torch.float32)
BOUNDARY_ID = 7
SETTINGS = {"alpha": 0.2, "warm_up": 2, "max_entropy": 100.0}
# Several times the L2 cache of any GPU so far.
FLUSH_BYTES = 2**28
COPY_BYTES = 2**30
WARM_UP_CALLS = 3
TOLERANCE = 1e-4
TUNED_WIDTHS = (1024, 8192, 151936)
TUNED_BLOCKS = (1024, 2048, 4096, 8192, 16384)
TUNED_WARPS = (4, 8, 16, 32)

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Times:
    """Microseconds of one variant."""

    p20_us: float
    p50_us: float
    p80_us: float

    @classmethod
    def of(cls, samples_us: list[float]):
        fifths = statistics.quantiles(samples_us, n=5, method="inclusive")
        return cls(fifths[0], statistics.median(samples_us), fifths[3])


@dataclass(frozen=True)
class Case:
    """One operation on one input.

    Attributes:
        bytes_moved: that any variant must read and write.
        exact: the result in float64.
        variants: by name.
    """

    op: str
    dtype: str
    n_rows: int
    n_cols: int
    bytes_moved: int
    exact: torch.Tensor
    variants: dict[str, Call]


@dataclass(frozen=True)
class Origin:
    """Where the figures are from."""

    device: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str
    command: str = field(default_factory=lambda: shlex.join(sys.argv))


def cases(sizes: Iterator[tuple[torch.dtype, int, int]]) -> Iterator[Case]:
    for dtype, n_rows, n_cols in sizes:
        logits = torch.randn(n_rows, n_cols, device="cuda").mul_(4).to(dtype)
        rows = torch.randperm(n_rows, device="cuda")
        yield signals_case(logits, rows)
        yield update_case(logits, rows)


def signals_case(logits: torch.Tensor, rows: torch.Tensor) -> Case:
    out = torch.empty(len(rows), len(Signal), device=logits.device)
    arguments = (logits, rows, BOUNDARY_ID)
    variants = {
        "triton": partial(row_signals, *arguments, out=out),
        "torch": partial(row_signals_ref, *arguments, dtype=torch.float32),
        "torch.compile": partial(compiled(row_signals_ref), *arguments, dtype=torch.float32),
    }
    written = out.numel() * out.itemsize
    return make_case("row_signals", logits, written, row_signals_ref(*arguments), variants)


def update_case(logits: torch.Tensor, rows: torch.Tensor) -> Case:
    state = torch.zeros(len(rows), len(EatColumn), device=logits.device)
    state[:, EatColumn.DELTA] = 1e-3
    # A copy for the kernel, which updates it; it is compared after one call.
    arguments = (logits, rows, torch.arange(len(rows), device=logits.device))
    reference = partial(eat_update_ref, state, *arguments, **SETTINGS)
    in_torch = partial(reference, dtype=torch.float32)
    variants = {
        "triton": partial(eat_update, state.clone(), *arguments, **SETTINGS),
        "torch": in_torch,
        "torch.compile": partial(
            compiled(eat_update_ref), state, *arguments, **SETTINGS, dtype=torch.float32
        ),
    }
    moved = 10 * state.itemsize * len(rows)
    return make_case("eat_update", logits, moved, reference(), variants)


def make_case(
    op: str, logits: torch.Tensor, beside: int, exact: torch.Tensor, variants: dict[str, Call]
) -> Case:
    n_rows, n_cols = logits.shape
    read = logits.numel() * logits.itemsize
    return Case(op, str(logits.dtype), n_rows, n_cols, read + beside, exact, variants)


def compiled(function: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=False)


def check(case: Case) -> None:
    """End the run when a variant's first result is wrong."""
    for name, call in case.variants.items():
        got = call().double()
        if not torch.allclose(got, case.exact, rtol=TOLERANCE, atol=TOLERANCE):
            error = (got - case.exact).abs().max().item()
            size = f"{case.n_rows} x {case.n_cols} {case.dtype}"
            sys.exit(f"bench_kernels: {case.op} by {name} on {size} is off by {error:.2e}")


def time_in_turns(variants: dict[str, Call], rounds: int) -> dict[str, Times]:
    """Microseconds of each variant on the device, without what its launch takes on the host."""
    for call in variants.values():
        for _ in range(WARM_UP_CALLS):
            call()
    samples = {name: [] for name in variants}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    for _ in range(rounds):
        for name, call in variants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            # Long enough for the host to enqueue the call before the device gets there.
            flush.zero_()
            start.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end) * 1e3)
    return {name: Times.of(taken) for name, taken in samples.items()}


def copy_bandwidth(rounds: int) -> float:
    """GB/s of a large copy on the device, reads and writes counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.int8, device="cuda")
    times = time_in_turns({"copy": partial(torch.empty_like(source).copy_, source)}, rounds)
    return gb_per_s(2 * COPY_BYTES, times["copy"])


def gb_per_s(moved: int, times: Times) -> float:
    return moved / times.p50_us / 1e3


def origin() -> Origin:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    dirty = "+changes" if output_of(["git", "status", "--porcelain"]) else ""
    return Origin(
        device=torch.cuda.get_device_name(),
        driver=output_of(query).partition("\n")[0],
        torch=torch.__version__,
        triton=_launch.triton.__version__,
        commit=output_of(["git", "rev-parse", "--short=12", "HEAD"]) + dirty,
        date=datetime.now(UTC).date().isoformat(),
    )


def output_of(command: list[str]) -> str:
    try:
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return run.stdout.strip()


def bench(arguments: argparse.Namespace, sink) -> None:
    """One CSV row per operation, size, type and variant."""
    where, copied = asdict(origin()), copy_bandwidth(arguments.rounds)
    writer = None
    for case in cases(itertools.product(TYPES, arguments.rows, arguments.columns)):
        if arguments.check:
            check(case)
        for variant, times in time_in_turns(case.variants, arguments.rounds).items():
            rate = gb_per_s(case.bytes_moved, times)
            size = {"dtype": case.dtype, "n_rows": case.n_rows, "n_cols": case.n_cols}
            taken = {name: f"{value:.2f}" for name, value in asdict(times).items()}
            rates = {"gb_per_s": f"{rate:.1f}", "copy_gb_per_s": f"{copied:.1f}"}
            row = {"op": case.op, "variant": variant, **size, **taken, **rates, **where}
            if writer is None:
                writer = csv.DictWriter(sink, row)
                writer.writeheader()
            writer.writerow(row)
            sink.flush()


def tune(rounds: int) -> None:
    """Print the fastest way to read rows of each width, as _launch.py writes it down."""
    for n_cols in TUNED_WIDTHS:
        logits = torch.randn(64, n_cols, device="cuda").to(torch.bfloat16)
        rows = torch.arange(len(logits), device="cuda")
        out = torch.empty(len(rows), len(Signal), device="cuda")
        ways = itertools.starmap(_launch.LaunchConfig, itertools.product(TUNED_BLOCKS, TUNED_WARPS))
        variants = {
            str(way): partial(_launch_row_signals, out, logits, rows, BOUNDARY_ID, way)
            for way in ways
        }
        times = time_in_turns(variants, rounds)
        for name in sorted(times, key=lambda each: times[each].p50_us)[:3]:
            taken = times[name]
            spread = f"p20 {taken.p20_us:.1f}, p80 {taken.p80_us:.1f}"
            print(f"{n_cols:>7} columns: {name} {taken.p50_us:.1f} us ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="samples of each variant")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    parser.add_argument("--csv", type=Path, help="file to write; standard output otherwise")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tune", action="store_true", help="time block sizes and warps instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_kernels: torch sees no CUDA GPU here, and only a GPU's times mean anything")
    if arguments.tune:
        tune(arguments.rounds)
    elif arguments.csv is None:
        bench(arguments, sys.stdout)
    else:
        with arguments.csv.open("w", newline="") as sink:
            bench(arguments, sink)


if __name__ == "__main__":
    main()
