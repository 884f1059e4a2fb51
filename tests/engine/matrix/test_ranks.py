"""Several workers and several engines: what rank 0 decides reaches all of them."""

import pytest
from matrix_checks import STARTS_RANKS, assert_cores_work, assert_works, measured, probed
from matrix_plans import cell as stage
from matrix_plans import streaming_crowd

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
WORKERS = {"distributed_executor_backend": "mp"}


def test_tensor_parallel(both_jobs, tiny, cell):
    stages = [stage("ranks", tiny("dense"), async_scheduling=True, **TENSOR, **WORKERS)]
    pair = both_jobs("tensor", stages)["ranks"]
    cell.works("tensor parallel 2", assert_works(pair), probed(pair))


def test_pipeline_parallel(both_jobs, tiny, cell):
    """Two batches are under way at once, each half of the crowd."""
    two = stage("ranks", tiny("dense"), async_scheduling=False, **PIPELINE, **WORKERS)
    pair = both_jobs("pipeline", [two | {"profiles": True}])["ranks"]
    cell.works("pipeline parallel 2", assert_works(pair), probed(pair))


def test_ray(both_jobs, tiny, cell):
    """Ray's places are names of accelerators that are not there: vLLM asks for some."""
    pytest.importorskip("ray", reason="scripts/test --all installs Ray")
    stages = [stage("ranks", tiny("dense"), **TENSOR, distributed_executor_backend="ray")]
    pair = both_jobs("ray", stages, ray_workers=2)["ranks"]
    cell.works("Ray executor, two workers", assert_works(pair), probed(pair))


@STARTS_RANKS
def test_data_parallel(both_jobs, tiny, cell):
    """Two engine cores in lock step share each expert; waves end when both are done."""
    arguments = {"data_parallel_size": 2}
    run = streaming_crowd()
    for number, request in enumerate(run["requests"]):
        request["rank"] = number % 2
    # After the first wave.
    late = dict(run["requests"][0], name="late", at_step=run["requests"][-1]["at_step"] + 100)
    run["requests"].append(late)
    stages = [stage("ranks", tiny("moe"), [run], async_scheduling=True, **arguments)]
    pair = both_jobs("data", stages, is_async=True, share_experts=True)["ranks"]
    note = assert_cores_work(pair, number=2)
    cell.works("data parallel 2, mixture of experts", note, measured(pair))
