"""The loop breaker on the real scheduler; thoughts of its driver are one token over and over."""

import json
from dataclasses import dataclass
from functools import partial

import pytest
from exit_driver import exit_driver, is_empty, thinker, told
from scheduler_driver import THINK_END, THINK_START, WORD, Job
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.request import RequestStatus

MIN_SIZE, MIN_COUNT, FLOOR, GRACE = 4, 5, 10, 4
LOOP = {
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
    "EXIT__LOOP": "true",
    "EXIT__LOOP_MAX_PATTERN_SIZE": "12",
    "EXIT__LOOP_MIN_PATTERN_SIZE": str(MIN_SIZE),
    "EXIT__LOOP_MIN_COUNT": str(MIN_COUNT),
    "EXIT__MIN_THINK_TOKENS": str(FLOOR),
    "EXIT__GRACE_TOKENS": str(GRACE),
}
FIRED_AT = MIN_SIZE * MIN_COUNT


@dataclass(frozen=True)
class Rambler(Job):
    """A thought that repeats nothing until a token; from there on three tokens, over and over."""

    loops_from: int = 10_000

    def token(self, index):
        said = super().token(index)
        if said != WORD or index > self.think_tokens:
            return said
        return 60 + index % 3 if index >= self.loops_from else 60 + index * index // 7 % 50


class Waking(Job):
    """One token 40 times, then none of them twice in a row."""

    def token(self, index):
        return WORD if index < 40 else 60 + index % 50


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model, is_async=request.param)


def test_a_loop_is_closed_and_answered(driver_for):
    """At the pattern's fifth time and behind the grace; the answer, which loops too, is whole."""
    driver = driver_for(**LOOP)
    reports = told(driver)
    driver.add(thinker("r"))
    driver.drain()
    outcome = reports["r"][-1].outcome
    assert driver.forced == [("r", THINK_END)]
    assert outcome.verdict.fired_at == FIRED_AT
    assert outcome.verdict.close_at == FIRED_AT + GRACE
    assert outcome.verdict.why == "4 tokens stand there 5 times"
    assert outcome.think_tokens <= FIRED_AT + GRACE + 2
    assert driver.scheduler.phase_counters.totals["exit:loop"] == 1
    assert is_empty(driver)


def test_observing_closes_nothing(driver_for):
    """It says when it would have."""
    driver = driver_for(**LOOP, EXIT__MODE="observe")
    reports = told(driver)
    driver.add(thinker("r"))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert not driver.forced
    assert totals["exit:natural"] == totals["exit_verdict:loop"] == 1
    assert reports["r"][-1].outcome.verdict.fired_at == FIRED_AT
    assert is_empty(driver)


def test_a_request_asks_for_it(driver_for):
    """Off by default; one request switches it on with sizes of its own."""
    driver = driver_for(**{**LOOP, "EXIT__LOOP": "false", "EXIT__MODE": "observe"})
    fields = {"meridian_loop_min_count": 3, "meridian_loop_max_pattern_size": 2}
    driver.add(thinker("own"), {"meridian_exit": "enforce", **fields})
    driver.add(thinker("other"))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert driver.forced == [("own", THINK_END)]
    assert totals["exit:loop"] == totals["exit:natural"] == 1
    assert totals["think_tokens:loop"] <= FLOOR + GRACE + 2


@pytest.mark.parametrize("loops_from", [0, 1, 57, 150])
def test_a_loop_may_begin_late(driver_for, loops_from):
    """It is seen where it begins, whatever came before: two times three tokens are a pattern."""
    driver = driver_for(**LOOP)
    reports = told(driver)
    driver.add(Rambler("r", thinker("r").prompt, 300, 30, loops_from=loops_from))
    driver.drain()
    verdict = reports["r"][-1].outcome.verdict
    assert loops_from + 30 - 5 <= verdict.fired_at <= loops_from + 30
    assert is_empty(driver)


def test_a_thought_without_a_loop_is_left_alone(driver_for):
    """However long it is."""
    driver = driver_for(**LOOP)
    driver.add(Rambler("r", thinker("r").prompt, 700, 30))
    driver.drain()
    assert not driver.forced
    assert driver.scheduler.phase_counters.totals["exit:natural"] == 1
    assert is_empty(driver)


def test_the_prompt_is_no_part_of_the_loop(driver_for):
    """Neither the user's words, nor a session's earlier turn, whose thought goes on."""
    driver = driver_for(**LOOP)
    chunk = Job("s", (*[WORD] * 50, THINK_START), 400, 0, max_tokens=FIRED_AT - 1)
    driver.send_chunk(chunk)
    for _ in range(40):
        driver.step()
    # The thought is still open, and its tokens are now the prompt's.
    driver.send_chunk(Job("s", (*[WORD] * 30,), 400, 0, max_tokens=FIRED_AT - 1))
    for _ in range(40):
        driver.step()
    assert not driver.forced
    driver.send_chunk(Job("s", (*[WORD] * 30,), 400, 0, max_tokens=60))
    for _ in range(80):
        driver.step()
    assert driver.forced == [("s", THINK_END)]
    driver.abort("s")
    driver.drain()
    assert is_empty(driver)


def test_loops_are_closed_under_preemption(driver_for):
    """Each thought once, at the same token as without pressure."""
    driver = driver_for(**LOOP, blocks=24, tiered=True)
    for number in range(20):
        prompt = thinker(f"r{number}").prompt
        driver.add(Rambler(f"r{number}", prompt, 400, 20, loops_from=10 * number))
        driver.step()
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert totals["preemption:think"] > 0
    assert totals["exit:loop"] == 20
    assert is_empty(driver)


def test_verdicts_do_not_depend_on_pressure(driver_for, tmp_path):
    """The tokens decide, not when they come: the trace has the same verdicts."""
    seen = []
    for blocks in (200, 20):
        trace = tmp_path / f"{blocks}.jsonl"
        driver = driver_for(**LOOP, blocks=blocks, tiered=True, EXIT__TRACE=str(trace))
        for number in range(12):
            prompt = thinker(f"r{number}").prompt
            driver.add(Rambler(f"r{number}", prompt, 400, 20, loops_from=10 * number))
            driver.step()
        driver.drain()
        lines = map(json.loads, trace.read_text().splitlines())
        seen.append(sorted(str(each) for each in lines if each["event"] == "verdict"))
        preempted = driver.scheduler.phase_counters.totals.get("preemption:think", 0)
        assert bool(preempted) == (blocks == 20)
    assert seen[0] == seen[1]
    assert len(seen[0]) == 12


def test_aborts_leave_nothing(driver_for):
    """At any moment around the close."""
    for steps in range(20, 40):
        driver = driver_for(**LOOP)
        driver.add(thinker("r"))
        for _ in range(steps):
            driver.step()
        driver.abort("r")
        driver.drain()
        driver.add(Job("last", (65,) * 5, None, 2))
        driver.drain()
        assert is_empty(driver)


def test_it_needs_no_signals(driver_for):
    """As with --scheduler-cls alone, where nothing is measured."""
    driver = driver_for(is_tapped=False, **LOOP)
    driver.add(thinker("r"))
    driver.drain()
    assert driver.forced == [("r", THINK_END)]


@pytest.mark.parametrize(
    ("min_count", "is_answered"), [(MIN_COUNT + 3, True), (MIN_COUNT + 2, True), (MIN_COUNT, False)]
)
def test_it_comes_before_vllms_own_detection(driver_for, min_count, is_answered):
    """A few patterns more, and the loop is answered instead of aborted; the same, and it is not."""
    driver = driver_for(**LOOP)
    own = RepetitionDetectionParams(12, MIN_SIZE, min_count)
    # It would loop for 40 tokens, and its answer does not: vLLM would end that, too.
    job = Waking("r", thinker("r").prompt, 400, 0, max_tokens=80)
    driver.jobs["r"], driver.deliveries["r"] = job, []
    request = driver._request_of(job, repetition_detection=own)
    driver.scheduler.add_request(request)
    driver.drain()
    ended = (
        RequestStatus.FINISHED_LENGTH_CAPPED if is_answered else RequestStatus.FINISHED_REPETITION
    )
    assert request.status == ended
    assert driver.forced == [("r", THINK_END)] * is_answered
    assert is_empty(driver)
