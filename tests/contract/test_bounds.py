"""Upper bounds on the real scheduler: over all thoughts of a request, and before its answer."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from exit_driver import add_drafts, exit_driver, force_first_rows, is_empty, thinker, told
from scheduler_driver import THINK_END, THINK_START, WORD, Job
from vllm.v1.core.sched.output import GrammarOutput

from meridian_patch.engine.early_exit.close import MaskRows, mask_of

UNDOCUMENTED = {"provenance": "unverified", "source": "a test", "single_token": False}
CAP = 20
CAPPED = {
    "EXIT__MAX_THINK_TOKENS": str(CAP),
    "EXIT__MIN_THINK_TOKENS": "0",
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
}


@dataclass(frozen=True)
class Reopener(Job):
    """A model that would open its thought again at every third token, and thinks on in it."""

    start: tuple[int, ...] = (THINK_START,)

    def token(self, index):
        place = index % (len(self.start) + 2)
        return self.start[place] if index > CAP and place < len(self.start) else WORD


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model, is_async=request.param)


def reopener(name, max_tokens=300, **kwargs):
    return Reopener(name, thinker(name).prompt, 10_000, 0, max_tokens=max_tokens, **kwargs)


def test_no_thought_opens_behind_a_close_at_the_bound(driver_for):
    """The start marker is left out of what the request may sample; a thought of others is not."""
    driver = driver_for(**CAPPED)
    driver.add(reopener("r"))
    driver.add(reopener("off", max_tokens=60), {"meridian_exit": "off"})
    request, other = (driver.scheduler.requests[name] for name in ("r", "off"))
    driver.drain()
    said = request._output_token_ids
    assert len(said) == 300
    assert driver.forced == [("r", THINK_END)]
    assert CAP - 3 <= said.index(THINK_END) <= CAP + 1
    assert THINK_START not in said
    assert driver.barred.count("r") > 50
    assert other._output_token_ids.count(THINK_START) > 10
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:hard_cap"] == 1
    assert totals["think_tokens:hard_cap"] <= CAP + 2
    assert is_empty(driver)


def test_a_thought_that_a_marker_of_several_tokens_opens_is_closed_at_once(driver_for, use_family):
    """Such a marker is not left out: what it opens has no token more than were in flight."""
    use_family(start="<reason>", probe=None, documented_ids=UNDOCUMENTED)
    driver = driver_for(**CAPPED)
    starts = driver.scheduler.phase_tracker._boundaries.start
    (start,) = {each for each in starts if len(each) > 1}
    job = reopener("r", start=start)
    driver.add(Reopener("r", (*job.prompt[:-1], *start), 10_000, 0, max_tokens=300, start=start))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    closes = totals["exit:hard_cap"]
    assert closes > 5
    assert not driver.barred
    assert totals["think_tokens:hard_cap"] <= CAP + 2 + 4 * (closes - 1)
    assert is_empty(driver)


def test_a_thought_that_ends_by_itself_leaves_the_rest_of_the_bound(driver_for):
    """The second one is closed where both together reach it; a third one is not opened."""

    class Pausing(Job):
        def token(self, index):
            if index in {11, 40}:
                return THINK_END
            return THINK_START if index in {14, 34, 44} else WORD

    driver = driver_for(**CAPPED)
    driver.add(Pausing("r", thinker("r").prompt, 10_000, 0, max_tokens=60))
    request = driver.scheduler.requests["r"]
    driver.drain()
    said = request._output_token_ids
    first, second, *_ = (index for index, token in enumerate(said) if token == THINK_END)
    assert first == 11
    # Behind the first thought, of 12 tokens, and the marker at 14, 8 are left.
    assert 14 + 8 - 2 <= second <= 14 + 8 + 2
    assert said.count(THINK_START) == 1
    assert driver.scheduler.phase_counters.totals["exit:hard_cap"] == 1
    assert is_empty(driver)


def test_a_request_that_was_barred_leaves_nothing(driver_for):
    """Aborted while the marker is left out, and again under its name."""
    driver = driver_for(**CAPPED)
    for _ in range(2):
        driver.add(reopener("r"))
        while not driver.barred:
            driver.step()
        driver.abort("r")
        driver.drain()
        driver.barred.clear()
        assert is_empty(driver)


MAX_TOKENS, RESERVE = 200, 50
RESERVED = {
    "EXIT__ANSWER_RESERVE": str(RESERVE),
    "EXIT__MIN_THINK_TOKENS": "0",
    "EXIT__EAT": "false",
    "EXIT__RPDI": "false",
}


def play(driver, fields=None, max_tokens=MAX_TOKENS, **job):
    """A thought that would not end; the tokens of its answer, None if it has none."""
    driver.add(thinker("r", 10_000, max_tokens=max_tokens, **job), fields)
    request = driver.scheduler.requests["r"]
    driver.drain()
    said = request._output_token_ids
    assert len(said) == max_tokens
    assert is_empty(driver)
    return len(said) - said.index(THINK_END) - 1 if THINK_END in said else None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (None, RESERVE),
        ({"meridian_answer_reserve": 70}, 70),
        ({"meridian_answer_reserve": 0.25}, 50),
        ({"meridian_answer_reserve": 0.333}, 67),
        ({"meridian_max_think_tokens": 100}, 99),
        ({"meridian_wrap_up": "so.it.ends"}, RESERVE),
    ],
)
def test_the_answer_has_its_reserve(driver_for, fields, expected):
    """Of the configuration, or of the request; a wrap-up and the close are counted."""
    driver = driver_for(**RESERVED)
    answer = play(driver, fields)
    # One token is in flight when a close is decided, or none.
    assert expected - 1 <= answer <= expected
    assert answer == expected or fields == {"meridian_max_think_tokens": 100}
    reason = "hard_cap" if fields == {"meridian_max_think_tokens": 100} else "answer_reserve"
    assert driver.scheduler.phase_counters.totals[f"exit:{reason}"] == 1


def test_drafts_do_not_eat_the_reserve(driver_for, monkeypatch):
    """Those that a step accepts may take a thought past the bound, so the bound is that lower."""
    add_drafts(monkeypatch)
    driver = driver_for(**RESERVED)
    force_first_rows(driver)
    assert RESERVE <= play(driver) <= RESERVE + 8


def test_nothing_is_closed_for_a_reserve_where_exit_observes(driver_for):
    """As with all bounds, the caller learns where the thought would have been closed."""
    driver = driver_for(**RESERVED | {"EXIT__MODE": "observe"})
    assert play(driver) is None
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit_verdict:answer_reserve"] == 1
    assert "exit:answer_reserve" not in totals


@pytest.mark.parametrize("reserve", ["200", "5000", "0.999"])
def test_a_reserve_that_leaves_nothing_to_think_is_half(driver_for, reserve):
    """Of the server, whose requests may have any max_tokens."""
    driver = driver_for(**RESERVED | {"EXIT__ANSWER_RESERVE": reserve})
    assert play(driver) == MAX_TOKENS // 2


def test_a_reserve_counts_what_the_model_has_room_for(driver_for):
    """A request may ask for more tokens than fit behind its prompt."""
    driver = driver_for(**RESERVED)
    driver.add(thinker("r", 10_000, prompt_tokens=1948, max_tokens=1500))
    request = driver.scheduler.requests["r"]
    driver.drain()
    said = request._output_token_ids
    assert (len(said), len(said) - said.index(THINK_END) - 1) == (100, RESERVE)


def test_no_thought_opens_in_the_reserve(driver_for):
    """Behind such a close, as behind one at the bound of think tokens."""
    driver = driver_for(**RESERVED)
    driver.add(reopener("r"), {"meridian_answer_reserve": 250})
    request = driver.scheduler.requests["r"]
    driver.drain()
    said = request._output_token_ids
    assert driver.forced[-1] == ("r", THINK_END)
    behind = said[len(said) - said[::-1].index(THINK_END) :]
    assert len(behind) >= 250 - 10
    assert THINK_START not in behind
    assert driver.barred
    assert is_empty(driver)


def test_a_cap_of_max_tokens_closes_nothing_on_the_last_token(driver_for):
    """No answer would follow: the close is given up, and the caller told why."""
    driver = driver_for(**CAPPED | {"EXIT__MAX_THINK_TOKENS": "60", "EXIT__GRACE_TOKENS": "0"})
    for cap in (58, 59, 60):
        answer = play(driver, {"meridian_max_think_tokens": cap}, max_tokens=60)
        assert answer is None or answer > 0
    assert driver.scheduler.phase_counters.totals["exit_given_up:no_room"] >= 1


def test_forced_tokens_are_named(driver_for):
    """Of each close, by their indices in the output; a thought that ends by itself has none."""
    driver = driver_for(**CAPPED | {"EXIT__WRAP_UP": "so.it.ends"})
    reports = told(driver)
    driver.add(thinker("closed", 10_000, max_tokens=60))
    driver.add(thinker("natural", 10))
    request = driver.scheduler.requests["closed"]
    driver.drain()
    said = request._output_token_ids
    forced = [token for name, token in driver.forced if name == "closed"]
    assert [said[index] for index in reports["closed"][-1].forced] == forced
    assert (len(forced), forced[-1]) == (len("so.it.ends") + 1, THINK_END)
    assert reports["natural"][-1].forced == ()


BUDGET = 30


def add(driver, job, **sampling):
    """A request with sampling parameters from its start on."""
    driver.jobs[job.request_id] = job
    driver.deliveries[job.request_id] = []
    driver.scheduler.add_request(driver._request_of(job, **sampling))


@pytest.mark.parametrize(
    ("mode", "is_sampled"), [("observe", True), ("observe", False), ("enforce", True)]
)
@pytest.mark.parametrize("given", [0, 1, 12])
def test_the_reason_of_vllms_own_budget(driver_for, given, is_sampled, mode):
    """It counts what the prompt has behind the start marker, as the line break of a template."""
    settings = {"EXIT__MODE": mode, "EXIT__EAT": "false", "EXIT__RPDI": "false"}
    driver = driver_for(**settings, EXIT__OBSERVED_AT_A_TIME="1")
    jobs = {"budget": BUDGET - given, "natural": BUDGET - given - 1}
    if not is_sampled:
        driver.add(thinker("first", 100))
        driver.step()
    for name, tokens in jobs.items():
        prompt = (*thinker(name).prompt, *[WORD] * given)
        add(driver, Job(name, prompt, tokens, 30), thinking_token_budget=BUDGET)
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:budget"] == 1
    assert totals["think_tokens:budget"] == BUDGET - given + 1
    # Its length is none that a thought has by itself.
    assert totals["exit:natural"] == 2 - is_sampled
    assert is_empty(driver)


def test_a_close_keeps_away_from_a_budget_that_the_prompt_has_begun_to_use(driver_for):
    """vLLM would force its own close during ours: it closes the thought."""
    driver = driver_for(**CAPPED | {"EXIT__MAX_THINK_TOKENS": "20"})
    job = thinker("r", 22)
    job = Job("r", (*job.prompt, *[WORD] * 8), 22, 30)
    add(driver, job, thinking_token_budget=BUDGET)
    driver.drain()
    assert not driver.forced
    assert driver.scheduler.phase_counters.totals["exit_given_up:budget"] == 1


def test_rows_beside_those_of_structured_output():
    """A request has a row for each draft; a grammar that accepts the marker alone keeps its own."""
    rows_of = {"bound": 2, "only": 1, "forced": 3, "barred": 3}
    grammar_rows = np.stack(
        [np.full(3, -1, np.int32), np.array([3, 0, 0], np.int32), mask_of(40, 3)]
    )
    grammar = GrammarOutput(["bound", "only"], grammar_rows, [1, 0])
    rows = MaskRows(grammar, 3, rows_of.__getitem__)
    assert rows.output() is not None
    rows.forbid("bound", [1])
    rows.forbid("only", [40])
    rows.force("forced", 70)
    rows.forbid("barred", [1, 95])
    made = rows.output()
    assert made.structured_output_request_ids == ["bound", "only", "forced", "barred"]
    assert made.num_acceptable_drafts == [1, 0, 0, 2]
    bits = np.unpackbits(made.grammar_bitmask.view(np.uint8), axis=1, bitorder="little")
    assert bits.shape == (9, 96)
    assert np.flatnonzero(bits[0] == 0).tolist() == [1]
    assert np.flatnonzero(bits[1]).tolist() == [0]
    assert np.flatnonzero(bits[2]).tolist() == [40]
    assert np.flatnonzero(bits[3]).tolist() == [70]
    assert bits[4:6].all()
    for row in bits[6:]:
        assert np.flatnonzero(row == 0).tolist() == [1, 95]
    # What upstream made is not changed.
    assert (grammar.grammar_bitmask == grammar_rows).all()


def test_without_rows_of_its_own_a_step_has_upstreams_masks():
    """And none where upstream has none."""
    assert MaskRows(None, 3, {}.__getitem__).output() is None
