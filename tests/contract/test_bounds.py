"""Upper bounds on the real scheduler: they hold over all thoughts of a request."""

from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import THINK_END, THINK_START, WORD, Job
from vllm.v1.core.sched.output import GrammarOutput

from meridian_patch.engine.early_exit.mask_rows import MaskRows, mask_of

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
    first, second = (index for index, token in enumerate(said) if token == THINK_END)
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


def test_rows_beside_those_of_structured_output():
    """A request with drafts has a row for each; a grammar that accepts the marker alone keeps it."""
    rows_of = {"bound": 2, "only": 1, "forced": 3, "barred": 3}
    grammar_rows = np.stack([np.full(3, -1, np.int32), np.full(3, 3, np.int32), mask_of(40, 3)])
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
