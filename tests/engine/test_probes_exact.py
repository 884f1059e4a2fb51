"""What a probe measures on the real engine is what transformers says of the same tokens.

For LoRA see ``test_probes_lora.py``, for images ``test_probes_images.py``.
"""

import pytest
from engine_plans import AMPLE, PRESSURE, SMALL_POOL
from probe_reference import Reference
from probed_engine import Probed
from workloads import ask, ask_all, engine_arguments

from meridian_patch.demo.problems import make_problems

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
PROBLEMS = [*AMPLE, *make_problems(2, seed=5, steps=6)]
PRESSED = {
    "num_gpu_blocks_override": SMALL_POOL,
    "max_model_len": 1024,
    "max_num_batched_tokens": 64,
}
SYNC = {"sync": {"async_scheduling": False}}
V1 = {
    "async": {"async_scheduling": True},
    "pressed": {"async_scheduling": True, **PRESSED},
    "uncached": {"async_scheduling": True, "enable_prefix_caching": False},
}
V2 = {"max_model_len": 512, "max_num_batched_tokens": 64, "async_scheduling": True}
NOTICE = "EAT is off, thoughts are not probed: prefix caching is off"


def problems_of(name):
    return PRESSURE if name == "pressed" else AMPLE[:2] if name == "v2" else PROBLEMS


def stage(name, engine, max_tokens):
    """Requests named after their stage, for stages share a trace; one of them is sampled."""
    problems = problems_of(name)
    requests = ask_all(name, problems, every_steps=3, max_tokens=max_tokens)
    requests.append(ask(f"{name}warm", problems[0], temperature=1.0, max_tokens=max_tokens))
    return {"name": name, "engine": engine, "runs": [{"name": "run", "requests": requests}]}


def stages(model, engines):
    return [stage(name, engine_arguments(model, **each), 600) for name, each in engines.items()]


@pytest.fixture(scope="module")
def v1(demo_model, tmp_path_factory):
    return Probed(stages(demo_model, V1), tmp_path_factory.mktemp("v1"))


@pytest.fixture(scope="module")
def v1_sync(demo_model, tmp_path_factory):
    return Probed(stages(demo_model, SYNC), tmp_path_factory.mktemp("v1_sync"))


@pytest.fixture(scope="module")
def v2(demo_model, tmp_path_factory):
    alone = [stage("v2", engine_arguments(demo_model, **V2), 100)]
    return Probed(alone, tmp_path_factory.mktemp("v2"), model_runner_v2=True)


@pytest.fixture(scope="module")
def reference(demo_model):
    return Reference(demo_model)


JOBS = {"async": "v1", "pressed": "v1", "sync": "v1_sync", "v2": "v2"}


@pytest.fixture(
    params=[
        pytest.param(name, marks=[pytest.mark.nightly] * (name in {"sync", "v2"})) for name in JOBS
    ]
)
def observed(request):
    return request.param, request.getfixturevalue(JOBS[request.param])


def probes_of(observed):
    """Request name -> its probes, of one stage."""
    name, job = observed
    return {request: job.probes(request) for request in job.runs[name]["outputs"]}


def test_every_probe_is_what_transformers_says(observed, reference):
    """Entropies on the same prefix and trial boundary, to 1e-3, along whole thoughts."""
    name, job = observed
    problems = problems_of(name)
    prompts = {f"{name}{n}": reference.prompt(problem) for n, problem in enumerate(problems)}
    prompts[f"{name}warm"] = prompts[f"{name}0"]
    wrong = []
    for request, probes in probes_of(observed).items():
        output = job.runs[name]["outputs"][request]
        assert output["prompt_tokens"] == len(prompts[request])
        # Under pressure a thought may end before a probe of it finds a place.
        assert probes or name == "pressed", request
        [sample] = output["samples"]
        lengths = [probe["think_tokens"] for probe in probes]
        assert lengths == sorted(set(lengths))
        assert all(length <= len(sample["ids"]) for length in lengths)
        prefixes = [prompts[request] + sample["ids"][:length] for length in lengths]
        for probe, wanted in zip(probes, reference.entropies_nats(prefixes), strict=True):
            if probe["entropy_nats"] != pytest.approx(wanted, rel=1e-3, abs=1e-4):
                wrong.append((request, probe["think_tokens"], probe["entropy_nats"], wanted))
    assert not wrong


def test_thoughts_are_probed_under_pressure(v1):
    """All long ones, and nearly all short ones."""
    outputs = v1.runs["pressed"]["outputs"]
    lengths = {name: len(each["samples"][0]["ids"]) for name, each in outputs.items()}
    unprobed = [name for name, probes in probes_of(("pressed", v1)).items() if not probes]
    assert len(unprobed) <= len(lengths) // 6
    assert all(lengths[name] < 100 for name in unprobed)


def test_entropies_are_worth_comparing(observed):
    """They are both high and low, and every result that was counted is in the trace."""
    name, job = observed
    probes = [probe for each in probes_of(observed).values() for probe in each]
    assert len(probes) == job.runs[name]["counted"]["probe:measured"]
    entropies = [probe["entropy_nats"] for probe in probes]
    assert min(entropies) < 0.1
    assert max(entropies) > 1.5


def test_probes_compute_a_block_and_the_boundary_at_most(observed, reference):
    """What the schedulers gave each of them, seen from outside."""
    name, job = observed
    probes = job.runs[name]["probes"]
    assert len(probes) >= job.runs[name]["counted"]["probe:measured"] > 0
    assert max(probes) <= BLOCK_SIZE + len(reference.suffix)


def test_thoughts_are_whole(observed):
    """Each request has one end in the trace, with its thought's length, and nothing is left."""
    name, job = observed
    run = job.runs[name]
    for request, output in run["outputs"].items():
        [end] = [event for event in job.trace[request] if event["event"] == "end"]
        ids = output["samples"][0]["ids"]
        thought = ids[: ids.index(257) + 1] if 257 in ids else ids
        assert end["think_tokens"] == len(thought)
        assert end["reason"] == ("natural" if 257 in ids else "unanswered")
    for what in ("requests_left", "blocks_left", "routed_left", "watched_left", "probes_left"):
        assert run[what] == 0, what
    assert "fallback:exception" not in run["counted"]


def test_parents_were_preempted_while_probes_were_due(v1):
    """Under KV pressure; what came of these probes is compared above."""
    assert v1.runs["pressed"]["probed_preemptions"] > 0


def test_without_prefix_caching_nothing_is_probed(v1):
    """The log says so once; thoughts are followed all the same, to their ends."""
    assert v1.log.count(NOTICE) == 1
    run = v1.runs["uncached"]
    assert run["probes"] == []
    assert not any(name.startswith("probe") for name in run["counted"])
    assert not any(probes_of(("uncached", v1)).values())
    assert sum(n for name, n in run["counted"].items() if name.startswith("exit:")) > 0
    assert run["requests_left"] == run["blocks_left"] == run["watched_left"] == 0
