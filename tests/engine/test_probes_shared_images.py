"""Pictures that workers read in shared memory are not read again for probes."""

import pytest
from engine_plans import AMPLE
from probed_engine import Probed
from tiny_vlm import IMAGE, make_vlm
from workloads import ask, engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

# Workers of their own find pictures in memory that vLLM's front shares with them; it holds about 40
# here.
SHARED = {
    "model_impl": "transformers",
    "distributed_executor_backend": "mp",
    "mm_processor_cache_type": "shm",
    "mm_processor_cache_gb": 0.0005,
    "mm_shm_cache_max_object_size_mb": 1,
}
QUESTION = IMAGE + AMPLE[0].question
CROWD = 60


@pytest.fixture(scope="module")
def job(demo_model, tmp_path_factory):
    """One long thought about a picture, one about none, and many pictures more meanwhile."""
    folder = tmp_path_factory.mktemp("shared")
    model = folder / "seeing-tiny-reasoner"
    make_vlm(demo_model, model)
    requests = [
        ask("seeing", QUESTION, max_tokens=200) | {"image": 0},
        ask("blind", AMPLE[1], max_tokens=200),
        *[
            ask(f"other{n}", QUESTION, at_step=n, max_tokens=1) | {"image": n}
            for n in range(1, CROWD)
        ],
    ]
    engine = engine_arguments(model, **SHARED)
    stage = {"name": "shared", "engine": engine, "runs": [{"name": "run", "requests": requests}]}
    return Probed([stage], folder)


def test_the_engine_lives_on(job):
    """A worker that finds another picture than was asked for takes the engine down with it."""
    run = job.runs["shared"]
    assert len(run["outputs"]) == CROWD + 1
    assert all(output["finished"] for output in run["outputs"].values())
    assert len(run["outputs"]["seeing"]["samples"][0]["ids"]) == 200
    assert run["requests_left"] == run["blocks_left"] == run["probes_left"] == 0


def test_only_thoughts_without_pictures_are_probed(job):
    assert not job.probes("seeing")
    assert len(job.probes("blind")) > 8
