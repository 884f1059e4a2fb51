"""Probes of a request with a LoRA adapter see the adapted model, and share its blocks."""

import pytest
from engine_plans import AMPLE
from probe_reference import Reference, make_adapter
from probed_engine import Probed
from workloads import ask, engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

BLOCK_SIZE = 32


@pytest.fixture(scope="module")
def served(demo_model, tmp_path_factory):
    """The same problems with the adapter and without, at once."""
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
    job = Probed([stage], folder)
    references = {"base": Reference(demo_model), "lora": Reference(demo_model, changes)}
    return job, references


def wanted(served, name, reference):
    """Entropies along one request's thought, as a model in transformers has them."""
    job, references = served
    prompt = references["base"].prompt(AMPLE[int(name[-1])])
    [sample] = job.runs["lora"]["outputs"][name]["samples"]
    prefixes = [prompt + sample["ids"][: probe["think_tokens"]] for probe in job.probes(name)]
    return references[reference].entropies_nats(prefixes)


@pytest.mark.parametrize("kind", ["base", "lora"])
def test_probes_see_the_model_of_their_request(served, kind):
    """To 1e-3, beside requests of the other model."""
    job, _ = served
    for index in range(len(AMPLE)):
        name = f"{kind}{index}"
        got = [probe["entropy_nats"] for probe in job.probes(name)]
        assert len(got) > 8
        assert got == pytest.approx(wanted(served, name, kind), rel=1e-3, abs=1e-4)


def test_the_models_differ(served):
    """Or the comparison would show nothing."""
    pairs = zip(wanted(served, "lora0", "lora"), wanted(served, "lora0", "base"), strict=True)
    assert max(abs(adapted - plain) for adapted, plain in pairs) > 0.1


def test_probes_share_their_parents_blocks(served):
    """Blocks of an adapter are its own; still no probe computes more than one, and the boundary."""
    job, references = served
    run = job.runs["lora"]
    assert max(run["probes"]) <= BLOCK_SIZE + len(references["base"].suffix)
    assert run["requests_left"] == run["blocks_left"] == run["probes_left"] == 0
