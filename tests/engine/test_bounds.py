"""Bounds, reserves, reasons and loops on the real engine, with a model that says a script."""

import json
from pathlib import Path

import pytest
from engine_plans import AMPLE, PATIENT
from puppet import THINK, THINK_END, make_puppet, words
from run_engine import PATCHED, Job, run_job
from workloads import ask, ask_all, engine_arguments, sample

pytestmark = pytest.mark.engine

START_ID, END_ID = 256, 257
CAP = 20
ENFORCE = {"meridian_exit": "enforce", "meridian_min_think_tokens": 0}
OFF = {"meridian_exit": "off"}
CAPPED = ENFORCE | {"meridian_max_think_tokens": CAP}
LOOP = {"meridian_loop_max_pattern_size": 8, "meridian_loop_min_count": 4}
V2 = {"async_scheduling": True, "max_model_len": 512, "max_num_batched_tokens": 64}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
ALL_FIELDS = {"MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS": "all"}
WAYS = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "drafts": {"async_scheduling": False, "speculative_config": NGRAM},
    "v2": V2,
}
# What the model would say again, so that drafts guess that it opens its thought.
REOPENS = f" t38 t39{THINK_END}{THINK} t0 t1 t2"


def run(model, folder, requests, engine, *, is_v2=False):
    stage = {
        "name": "s",
        "engine": engine_arguments(model, **engine),
        "runs": [{"name": "run", "requests": requests}],
    }
    job = Job([stage], env=PATCHED | PATIENT | ALL_FIELDS, allow_async=True, model_runner_v2=is_v2)
    done = run_job(job, folder)["stages"]["s"]["runs"]["run"]
    assert "fallback:exception" not in done["counted"]
    assert done["watched_left"] == done["requests_left"] == 0
    return done


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.nightly] * (way != "async")) for way in WAYS],
)
def test_a_model_that_opens_its_thought_again_answers(tmp_path, way):
    """It would open it behind each end: 286 of 300 tokens were thought, and 13 closes."""
    scripts = [[THINK, *words("t", 40), THINK_END, THINK]]
    model = make_puppet(tmp_path, "qwen3-reopener-thinking-2507", scripts)
    most = 100 if way == "v2" else 300
    requests = [
        ask("capped", REOPENS, max_tokens=most, extra_args=CAPPED),
        ask("off", REOPENS, max_tokens=most, extra_args=OFF),
    ]
    done = run(model, tmp_path / "job", requests, WAYS[way], is_v2=way == "v2")
    capped, off = (sample(done, name) for name in ("capped", "off"))
    assert off["ids"].count(START_ID) > 1
    assert capped["ids"].count(END_ID) == 1
    assert START_ID not in capped["ids"]
    assert capped["ids"].index(END_ID) <= CAP + 3
    assert capped["finish_reason"] == "stop"
    assert capped["meridian"]["exit_reason"] == "hard_cap"
    assert capped["meridian"]["think_tokens"] <= CAP + 4
    assert len(capped["ids"]) > capped["ids"].index(END_ID) + 1


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Requests of all kinds, whose model thinks on until it is closed, and answers then."""
    folder = tmp_path_factory.mktemp("bounds")
    answer = [THINK_END, *words("a", 80)]
    scripts = [
        [THINK, *words("t", 400), *answer],
        ["\n", " t0"],
        # A cycle of three tokens, in a thought or in an answer.
        [" again", " x", " y", " z", " x"],
    ]
    model = make_puppet(folder, "qwen3-thinker-thinking-2507", scripts)

    def asked(name, opens=THINK, **params):
        return ask(name, name, **params) | {"template": {"opens": opens}}

    reserve = ENFORCE | {"meridian_answer_reserve": 30}
    breaker = ENFORCE | LOOP | {"meridian_loop_scope": "all"}
    requests = [
        asked("reserve", max_tokens=100, extra_args=reserve),
        asked("share", max_tokens=100, extra_args=reserve | {"meridian_answer_reserve": 0.5}),
        asked("no reserve", max_tokens=100),
        asked("wide cap", max_tokens=20, extra_args=CAPPED),
        asked("budget", f"{THINK}\n", max_tokens=100, thinking_token_budget=CAP),
        asked("forced", max_tokens=100, logprobs=1, extra_args=CAPPED),
        asked("thought loops", f"{THINK} again", max_tokens=100, extra_args=breaker),
        asked("answer loops", " again", max_tokens=100, extra_args=breaker),
        asked("answer may loop", " again", max_tokens=100, extra_args=ENFORCE | LOOP),
    ]
    engine = {"async_scheduling": True, "reasoning_parser": "qwen3"}
    return run(model, folder / "job", requests, engine)


def behind(made):
    """Tokens of the answer."""
    return len(made["ids"]) - made["ids"].index(END_ID) - 1


@pytest.mark.parametrize(("name", "least"), [("reserve", 30), ("share", 50)])
def test_the_answer_has_its_reserve(played, name, least):
    """Of max_tokens, whatever the thought would take; and not much more."""
    made = sample(played, name)
    assert made["finish_reason"] == "length"
    assert least <= behind(made) <= least + 10
    assert made["meridian"]["exit_reason"] == "answer_reserve"


def test_a_request_that_never_answers_says_so(played):
    """Its thought took all of max_tokens; a cap that is as high closes nothing at its end."""
    made = sample(played, "no reserve")
    assert END_ID not in made["ids"]
    assert made["meridian"]["exit_reason"] == "unanswered"
    assert made["meridian"]["think_tokens"] == len(made["ids"]) == 100
    wide = sample(played, "wide cap")
    assert wide["ids"][-1] != END_ID
    assert played["counted"]["unanswered:length"] >= 1


def test_vllms_own_budget_is_the_reason(played):
    """The line break of the template is one of its 20 tokens."""
    made = sample(played, "budget")
    assert made["ids"].index(END_ID) == CAP - 1
    assert made["meridian"]["exit_reason"] == "budget"
    assert made["meridian"]["think_tokens"] == CAP


def test_forced_tokens_are_named(played):
    """Their log-probabilities are 0, where the model's own was far below."""
    made = sample(played, "forced")
    (index,) = made["meridian"]["forced_tokens"]
    assert made["ids"][index] == END_ID
    assert made["logprobs"][index] == 0.0
    assert "forced_tokens" not in sample(played, "no reserve")["meridian"]


def test_a_loop_of_three_is_found_with_vllms_settings(played):
    """At its fourth time; in a thought it is closed, and answered."""
    made = sample(played, "thought loops")
    assert made["meridian"]["exit_reason"] == "loop"
    assert "a0" in made["text"]
    assert made["ids"].index(END_ID) <= 12 + 64 + 3


def test_an_answer_that_loops_ends(played):
    """With vLLM's finish reason, where the request asks for it; its twin goes on."""
    made, twin = sample(played, "answer loops"), sample(played, "answer may loop")
    assert (made["finish_reason"], len(made["ids"])) == ("repetition", 13)
    assert (twin["finish_reason"], len(twin["ids"])) == ("length", 100)


HOME = Path(__file__).resolve().parents[2] / "examples" / "home" / "config.yaml"


@pytest.mark.nightly
def test_with_the_example_for_a_server_at_home_every_request_is_answered(demo_model, tmp_path):
    """Its thoughts would take all of `max_tokens`; they are wrapped up, and a quarter is left."""
    requests = [
        *ask_all("home", AMPLE, max_tokens=150),
        *ask_all("off", AMPLE, max_tokens=150, extra_args=OFF),
    ]
    engine = engine_arguments(demo_model, async_scheduling=True)
    stage = {"name": "s", "engine": engine, "runs": [{"name": "run", "requests": requests}]}
    wrap_up = "\n\nI have thought for long enough and give the answer now.\n"
    assert f"# wrap_up: {json.dumps(wrap_up)}" in HOME.read_text()
    env = PATCHED | PATIENT | {"MERIDIAN_PATCH_CONFIG": str(HOME)}
    env |= {"MERIDIAN_PATCH_SET_EXIT__WRAP_UP": json.dumps(wrap_up)}
    job = run_job(Job([stage], env=env, allow_async=True), tmp_path)
    done = job["stages"]["s"]["runs"]["run"]
    for index in range(len(AMPLE)):
        made, off = sample(done, f"home{index}"), sample(done, f"off{index}")
        assert END_ID not in off["ids"]
        assert made["meridian"]["exit_reason"] == "answer_reserve"
        assert made["text"].partition(THINK_END)[0].endswith(wrap_up)
        assert behind(made) >= 1
