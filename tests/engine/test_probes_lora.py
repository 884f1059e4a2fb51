"""Probes of a request with a LoRA adapter see the adapted model, and share its blocks."""

import json
from collections import defaultdict

import pytest
from engine_plans import AMPLE, PATIENT
from engine_watch import request_name
from probe_reference import Reference, make_adapter
from run_engine import PATCHED, Job, run_job
from workloads import ask, engine_arguments

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
# Nothing is ever converged, so thoughts are probed to their ends.
DENSE = {
    "MERIDIAN_PATCH_SET_EXIT__MODE": "observe",
    "MERIDIAN_PATCH_SET_EXIT__OBSERVED_AT_A_TIME": "1000",
    "MERIDIAN_PATCH_SET_EXIT__EAT_WARMUP_PROBES": "100000",
    "MERIDIAN_PATCH_SET_EXIT__RPDI": "false",
    "MERIDIAN_PATCH_SET_EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "MERIDIAN_PATCH_SET_EXIT__PROBE_MAX_GAP_TOKENS": "7",
}


@pytest.fixture(scope="module")
def served(demo_model, tmp_path_factory):
    """The same problems with the adapter and without, at once; probes by request name."""
    folder = tmp_path_factory.mktemp("lora")
    changes = make_adapter(demo_model, folder / "adapter")
    requests = [
        ask(f"{name}{index}", problem, max_tokens=200) | more
        for index, problem in enumerate(AMPLE)
        for name, more in (("base", {}), ("lora", {"lora": str(folder / "adapter")}))
    ]
    # Upstream's CPU kernels give requests without an adapter that of the last slot: it is empty.
    lora = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2}
    engine = engine_arguments(demo_model, **lora)
    stage = {"name": "lora", "engine": engine, "runs": [{"name": "run", "requests": requests}]}
    file = folder / "trace.jsonl"
    env = PATCHED | PATIENT | DENSE | {"MERIDIAN_PATCH_SET_EXIT__TRACE": str(file)}
    run = run_job(Job([stage], env=env, allow_async=True), folder)["stages"]["lora"]["runs"]["run"]
    probes = defaultdict(list)
    for event in map(json.loads, file.read_text().splitlines()):
        if event["event"] == "probe":
            probes[request_name(event["request"])].append(event)
    references = {"base": Reference(demo_model), "lora": Reference(demo_model, changes)}
    return run, probes, references


def wanted(served, name, reference):
    """Entropies along one request's thought, as a model in transformers has them."""
    run, probes, references = served
    prompt = references["base"].prompt(AMPLE[int(name[-1])])
    [sample] = run["outputs"][name]["samples"]
    prefixes = [prompt + sample["ids"][: probe["think_tokens"]] for probe in probes[name]]
    return references[reference].entropies_nats(prefixes)


@pytest.mark.parametrize("kind", ["base", "lora"])
def test_probes_see_the_model_of_their_request(served, kind):
    """To 1e-3, beside requests of the other model."""
    _, probes, _ = served
    for index in range(len(AMPLE)):
        name = f"{kind}{index}"
        assert len(probes[name]) > 8
        got = [probe["entropy_nats"] for probe in probes[name]]
        assert got == pytest.approx(wanted(served, name, kind), rel=1e-3, abs=1e-4)


def test_the_models_differ(served):
    """Or the comparison would show nothing."""
    pairs = zip(wanted(served, "lora0", "lora"), wanted(served, "lora0", "base"), strict=True)
    assert max(abs(adapted - plain) for adapted, plain in pairs) > 0.1


def test_probes_share_their_parents_blocks(served):
    """Blocks of an adapter are its own; still no probe computes more than one, and the boundary."""
    run, _, references = served
    assert max(run["probes"]) <= BLOCK_SIZE + len(references["base"].suffix)
    assert run["requests_left"] == run["blocks_left"] == run["probes_left"] == 0
