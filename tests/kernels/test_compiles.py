"""The kernels compile for NVIDIA GPUs, also where there is none: the interpreter would not tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "compile_kernels.py"
# Ampere and Hopper.
CAPABILITIES = ("80", "90")


def test_compiles_without_spilling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sizes of type, each width of row: nothing spilled, logits read 16 bytes at a time."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-P", str(SCRIPT), *CAPABILITIES]
    run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    variants = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(variants) == 2 * 2 * 2 * 3
    for variant in variants:
        assert {"STACK:0", "LOCAL:0"} <= set(variant["usage"]), variant
        assert variant["wide_loads"] >= 1, variant
