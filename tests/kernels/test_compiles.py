"""The kernels compile for NVIDIA GPUs, also where there is none: the interpreter would not tell."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "support" / "jobs" / "compile_kernels.py"
# Ampere and Hopper.
CAPABILITIES = ("80", "90")
# Three kernels that read rows, for two types and three widths, and one that merges.
VARIANTS = 2 * 2 * (3 * 3 + 1)
# 9 and 10 as compiled; conversion to float32 is what bfloat16 has more. It was 19.4 and 20.9 with a
# maximum and sums that all threads shared in each turn.
MOST_INSTRUCTIONS = {"float32": 9.5, "bfloat16": 10.5}
# With 256 threads of so many registers, 8 programs fit on a multiprocessor: all its threads.
MOST_REGISTERS = 32


@pytest.fixture(scope="module")
def variants(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        command = [sys.executable, "-P", str(SCRIPT), *CAPABILITIES]
        run = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    found = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(found) == VARIANTS
    return found


@pytest.fixture(scope="module")
def readers(variants: list[dict]) -> list[dict]:
    return [variant for variant in variants if variant["kernel"] != "_merge_parts_kernel"]


def test_compiles_without_spilling(variants: list[dict]) -> None:
    for variant in variants:
        assert {"STACK:0", "LOCAL:0"} <= set(variant["usage"]), variant


def test_a_multiprocessor_has_room_for_all_its_threads(variants: list[dict]) -> None:
    for variant in variants:
        assert variant["registers"] <= MOST_REGISTERS, variant


def test_instructions_per_element(readers: list[dict]) -> None:
    """In the machine code of the loop: arithmetic does not hold up reading."""
    for variant in readers:
        # The loop was found: it cannot do with fewer.
        assert variant["instructions_per_element"] > 6, variant
        assert variant["instructions_per_element"] <= MOST_INSTRUCTIONS[variant["logits"]], variant
        # One exponential per element, and one per two words of 16 bytes to rescale the sums.
        assert 1 < variant["exponentials_per_element"] <= 1.125, variant


def test_logits_are_read_16_bytes_at_a_time(readers: list[dict]) -> None:
    """Also where the vocabulary is no multiple of 16: only the last block of a row has a mask."""
    for variant in readers:
        assert variant["loads"] == variant["wide_loads"] >= 2, variant


def test_threads_do_not_wait_for_each_other_in_the_loop(readers: list[dict]) -> None:
    for variant in readers:
        assert variant["barriers"] == 0, variant
