"""scripts/bench_kernels.py: what it says without a GPU, and that it runs with one."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import DEVICE

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_kernels.py"
HAS_GPU = DEVICE.type == "cuda"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", str(SCRIPT), *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_gpu() -> None:
    run = bench()
    assert run.returncode == 1
    assert run.stdout == ""
    assert run.stderr == (
        "bench_kernels: torch sees no CUDA GPU here, and only a GPU's times mean anything\n"
    )


@pytest.mark.nightly
@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_rehearsal(tmp_path: Path) -> None:
    """The same code on the CPU: results checked, one row per operation, type and variant."""
    file = tmp_path / "rows.csv"
    run = bench(
        *("--rehearse", "--no-compile", "--rounds", "2", "--rows", "2", "--columns", "5000"),
        *("--csv", str(file)),
    )
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(file.open()))
    variants = {(row["op"], row["dtype"], row["variant"]) for row in rows}
    assert len(rows) == len(variants) == 2 * 2 * 2
    assert {row["how"] for row in rows} == {"rehearsed"}


@pytest.mark.skipif(not HAS_GPU, reason="needs a CUDA GPU")
def test_writes_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    run = bench("--rounds", "3", "--rows", "3", "--columns", "1000", "--csv", str(file))
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader(file.open()))
    variants = {(row["op"], row["dtype"], row["variant"]) for row in rows}
    assert len(rows) == len(variants) == 2 * 2 * 3
    assert all(float(row["p20_us"]) <= float(row["p50_us"]) for row in rows)
