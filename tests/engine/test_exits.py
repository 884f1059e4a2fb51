"""Thoughts are closed on the real engine, once each, in both runners and under every pressure."""

import random
import re

import pytest
from engine_plans import AMPLE, PATIENT, PRESSURE, SMALL_POOL
from run_engine import PATCHED, Job, run_job
from tiny_reasoner.thoughts import CUES
from workloads import ask, ask_all, engine_arguments, graded, sample

from meridian_patch.demo.problems import make_problems

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
THINK_START, THINK_END = 256, 257
# What the tiny reasoner says behind a thought; a line of reasoning looks different.
ANSWER = re.compile(r"\d(\nFrom [^\n]* we get \w=\d\.)?")
# The tiny reasoner's thoughts have no blank lines, so a probe is due by distance.
ENFORCE = {
    "REQUESTS__ALLOWED_FIELDS": "all",
    "EXIT__MODE": "enforce",
    "EXIT__MIN_THINK_TOKENS": "24",
    "EXIT__EAT_WARMUP_PROBES": "2",
    "EXIT__EAT_ALPHA": "0.5",
    "EXIT__EAT_DELTA": "0.02",
    "EXIT__EAT_MAX_ENTROPY_NATS": "0.3",
    "EXIT__PROBE_MIN_GAP_TOKENS": "8",
    "EXIT__PROBE_MAX_GAP_TOKENS": "12",
    "EXIT__PROBE_EVERY_STEPS": "1",
}
SETTINGS = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in ENFORCE.items()}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
HARD = make_problems(6, seed=5, steps=6)
PRESSED = {
    "num_gpu_blocks_override": SMALL_POOL,
    "max_model_len": 1024,
    "max_num_batched_tokens": 64,
}
V1 = {
    "sync": {"async_scheduling": False},
    "async": {"async_scheduling": True},
    "ngram": {"speculative_config": NGRAM},
    "pressed": {"async_scheduling": True, **PRESSED},
}
LEFT = ("requests_left", "blocks_left", "routed_left", "watched_left", "probes_left", "told_left")
V2 = {"max_model_len": 512, "max_num_batched_tokens": 64, "async_scheduling": True}
# On these ways through the engine a second run is made of many requests and aborts.
SOAKED = ("pressed",)
SOAK_REQUESTS = 300
# On these ways the model is made to loop: problems, and tokens of each output.
# vLLM knows no bias beside drafts.
LOOPS = {"async": (12, 400), "v2": (2, 240)}
NEVER = {THINK_END: -100.0}
# No other strategy closes these thoughts.
ALONE = {"meridian_eat_delta": 1e-12}
# All of a thought twice, which takes fewer steps than three times something.
LOOP = {"meridian_loop_min_count": 2, "meridian_loop_min_pattern_size": 16, **ALONE}
PATTERNS = {"meridian_exit_patterns": list(CUES), **ALONE}
CAP = 64
WRAP_UP = "Time is up.\n"
WRAPPED = {"meridian_wrap_up": WRAP_UP}
CAPPED = {"meridian_max_think_tokens": CAP, "meridian_eat_delta": 1e-12}


def requests(problems, max_tokens=700):
    """Closed by EAT as configured, by a cap, and not at all."""
    asked = ask_all("eat", problems, every_steps=2, max_tokens=max_tokens)
    asked += [
        ask(f"cap{n}", p, max_tokens=max_tokens, extra_args=CAPPED) for n, p in enumerate(problems)
    ]
    off = {"meridian_exit": "off"}
    asked.append(ask("off", problems[0], max_tokens=max_tokens, extra_args=off))
    # A digit is in each thought, and begins each answer.
    for scope in ("all", "answer"):
        extra_args = {"meridian_stop_scope": scope}
        asked.append(
            ask(f"stop {scope}", problems[0], max_tokens=max_tokens, extra_args=extra_args)
        )
        asked[-1]["params"]["stop"] = list("0123456789")
    for name, extra_args in {"wrapped": CAPPED | WRAPPED, "cue": PATTERNS}.items():
        asked.append(ask(name, problems[0], max_tokens=max_tokens, extra_args=extra_args))
    return asked


def stage(name, engine, problems, max_tokens=700):
    runs = [{"name": "run", "requests": requests(problems, max_tokens)}]
    runs += [loops(*LOOPS[each]) for each in LOOPS if each == name] + [soak()] * (name in SOAKED)
    return {"name": name, "engine": engine, "runs": runs}


def loops(count, max_tokens):
    """Models that may not end their thoughts, and then check them over and over.

    Once as they are, once with the loop breaker; beside them natural thoughts.
    """
    problems = looping(count)
    off, enforce = {"meridian_exit": "off"}, {"meridian_exit": "enforce"}
    ways = {
        "natural": {"extra_args": off},
        "off": {"extra_args": off, "logit_bias": NEVER},
        "on": {"extra_args": enforce | LOOP, "logit_bias": NEVER},
    }
    asked = [ask_all(name, problems, max_tokens=max_tokens, **way) for name, way in ways.items()]
    return {"name": "loops", "requests": [each for some in asked for each in some]}


def looping(count):
    return make_problems(count, seed=9, steps=3)


def soak():
    """Many requests of which half are aborted, at any moment from their first step on."""
    rng = random.Random(11)
    asked, aborts = [], []
    for number, problem in enumerate(make_problems(SOAK_REQUESTS, seed=11, steps=4)):
        wishes = rng.choice([None, None, CAPPED, {"meridian_exit": "off"}])
        asked.append(ask(f"s{number}", problem, max_tokens=150, at_step=6 * number))
        asked[-1]["params"] |= {"extra_args": wishes} if wishes else {}
        if number % 2:
            at_step = 6 * number + rng.randrange(160)
            aborts.append({"do": "abort", "names": [f"s{number}"], "at_step": at_step})
    return {"name": "soak", "requests": asked, "events": aborts}


class Runs:
    """One job per way through the engine, each made when it is first asked for.

    vLLM's CPU build cannot start a second engine in a process that has applied bit masks.
    """

    def __init__(self, model, folders):
        self._model = model
        self._folders = folders
        self._made = {}

    def __getitem__(self, name):
        return self.of(name)["run"]

    def of(self, name):
        """All runs of one job, by name."""
        if name not in self._made:
            self._made[name] = self._make(name)["stages"][name]["runs"]
        return self._made[name]

    def _make(self, name):
        is_v2 = name == "v2"
        problems = AMPLE[:1] if is_v2 else HARD + PRESSURE[6:] if "pressed" in name else HARD
        engine = engine_arguments(self._model, **(V2 if is_v2 else V1[name]))
        job = Job(
            [stage(name, engine, problems, 240 if is_v2 else 700)],
            env=PATCHED | PATIENT | SETTINGS,
            allow_async=True,
            model_runner_v2=is_v2,
        )
        return run_job(job, self._folders.mktemp(name))


@pytest.fixture(scope="module")
def runs(demo_model, tmp_path_factory):
    return Runs(demo_model, tmp_path_factory)


NIGHTLY = ("sync", "ngram")


@pytest.fixture(
    params=[
        pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name
        for name in (*V1, "v2")
    ]
)
def run(request, runs):
    return runs[request.param]


def thoughts(run):
    """By request, the ids of the thought and of what comes behind it."""
    split = {}
    for name, output in run["outputs"].items():
        if name.startswith("stop"):
            continue
        [sample] = output["samples"]
        assert sample["ids"].count(THINK_END) <= 1, name
        assert THINK_START not in sample["ids"], name
        if THINK_END in sample["ids"]:
            end = sample["ids"].index(THINK_END)
            split[name] = sample["ids"][:end], sample["ids"][end + 1 :]
    return split


def test_each_thought_ends_once_and_is_answered(run):
    """One boundary, no reasoning behind it, and an answer."""
    split = thoughts(run)
    assert len(split) >= len(run["outputs"]) - len(("off", "stop all", "stop answer"))
    for name in split:
        [sample] = run["outputs"][name]["samples"]
        assert ANSWER.fullmatch(sample["text"].split("</think>")[1]), sample["text"]


def test_a_cap_holds(run):
    """Not a token more than the cap, the boundary aside, and what was known too late."""
    lengths = {name: len(thought) for name, (thought, _) in thoughts(run).items()}
    capped = [length for name, length in lengths.items() if name.startswith("cap")]
    assert capped
    assert max(capped) <= CAP + 3
    assert lengths.get("off", 10_000) > CAP + 3


def test_stop_strings_count_where_the_request_says(run):
    """Everywhere as in stock, or from the answer's first token on; the text ends before it."""
    everywhere, in_answer = (
        run["outputs"][f"stop {scope}"]["samples"][0] for scope in ("all", "answer")
    )
    assert "</think>" not in everywhere["text"]
    assert not re.search(r"\d", everywhere["text"])
    thought, marker, answer = in_answer["text"].partition("</think>")
    assert re.search(r"\d", thought)
    assert (marker, answer) == ("</think>", "")
    assert in_answer["ids"][-2] == THINK_END


def test_a_wrap_up_stands_before_the_end_marker(run):
    """Of the request that asks for one, and of no other; its twin with the same cap has none."""
    outputs = {name: output["samples"][0] for name, output in run["outputs"].items()}
    assert outputs["wrapped"]["text"].count(WRAP_UP) == 1
    assert outputs["wrapped"]["text"].partition("</think>")[0].endswith(WRAP_UP)
    others = {name: sample["text"] for name, sample in outputs.items() if name != "wrapped"}
    assert not [name for name, text in others.items() if WRAP_UP[:4] in text]
    assert "</think>" in others["cap0"]


def test_reasons_are_counted(run):
    """By what closed them; the counts are the thoughts."""
    counted = run["counted"]
    ended = {name: n for name, n in counted.items() if name.startswith("exit:")}
    assert ended.get("exit:eat", 0) > 0 or ended.get("exit:hard_cap", 0) > 0
    # The one with exits off is not followed; one with a stop string in its answer is.
    samples = {name: output["samples"][0]["ids"] for name, output in run["outputs"].items()}
    closed = [name for name, ids in samples.items() if THINK_END in ids and name != "off"]
    assert sum(ended.values()) - ended.get("exit:unanswered", 0) == len(closed)
    assert "fallback:exception" not in counted


def test_probes_are_small_and_unseen(run):
    """Each computes a block and the boundary at most; no client hears of one."""
    assert run["probes"]
    assert max(run["probes"]) <= BLOCK_SIZE + 1
    assert run["counted"]["probe:measured"] > 0
    assert not run["counted"].get("probe:lost")
    assert not any("probe" in name for name in run["outputs"])


def test_nothing_is_left(run):
    """No request, block, watch, close or probe."""
    for what in LEFT:
        assert run[what] == 0, what


@pytest.mark.parametrize("name", SOAKED)
def test_aborts_at_any_moment_leave_nothing(runs, name):
    """Hundreds of requests, half of them aborted: nothing is left, and nothing failed."""
    soaked = runs.of(name)["soak"]
    for what in LEFT:
        assert soaked[what] == 0, what
    finished = [output["finished"] for output in soaked["outputs"].values()]
    assert SOAK_REQUESTS / 2 <= sum(finished) < SOAK_REQUESTS
    assert "fallback:exception" not in soaked["counted"]
    assert soaked["counted"]["exit:eat"] > 10
    assert len(soaked["probes"]) > 300


def test_pressure_was_there(runs):
    """The test under KV pressure did preempt."""
    assert runs["pressed"]["preemptions"]


@pytest.mark.nightly
def test_drafts_were_there(runs):
    """The test under speculation did accept drafts."""
    assert runs["ngram"]["accepted"] > 0


@pytest.mark.parametrize("name", LOOPS)
def test_a_model_that_loops_is_answered(runs, name):
    """Without the loop breaker it thinks to its last token; with it the answers are those that
    the model gives where it ends its thoughts by itself.
    """
    run, (count, max_tokens) = runs.of(name)["loops"], LOOPS[name]
    ids = {way: [sample(run, f"{way}{n}")["ids"] for n in range(count)] for way in ("off", "on")}
    right = {way: sum(graded(run, looping(count), way)) for way in ("natural", "off", "on")}
    print(name, right, {way: sum(map(len, each)) for way, each in ids.items()})
    assert [len(each) for each in ids["off"]] == [max_tokens] * count
    assert right["off"] == 0
    assert right["on"] >= right["natural"] - 1 > 0
    closed = run["counted"]["exit:loop"]
    assert closed >= count - 1
    assert sum(THINK_END in each for each in ids["on"]) == closed
    for what in LEFT:
        assert run[what] == 0, what


def test_a_thought_is_closed_where_it_holds_a_pattern(run):
    """Where it is about to be checked for the first time; up to there it is the natural one."""
    natural, closed = (
        sample(run, name)["text"].partition("</think>")[0] for name in ("off", "cue")
    )
    assert run["counted"]["exit:pattern"] == 1
    assert natural.startswith(closed)
    assert len(closed) < len(natural)
    assert sum(closed.count(cue) for cue in CUES) == 1
