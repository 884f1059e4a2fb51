"""What lock-step ranks leave out for each other, and how the front weighs them."""

import pytest

from meridian_patch.policy.rank_balance import AdmissionGate, RankLoad, any_answers
from meridian_patch.policy.rank_choice import PlacedLoads

OWN = RankLoad(answering=2, thinking=4, waiting=3)
FULL = RankLoad(answering=1, thinking=1, is_full=True)


def test_a_thinker_weighs_more_than_an_answer():
    assert RankLoad(thinking=3).weight > RankLoad(answering=3).weight
    assert RankLoad(waiting=3).weight == RankLoad(thinking=3).weight


@pytest.mark.parametrize(
    ("peers", "expected"),
    [([], False), ([RankLoad(thinking=9)], False), ([RankLoad(), RankLoad(answering=1)], True)],
)
def test_answers_elsewhere(peers, expected):
    assert any_answers(peers) is expected


@pytest.mark.parametrize(
    ("own", "peers"),
    [
        pytest.param(OWN, [], id="alone"),
        pytest.param(OWN, [RankLoad(answering=3)], id="nobody is full"),
        pytest.param(OWN._replace(waiting=0), [FULL], id="nothing waits"),
        pytest.param(OWN._replace(is_full=True), [FULL], id="it is full itself"),
        pytest.param(RankLoad(waiting=9), [FULL], id="it would be idle"),
        pytest.param(
            OWN._replace(answering=0), [FULL._replace(answering=0)], id="no answer is delayed"
        ),
        pytest.param(OWN, [FULL._replace(thinking=90)], id="it has less load than the others"),
    ],
)
def test_a_rank_is_not_held(own, peers):
    gate = AdmissionGate(8)
    assert not any(gate.holds(own, peers) for _ in range(100))


@pytest.mark.parametrize("most_steps", [0, 1, 8])
def test_a_rank_is_held_for_a_few_steps_at_most(most_steps):
    """Whatever other ranks say, one step in so many is free."""
    gate = AdmissionGate(most_steps)
    held = [gate.holds(OWN, [FULL]) for _ in range(3 * (most_steps + 1))]
    assert held == ([True] * most_steps + [False]) * 3


def test_front_counts_as_vllm_until_somebody_thinks():
    loads = PlacedLoads(think_weight=3.0)
    for number in range(50):
        loads.placed(f"r{number}", "a")
        loads.changed(f"r{number}", is_thinking=False)
    assert loads.beyond_count("a") == 0


def test_front_weighs_thinkers_until_they_answer_or_end():
    loads = PlacedLoads(think_weight=3.0)
    for name in ("one", "two"):
        loads.placed(name, "a")
        loads.changed(name, is_thinking=True)
    assert loads.beyond_count("a") == pytest.approx(4.0)
    assert loads.beyond_count("b") == 0
    loads.changed("one", is_thinking=False)
    assert loads.beyond_count("a") == pytest.approx(2.0)
    loads.ended("two")
    loads.ended("two")
    assert loads.beyond_count("a") == pytest.approx(0.0)
    loads.ended("one")
    assert not len(loads)


def test_front_expects_of_new_requests_what_earlier_ones_did():
    loads = PlacedLoads(think_weight=2.0)
    for number in range(200):
        loads.placed(f"r{number}", "a")
        loads.changed(f"r{number}", is_thinking=True)
        loads.ended(f"r{number}")
    loads.placed("new", "b")
    assert loads.beyond_count("b") == pytest.approx(1.0, abs=0.01)


def test_phases_of_unknown_requests_are_ignored():
    loads = PlacedLoads()
    loads.changed("elsewhere", is_thinking=True)
    loads.ended("elsewhere")
    assert not len(loads)
