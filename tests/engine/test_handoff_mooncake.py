"""A think server and its answer engine, with Mooncake: the checks of the hand-off over NIXL."""

import subprocess
import sys

import pytest
from handoff_runs import both_engines, check_a_lost_answer_engine, check_streams
from run_engine import JOBS

# Read by Python when a process of an engine starts. vLLM's connector asks torch for the number of
# the device that its threads send from, which raises where there is none. The platform that is
# told the number does nothing with it on the CPU.
ON_THE_CPU = """
import torch

if not torch.accelerator.is_available():
    torch.accelerator.current_device_index = lambda: 0
"""
# torch brings CUDA's libraries along, and vLLM imports it first.
FOUND = subprocess.run(
    [sys.executable, "-P", "-c", "import mooncake, torch, mooncake.engine"],
    check=False,
    capture_output=True,
    text=True,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.nightly,
    pytest.mark.skipif(
        FOUND.returncode != 0,
        reason="Mooncake, which moves KV blocks, does not load here "
        f"({(FOUND.stderr.strip().splitlines() or ['it ended'])[-1]}): "
        "scripts/setup --nightly, and as root scripts/ci_packages libibverbs1",
    ),
]


@pytest.fixture(scope="module")
def engines(demo_model, tmp_path_factory):
    """A think server and its answer engine."""
    folder = tmp_path_factory.mktemp("mooncake")
    (folder / "sitecustomize.py").write_text(ON_THE_CPU)
    env = {"PYTHONPATH": f"{folder}:{JOBS}"}
    with both_engines(demo_model, folder, "--fabric", "mooncake", env=env) as started:
        yield started


def test_streams_are_those_of_one_engine(engines):
    """Thought, answer and usage, token for token, with eight requests at a time."""
    check_streams(engines)


def test_a_lost_answer_engine_loses_nothing(engines):
    """Killed between and within answers: the think server goes on from the tokens sent."""
    check_a_lost_answer_engine(engines)
