"""Times the kernels against torch and torch.compile on a GPU; writes CSV rows.

    python -P scripts/bench_kernels.py [--csv FILE] [--rounds N] [--rows N..] [--columns N..]
    python -P scripts/bench_kernels.py --tune
    TRITON_INTERPRET=1 python -P scripts/bench_kernels.py --rehearse --rows 2 --columns 5000

Each variant is compared with float64 first; --no-check leaves that out. Every call finds a cold L2
cache, and the variants take turns. GB/s counts what an operation must read and write once; beside
it stands the bandwidth of a large copy on the same device. --rehearse runs the same code without a
GPU; its times say nothing of the kernels.
"""

import argparse
import csv
import itertools
import shlex
import statistics
import subprocess
import sys
import time
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
ROWS = (8, 64, 256, 1024)
# More probes than an engine runs at a time.
MOST_UPDATES = 256
# Rows whose float64 copies are in memory at once.
EXACT_ROWS = 64
# vLLM's samplers hold logits in float32; models write bfloat16.
TYPES = (torch.bfloat16, torch.float32)
BOUNDARY_ID = 7
SETTINGS = {"alpha": 0.2, "warm_up": 2, "max_entropy": 100.0}
# Several times the L2 cache of any GPU so far.
FLUSH_BYTES = 2**28
COPY_BYTES = 2**30
REHEARSED_BYTES = 2**20
WARM_UP_CALLS = 3
TOLERANCE = 1e-4
TUNED_WIDTHS = (1024, 8192, 151936)
TUNED_BLOCKS = (1024, 2048, 4096, 8192)
TUNED_WARPS = (2, 4, 8, 16)
# Programs per multiprocessor that few rows are split for.
TUNED_PROGRAMS = (1, 2, 4, 8)

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

    how: str
    device: str
    driver: str
    torch: str
    triton: str
    commit: str
    date: str
    command: str = field(default_factory=lambda: shlex.join(sys.argv))


def device() -> torch.device:
    """The first GPU; the CPU where a rehearsal has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def cases(
    sizes: Iterator[tuple[torch.dtype, int, int]], *, with_compile: bool = True
) -> Iterator[Case]:
    for dtype, n_rows, n_cols in sizes:
        logits = torch.randn(n_rows, n_cols, device=device()).mul_(4).to(dtype)
        rows = torch.randperm(n_rows, device=device())
        made = [signals_case(logits, rows)]
        if n_rows <= MOST_UPDATES:
            made.append(update_case(logits, rows))
        for case in made:
            if not with_compile:
                del case.variants["torch.compile"]
            yield case


def signals_case(logits: torch.Tensor, rows: torch.Tensor) -> Case:
    out = torch.empty(len(rows), len(Signal), device=logits.device)
    arguments = (logits, rows, BOUNDARY_ID)
    variants = {
        "triton": partial(row_signals, *arguments, out=out),
        "torch": partial(row_signals_ref, *arguments, dtype=torch.float32),
        "torch.compile": partial(compiled(row_signals_ref), *arguments, dtype=torch.float32),
    }
    written = out.numel() * out.itemsize
    parts = [row_signals_ref(logits, part, BOUNDARY_ID) for part in rows.split(EXACT_ROWS)]
    return make_case("row_signals", logits, written, torch.cat(parts), variants)


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
    take_us = on_gpu_us if device().type == "cuda" else on_host_us
    flush = torch.empty(size_of(FLUSH_BYTES), dtype=torch.int8, device=device())
    for _ in range(rounds):
        for name, call in variants.items():
            samples[name].append(take_us(call, flush))
    return {name: Times.of(taken) for name, taken in samples.items()}


def on_gpu_us(call: Call, flush: torch.Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # Long enough for the host to enqueue the call before the device gets there.
    flush.zero_()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def on_host_us(call: Call, flush: torch.Tensor) -> float:
    flush.zero_()
    begin = time.perf_counter()
    call()
    return (time.perf_counter() - begin) * 1e6


def size_of(num_bytes: int) -> int:
    """Bytes of a buffer, fewer in a rehearsal."""
    return num_bytes if device().type == "cuda" else REHEARSED_BYTES


def copy_bandwidth(rounds: int) -> float:
    """GB/s of a large copy on the device, reads and writes counted."""
    source = torch.empty(size_of(COPY_BYTES), dtype=torch.int8, device=device())
    times = time_in_turns({"copy": partial(torch.empty_like(source).copy_, source)}, rounds)
    return gb_per_s(2 * len(source), times["copy"])


def gb_per_s(moved: int, times: Times) -> float:
    return moved / times.p50_us / 1e3


def origin() -> Origin:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    dirty = "+changes" if output_of(["git", "status", "--porcelain"]) else ""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return Origin(
        how=f"measured-gpu {name}" if torch.cuda.is_available() else "rehearsed",
        device=name,
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
    sizes = itertools.product(TYPES, arguments.rows, arguments.columns)
    for case in cases(sizes, with_compile=arguments.compile):
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


def tune(rounds: int, all_rows: list[int]) -> None:
    """Print the three fastest ways to read rows of each width and number.

    ``_CONFIGS`` and ``PROGRAMS_PER_MULTIPROCESSOR`` of triton_kernels/_launch.py hold the choice.
    """
    multiprocessors = torch.cuda.get_device_properties(device()).multi_processor_count
    for n_cols, n_rows in itertools.product(TUNED_WIDTHS, all_rows):
        logits = torch.randn(n_rows, n_cols, device=device()).to(torch.bfloat16)
        rows = torch.arange(n_rows, device=device())
        out = torch.empty(n_rows, len(Signal), device=device())
        ways = itertools.product(TUNED_BLOCKS, TUNED_WARPS, TUNED_PROGRAMS)
        variants = {
            f"blocks of {block}, {warps} warps, {programs} programs": partial(
                _launch_row_signals,
                *(out, logits, rows, BOUNDARY_ID),
                *(_launch.LaunchConfig(block, warps), programs * multiprocessors),
            )
            for block, warps, programs in ways
        }
        times = time_in_turns(variants, rounds)
        for name in sorted(times, key=lambda each: times[each].p50_us)[:3]:
            taken = times[name]
            spread = f"p20 {taken.p20_us:.1f}, p80 {taken.p80_us:.1f}"
            print(f"{n_rows:>5} x {n_cols:>6}: {name}: {taken.p50_us:.1f} us ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="samples of each variant")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    parser.add_argument("--csv", type=Path, help="file to write; standard output otherwise")
    parser.add_argument("--check", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="time torch.compile too, which compiles anew for each size",
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="run without a GPU, in Triton's interpreter"
    )
    parser.add_argument("--tune", action="store_true", help="time block sizes and splits instead")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.rehearse:
        sys.exit("bench_kernels: torch sees no CUDA GPU here, and only a GPU's times mean anything")
    if arguments.tune:
        tune(arguments.rounds, arguments.rows)
    elif arguments.csv is None:
        bench(arguments, sys.stdout)
    else:
        with arguments.csv.open("w", newline="") as sink:
            bench(arguments, sink)


if __name__ == "__main__":
    main()
