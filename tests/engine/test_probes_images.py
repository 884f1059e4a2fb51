"""Probes of a request with a picture see it, through their parent's blocks and nothing else.

Out of reach here: models that count positions by height and width too (M-RoPE), as their
processors want torchvision.
"""

import pytest
from engine_plans import AMPLE
from probed_engine import Probed
from seeing_reference import SeeingReference
from tiny_vlm import IMAGE, IMAGE_TOKENS, make_vlm
from workloads import ask, engine_arguments

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

BLOCK_SIZE = 32
# Tokens behind a picture that ends its question: of the turn's end and the answer's beginning.
BEHIND = 4
# Think tokens at which the first probe is due.
FIRST = 7
EARLY, LATE = IMAGE + AMPLE[0].question, AMPLE[0].question + IMAGE
# Requests' questions and pictures.
SEEN = {
    "early1": (EARLY, 1),
    "early2": (EARLY, 2),
    "late1": (LATE, 1),
    "late2": (LATE, 2),
    "late3": (LATE, 3),
    # Once more, while its blocks are there.
    "twin2": (LATE, 2),
}
BLIND = AMPLE[1]
# Without torchvision vLLM's own LLaVA does not load. The encoder's cache has room for one picture:
# who needs an earlier one again runs the encoder again.
SMALL = {"model_impl": "transformers", "max_num_batched_tokens": IMAGE_TOKENS}


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    # By its name the tiny reasoner's family is found.
    folder = tmp_path_factory.mktemp("model") / "seeing-tiny-reasoner"
    make_vlm(demo_model, folder)
    return folder


@pytest.fixture(scope="module")
def reference(model):
    return SeeingReference(model)


@pytest.fixture(scope="module", params=["v1", "v2"])
def job(request, model, tmp_path_factory):
    """Model Runner V2 is slow here: its thoughts are cut."""
    is_v2 = request.param == "v2"
    params = {"max_tokens": 70 if is_v2 else 200}
    requests = [
        ask(name, question, at_step=2 * number, **params) | {"image": seed}
        for number, (name, (question, seed)) in enumerate(SEEN.items())
    ]
    requests.append(ask("blind", BLIND, **params))
    engine = engine_arguments(model, max_model_len=512, async_scheduling=True, **SMALL)
    stage = {"name": "images", "engine": engine, "runs": [{"name": "run", "requests": requests}]}
    return Probed([stage], tmp_path_factory.mktemp(request.param), model_runner_v2=is_v2)


@pytest.fixture(scope="module")
def run(job):
    return job.runs["images"]


def entropies(job, name):
    return [probe["entropy_nats"] for probe in job.probes(name)]


def wanted(job, reference, name, seed=None):
    """Entropies along one request's thought, as transformers has them.

    Args:
        seed: of another picture, to think the same about.
    """
    if name in SEEN:
        question, own = SEEN[name]
        prompt, pixels = reference.look(question, seed or own)
    else:
        prompt, pixels = reference.prompt(BLIND), None
    output = job.runs["images"]["outputs"][name]
    assert output["prompt_tokens"] == len(prompt)
    [sample] = output["samples"]
    prefixes = [prompt + sample["ids"][: probe["think_tokens"]] for probe in job.probes(name)]
    return reference.entropies_nats(prefixes, pixels)


def test_probes_see_what_their_request_sees(job, reference):
    """To 1e-3, beside requests with other pictures and with none."""
    for name in (*SEEN, "blind"):
        got = entropies(job, name)
        assert len(got) > 5, name
        assert got == pytest.approx(wanted(job, reference, name), rel=1e-3, abs=1e-4), name


def test_pictures_matter(job, reference):
    """Or the comparison would show nothing: with another picture entropies are others."""
    for name in ("early1", "late1"):
        got, other = entropies(job, name), wanted(job, reference, name, seed=2)
        assert max(abs(a - b) for a, b in zip(got, other, strict=True)) > 0.1, name


def test_the_same_picture_is_probed_alike(job, run):
    """The second request shares the blocks of the first, and its probes share its own."""
    first, second = (run["outputs"][name] for name in ("late2", "twin2"))
    assert second["cached_tokens"] == second["prompt_tokens"] // BLOCK_SIZE * BLOCK_SIZE
    [one], [other] = first["samples"], second["samples"]
    assert one["ids"] == other["ids"]
    assert entropies(job, "late2") == pytest.approx(entropies(job, "twin2"), rel=1e-3, abs=1e-4)


def test_the_encoder_is_run_for_no_probe(run, reference):
    """Once for each request at most; and no probe computes more than a block and the boundary."""
    assert set(run["encoded"]) <= set(SEEN)
    assert set(run["encoded"].values()) == {1}
    assert len(run["probes"]) >= run["counted"]["probe:measured"] > 0
    assert max(run["probes"]) <= BLOCK_SIZE + len(reference.suffix)


def test_no_probe_begins_within_a_picture(job, run):
    """The first ones would; they are left out until the block that the picture ends in is full."""
    for name in [name for name, (question, _) in SEEN.items() if question == LATE]:
        prompt = run["outputs"][name]["prompt_tokens"]
        first = job.probes(name)[0]["think_tokens"]
        begins = [(prompt + length) // BLOCK_SIZE * BLOCK_SIZE for length in (FIRST, first)]
        assert begins[0] < prompt - BEHIND <= begins[1]


def test_nothing_is_left(run):
    for what in ("requests", "blocks", "encoded", "routed", "watched", "probes", "told"):
        assert run[f"{what}_left"] == 0, what
    assert "fallback:exception" not in run["counted"]
