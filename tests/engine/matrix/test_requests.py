"""Kinds of requests, each among a crowd of others."""

import re

import pytest
from matrix_checks import assert_healthy, assert_same_outputs, assert_works, probed
from matrix_plans import END_ID, PROBLEMS, crowd
from matrix_plans import cell as stage
from probe_reference import RANK, make_adapter
from workloads import THINK_END, ask, sample

from meridian_patch.demo.problems import make_problems

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

FREE = {"ignore_eos": True}
REGEX = "[0-9] it is, and nothing else\\."
CLOSED = {"meridian_exit": "enforce", "meridian_max_think_tokens": 24}
ADAPTERS, SLOTS = 3, 2
BEAMS = {"beam_width": 3, "max_tokens": 24, "ignore_eos": True}


def with_wishes():
    """The crowd, and requests whose logits are looked at, of the prompt too."""
    run = crowd()
    run["requests"] += [
        ask("logged", PROBLEMS[13], max_tokens=40, logprobs=3, at_step=6, **FREE),
        ask("looked", PROBLEMS[14], max_tokens=40, prompt_logprobs=2, at_step=11, **FREE),
        ask("looked_again", PROBLEMS[14], max_tokens=20, prompt_logprobs=2, at_step=60, **FREE),
    ]
    return run


@pytest.fixture(scope="module")
def asked(both_jobs, tiny, tmp_path_factory):
    dense = tiny("dense")
    folder = tmp_path_factory.mktemp("adapters")
    adapters = [folder / f"adapter{number}" for number in range(ADAPTERS)]
    for number, adapter in enumerate(adapters):
        make_adapter(dense, adapter, seed=number, size=0.2)
    adapted = crowd()
    for number, request in enumerate(adapted["requests"]):
        request["lora"] = str(adapters[number % ADAPTERS])
    beams = {"name": "beams", "beams": [p.question for p in PROBLEMS[:4]], "params": BEAMS}
    lora = {"enable_lora": True, "max_lora_rank": RANK, "max_loras": SLOTS}
    is_async = {"async_scheduling": True}
    return both_jobs(
        "requests",
        [
            stage("wishes", dense, [with_wishes(), beams], **is_async),
            stage("lora", dense, [adapted], **lora, **is_async),
        ],
    )


def test_sampling_fields(asked, cell):
    """A bias moves the choice, and no end comes before its time."""
    pair = asked["wishes"]
    note = assert_works(pair)
    _, patched = pair.runs("crowd")
    assert 65 in sample(patched, "biased")["ids"]
    assert 66 not in sample(patched, "biased")["ids"]
    floored = sample(patched, "floored")["ids"]
    assert END_ID not in floored[:20]
    cell.works("`logit_bias`, `min_tokens`, logprobs", note, probed(pair))


def test_prompt_logprobs(asked, cell):
    """They are stock's, with the prompt computed in chunks and again."""
    pair = asked["wishes"]
    note = assert_works(pair)
    stock, patched = pair.runs("crowd")
    for name in ("looked", "looked_again"):
        assert len(patched["outputs"][name]["prompt_logprobs"]) > 32
        assert (
            patched["outputs"][name]["prompt_logprobs"]
            == (stock["outputs"][name]["prompt_logprobs"])
        )
    cell.works("`prompt_logprobs`", note, probed(pair))


def test_beam_search(asked, cell):
    """vLLM makes one request of one token per beam and step: they end before a probe is due."""
    stock, patched = asked["wishes"].runs("beams")
    assert patched["beams"] == stock["beams"]
    assert len({tuple(beam) for beams in patched["beams"] for beam in beams}) > 8
    searches = len(patched["beams"])
    cell.works("beam search", f"{searches} searches, all beams as stock", "none is due")


def test_fewer_slots_than_adapters(asked, cell):
    """Requests of three adapters share two slots; the assertion on the slots in use holds."""
    pair = asked["lora"]
    note = assert_works(pair)
    plain, adapted = (asked[name].runs("crowd")[1] for name in ("wishes", "lora"))
    assert sample(plain, "thinker0")["ids"] != sample(adapted, "thinker0")["ids"]
    cell.works("LoRA, fewer slots than adapters", note, probed(pair))


@pytest.fixture(scope="module", params=["reasoning parser", "no reasoning parser"])
def structured(request, both_jobs, demo_model):
    """One engine a job: the CPU build starts no second one where bit masks were applied."""
    problems = make_problems(6, seed=9, steps=3)
    requests = [
        ask(f"{kind}{n}", problem, at_step=3 * n, max_tokens=150, regex=REGEX, **wishes)
        for n, problem in enumerate(problems)
        for kind, wishes in (("seen", {}), ("closed", {"extra_args": CLOSED}))
    ]
    requests += [ask(f"free{n}", p, at_step=5 * n, max_tokens=90) for n, p in enumerate(problems)]
    parser = {} if request.param.startswith("no ") else {"reasoning_parser": "deepseek_r1"}
    run = {"name": "structured", "requests": requests}
    # The pool is short, not the seats: where requests wait for seats, probes have few of them.
    short = {"num_gpu_blocks_override": 18, "max_num_seqs": 16}
    arguments = {"async_scheduling": True, **short, **parser}
    stages = [stage("structured", demo_model, [run], **arguments)]
    return request.param, both_jobs(request.param.split()[0], stages)["structured"]


def only(run: dict, *kinds: str) -> dict:
    return {
        "outputs": {n: out for n, out in run["outputs"].items() if n.rstrip("0123456789") in kinds}
    }


def assert_answers_fit(run: dict, kind: str, *, has_thought: bool) -> None:
    for name, output in only(run, kind)["outputs"].items():
        [one] = output["samples"]
        text = one["text"].partition(THINK_END)[2] if has_thought else one["text"]
        assert one["finish_reason"] == "stop", name
        assert re.fullmatch(REGEX, text), (name, one["text"])


def test_structured_output(structured, cell):
    """Behind a thought with a parser, from the first token without; outputs are stock's."""
    name, pair = structured
    stock, patched = pair.runs("structured")
    has_thought = not name.startswith("no ")
    assert_healthy(patched)
    tokens = assert_same_outputs(only(stock, "seen", "free"), only(patched, "seen", "free"))
    assert_answers_fit(patched, "seen", has_thought=has_thought)
    # How many find a place differs from run to run: 7 to 16 were seen.
    assert patched["counted"]["probe:measured"] > 3
    note = f"answers match the pattern, {tokens} tokens as stock"
    cell.works(f"structured output, {name}", note, probed(pair, "structured"))


def test_structured_output_with_enforce(structured, cell):
    """A cap closes thoughts; one that the grammar binds stays as it is."""
    name, pair = structured
    stock, patched = pair.runs("structured")
    has_thought = not name.startswith("no ")
    assert_healthy(patched)
    assert_answers_fit(patched, "closed", has_thought=has_thought)
    if has_thought:
        assert patched["counted"]["exit:hard_cap"] > 0
        note = (
            f"{patched['counted']['exit:hard_cap']} thoughts closed, all answers match the pattern"
        )
    else:
        assert_same_outputs(only(stock, "closed"), only(patched, "closed"))
        note = "the grammar binds in the thought: nothing is closed, outputs as stock"
    cell.works(f"structured output, {name}, `enforce`", note, probed(pair, "structured"))
