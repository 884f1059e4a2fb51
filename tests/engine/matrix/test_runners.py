"""Both model runners, with synchronous and asynchronous scheduling: part of every test run."""

import pytest
from matrix_checks import assert_works, probed
from matrix_plans import cell as stage
from matrix_plans import crowd

pytestmark = pytest.mark.engine

V1, V2 = "vllm.v1.worker.cpu_model_runner", "vllm.v1.worker.cpu.model_runner"
MODES = {"synchronous": False, "asynchronous": True}
# The interpreter is slow.
SHORT = {"length": 44, "every_steps": 2}


@pytest.fixture(scope="module")
def v1(both_jobs, tiny):
    return both_jobs("v1", [stage("asynchronous", tiny("dense"), async_scheduling=True)])


@pytest.fixture(scope="module")
def v1_sync(both_jobs, tiny):
    return both_jobs("v1_sync", [stage("synchronous", tiny("dense"), async_scheduling=False)])


@pytest.fixture(scope="module")
def v2(both_jobs, tiny):
    arguments = {"async_scheduling": True, "num_gpu_blocks_override": 9}
    stages = [stage("asynchronous", tiny("dense"), [crowd(**SHORT)], **arguments)]
    return both_jobs("v2", stages, model_runner_v2=True)


@pytest.fixture(scope="module")
def v2_sync(both_jobs, tiny):
    arguments = {"async_scheduling": False, "num_gpu_blocks_override": 9}
    stages = [stage("synchronous", tiny("dense"), [crowd(**SHORT)], **arguments)]
    return both_jobs("v2_sync", stages, model_runner_v2=True)


def assert_runner(pair, module, mode):
    assert pair.stock["runner"] == pair.patched["runner"] == module
    assert pair.patched["scheduler"][0].startswith("Async") == MODES[mode]


def test_runner_v1(v1, cell):
    """Outputs are stock's with probes, aborts and preemptions all at once."""
    pair = v1["asynchronous"]
    assert_runner(pair, V1, "asynchronous")
    cell.works("model runner V1, asynchronous", assert_works(pair), probed(pair))


@pytest.mark.nightly
def test_runner_v1_synchronous(v1_sync, cell):
    pair = v1_sync["synchronous"]
    assert_runner(pair, V1, "synchronous")
    cell.works("model runner V1, synchronous", assert_works(pair), probed(pair))


def test_runner_v2(v2, cell):
    """The default of a GPU."""
    pair = v2["asynchronous"]
    assert_runner(pair, V2, "asynchronous")
    cell.works("model runner V2, asynchronous", assert_works(pair), probed(pair))


@pytest.mark.nightly
def test_runner_v2_synchronous(v2_sync, cell):
    pair = v2_sync["synchronous"]
    assert_runner(pair, V2, "synchronous")
    cell.works("model runner V2, synchronous", assert_works(pair), probed(pair))
