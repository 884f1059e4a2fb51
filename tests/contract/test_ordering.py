"""The running order: what is ranked in a step, and what the order does about surprises."""

from types import SimpleNamespace

import pytest

from meridian_patch.engine.scheduler import running_order
from meridian_patch.engine.scheduler.running_order import RankError, RunningOrder
from meridian_patch.phase.tracker import Phase, RequestPhase
from meridian_patch.policy.levels import Levels
from meridian_patch.policy.running_order import LatencyPolicy

PATIENCE_US = 10**9


class Request(SimpleNamespace):
    """What the order reads of a request; the same only as itself."""

    num_prompt_tokens = 0

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def request(name, computed=100, *, prefilling=False):
    return Request(
        request_id=name,
        num_computed_tokens=computed,
        is_prefill_chunk=prefilling,
        priority=0,
    )


class CountingPolicy(LatencyPolicy):
    """Counts the rankings."""

    rankings = 0

    def rank(self, view):
        self.rankings += 1
        return super().rank(view)


@pytest.fixture
def phases():
    """Phase by request id; requests that are not named answer."""
    return {}


@pytest.fixture
def policy():
    return CountingPolicy(protected_answer_tokens=16, levels=Levels(512, 0.25))


def tracker_over(phases):
    def get(name):
        phase = phases.get(name)
        return phase and RequestPhase((), phase, phase, 0, 0)

    return SimpleNamespace(get=get)


@pytest.fixture
def order(policy, phases):
    return RunningOrder(policy, tracker_over(phases), PATIENCE_US)


def names(requests):
    return "".join(request.request_id for request in requests)


def arrange(order, running):
    arranged, is_in_time = order.arrange(running)
    assert is_in_time
    return arranged


def test_a_step_in_which_nothing_happens_ranks_a_few_whatever_runs(order, policy, phases):
    """The work of a step does not grow with the requests that run, and the list stays."""
    running = [request(f"r{n}", n) for n in range(300)]
    phases.update((one.request_id, Phase.THINK) for one in running)
    running = arrange(order, running)
    policy.rankings = 0
    for _ in range(10):
        for one in running:
            one.num_computed_tokens += 1
        assert arrange(order, running) is running
    assert policy.rankings == 10 * running_order.AUDITED_PER_STEP


def test_equal_ranks_stand_as_they_were_admitted(order, phases):
    """A thinker that begins to answer takes the place among answers that stock would give it."""
    a, b, c = running = [request(name) for name in "abc"]
    phases["b"] = Phase.THINK
    assert names(running := arrange(order, running)) == "acb"
    phases["b"] = Phase.ANSWER
    order.changed(b)
    assert arrange(order, running) == [a, b, c]


def test_a_thinker_that_reached_the_next_level_is_found_within_a_round(order, phases):
    """It is not reported; each request is looked at once per so many steps."""
    phases.update(dict.fromkeys("abcdefgh", Phase.THINK))
    thought = dict.fromkeys("abcdefgh", 100)
    order._tracker.get = lambda name: RequestPhase([0] * thought[name], *[Phase.THINK] * 2, 0, 0)
    running = arrange(order, [request(name) for name in thought])
    assert names(running) == "abcdefgh"
    thought["c"] = 600
    for _ in range(len(thought) // running_order.AUDITED_PER_STEP):
        running = arrange(order, running)
    assert names(running) == "abdefghc"


def test_prefill_that_ends_is_seen_without_a_word(order, monkeypatch):
    """It is looked at in every step."""
    monkeypatch.setattr(running_order, "AUDITED_PER_STEP", 0)
    running = arrange(order, [request("a", prefilling=True), request("b")])
    assert names(running) == "ba"
    running[1].is_prefill_chunk = False
    assert names(arrange(order, running)) == "ab"


def test_a_forgotten_request_that_comes_back_is_a_new_one(order):
    """After a preemption it stands behind its equals, as in stock."""
    a, b = arrange(order, [request("a"), request("b")])
    order.forget(a)
    order.forget(a)
    assert names(arrange(order, [b])) == "b"
    assert names(arrange(order, [b, a])) == "ba"


def test_a_request_that_failed_once_is_ranked_in_the_next_step(order, policy, phases):
    """The error names the request; the given order stays, and nothing is lost."""
    running = [request("a"), request("b")]
    phases["a"] = Phase.THINK
    policy.rank = lambda _: 1 / 0
    with pytest.raises(RankError) as failed:
        order.arrange(running)
    assert failed.value.request_id == "a"
    del policy.rank
    assert names(arrange(order, running)) == "ba"


def test_ranking_stops_at_its_time_budget_and_goes_on_in_the_next_step(order, phases, monkeypatch):
    """What was ranked in time is not ranked again."""
    phases["a"] = Phase.THINK
    clock = iter([0, 0, 10**6])
    monkeypatch.setattr(running_order.time, "perf_counter", lambda: next(clock, 0))
    running = [request("a"), request("b")]
    assert order.arrange(running) == (running, False)
    assert names(arrange(order, running)) == "ba"
