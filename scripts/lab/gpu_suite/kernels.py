"""The kernels: their tests, and their times beside torch's and a copy's."""

import csv
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gpu_suite.suite import Context, Record, SkippedError
from meridian_patch.bench.child import Child, log_tail
from meridian_patch.errors import BenchError

_END_S = 10.0
# A served vocabulary: Qwen 3's.
_COLUMNS = 151936
_ROWS: tuple[int, ...] = (8, 64, 256, 1024)
_REHEARSED_COLUMNS = 5000
_REHEARSED_ROWS: tuple[int, ...] = (2, 3)
_REHEARSED_TESTS = "one_hot and 1000"
# Of the compiler and of the bench, which is the next part.
_NOT_OF_THE_GPU = ("test_compiles.py", "test_bench_kernels.py")
_COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")


def run_tests(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """``pytest tests/kernels``; in a rehearsal a few of them, in Triton's interpreter.

    Raises:
        BenchError: a test failed.
        SkippedError: there is no checkout.
    """
    root = _checkout(context)
    options = ["-q", "-p", "no:cacheprovider"]
    for name in _NOT_OF_THE_GPU:
        options += ["--ignore", f"tests/kernels/{name}"]
    options += ["-k", _REHEARSED_TESTS] if context.rehearse else []
    log = context.folder / "kernel-tests.log"
    command = ["-m", "pytest", *options, "tests/kernels"]
    try:
        code = _run(command, root, context.base_env, log, remaining_s())
    except BenchError:
        record.add("tests passed before the end", "", [_count_dots(log)])
        raise
    counts = {word: int(count) for count, word in _COUNTS.findall(log_end(log))}
    for word, count in counts.items():
        record.add(f"tests {word}", "", [count])
    if code:
        raise BenchError(f"pytest tests/kernels ended with exit code {code}. {log_tail(log)}")
    if not counts.get("passed"):
        raise BenchError(f"no kernel test ran. {log_tail(log)}")
    return f"{counts['passed']} tests passed, {counts.get('skipped', 0)} skipped"


def run_bench(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """``scripts/bench_kernels.py``, which compares each result with float64 first.

    Raises:
        BenchError: a result was wrong, or the benchmark failed.
        SkippedError: there is no checkout.
    """
    root = _checkout(context)
    log, rows_file = context.folder / "kernel-bench.log", context.folder / "kernel-bench.csv"
    env = dict(context.base_env)
    columns, rows = (_REHEARSED_COLUMNS, _REHEARSED_ROWS) if context.rehearse else (_COLUMNS, _ROWS)
    options = ["--columns", str(columns), "--rows", *map(str, rows)]
    if context.rehearse:
        options += ["--rehearse", "--rounds", "2"]
        env |= {} if context.accelerator else {"TRITON_INTERPRET": "1"}
    command = ["scripts/bench_kernels.py", *options]
    found = []
    # torch.compile takes seconds for each size: what needs no compiler is timed before.
    fast = [*command, "--no-compile", "--csv", str(rows_file)]
    try:
        code = _run(fast, root, env, log, remaining_s())
    finally:
        found = _read_rows(rows_file)
        for row in found:
            _add_times(record, row)
    if code:
        raise BenchError(f"scripts/bench_kernels.py ended with exit code {code}. {log_tail(log)}")
    compared = 0
    if not context.rehearse:
        compiled_file = context.folder / "kernel-bench-compiled.csv"
        log = context.folder / "kernel-bench-compiled.log"
        try:
            _run([*command, "--csv", str(compiled_file)], root, env, log, remaining_s())
        except BenchError as error:
            record.notes.append(f"torch.compile: {str(error).partition('. ')[0]}.")
        for row in _read_rows(compiled_file):
            if row["variant"] == "torch.compile":
                _add_times(record, row)
                compared += 1
    return (
        f"{len(found) + compared} results equal float64's within 1e-4 and were timed, {compared} "
        "of them by torch.compile"
    )


def _add_times(record: Record, row: Mapping[str, str]) -> None:
    size = f"{row['n_rows']} x {row['n_cols']} {row['dtype'].removeprefix('torch.')}"
    name = f"{row['op']} by {row['variant']}, {size}"
    record.add(name, "us", [float(row[each]) for each in ("p20_us", "p50_us", "p80_us")])
    record.add(name, "GB/s", [float(row["gb_per_s"])])
    share = float(row["gb_per_s"]) / float(row["copy_gb_per_s"])
    record.add(f"{name}, of a copy's bandwidth", "", [share])


def _count_dots(log: Path) -> int:
    """Tests that pytest's lines of progress show as passed."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return sum(line.count(".") for line in lines if re.fullmatch(r"[.sFEx]+( *\[ *\d+%\])?", line))


def log_end(log: Path) -> str:
    """The last line of a log; empty without one."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return lines[-1] if lines else ""


def _checkout(context: Context) -> Path:
    if context.checkout is None:
        raise SkippedError("tests/ and scripts/ are not here: the package runs without a checkout")
    return context.checkout


def _run(
    arguments: Sequence[str], root: Path, env: Mapping[str, str], log: Path, limit_s: float
) -> int:
    """Exit code of a Python process in the checkout; what it started ends with it."""
    # -P keeps the repository root off sys.path: see ServerSettings.arguments.
    command = [sys.executable, "-P", *arguments]
    with Child(command, env, log, _END_S, folder=root) as child:
        code = child.wait(limit_s)
    if code is None:
        raise BenchError(f"did not end within {limit_s:.0f} s. {log_tail(log)}")
    return code


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
