"""A request's own priority on vLLM's real scheduler; each test fails without it."""

import random

import pytest
from scheduler_driver import Job, make_prompt
from tier_driver import driver_for, step_until

from meridian_patch.engine.scheduler.waiting_order import MOST_STEPS
from meridian_patch.phase.tracker import Phase

BUDGET = 512
URGENT, USUAL, PATIENT = ({"meridian_priority": number} for number in (-1, 0, 1))


@pytest.fixture(autouse=True)
def rules(monkeypatch):
    """No request is held back and none is displaced; a busy machine changes nothing."""
    for name, value in {
        "time_budget_us": "10000000",
        "time_sharing": "false",
        "aging_s": "5",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", value)


def job(name, seed, *, prompt=60, think=50, answer=20):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer)


def names(requests):
    return [request.request_id for request in requests]


def test_newcomers_wait_by_priority(demo_model):
    """Lower numbers before higher ones, equal ones as they came."""
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    driver.add(job("runs", 0, think=200))
    driver.step()
    for number, (name, wish) in enumerate(
        [("patient", PATIENT), ("first", None), ("second", USUAL), ("urgent", URGENT)]
    ):
        driver.add(job(name, 1 + number), extra_args=wish)
    assert names(driver.scheduler.waiting) == ["urgent", "first", "second", "patient"]
    driver.drain()
    assert not driver.scheduler.phase_counters.totals.get("fallback:exception")


def test_who_has_waited_long_is_not_overtaken(demo_model):
    """Priorities starve no request: a step counts as aging_s of waiting, here 5 s."""
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    driver.add(job("runs", 0, think=200))
    driver.step()
    for name, came_s in (("old", 100.0), ("recent", 109.0), ("urgent", 110.0)):
        driver.now_s = came_s
        driver.add(job(name, len(name)), extra_args=URGENT if name == "urgent" else None)
    assert names(driver.scheduler.waiting) == ["old", "urgent", "recent"]


def test_steps_of_priority_that_count_are_bounded(demo_model):
    """A number of minus a million goes before what came MOST_STEPS times aging_s earlier."""
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    driver.add(job("runs", 0, think=200))
    driver.step()
    wish = {"meridian_priority": -1_000_000}
    for name, came_s in (("old", 100.0), ("recent", 101.0), ("urgent", 100.5 + MOST_STEPS * 5)):
        driver.now_s = came_s
        driver.add(job(name, len(name)), extra_args=wish if name == "urgent" else None)
    assert names(driver.scheduler.waiting) == ["old", "urgent", "recent"]


@pytest.mark.parametrize(("wish", "victim"), [(URGENT, "early"), (None, "late")])
def test_the_higher_number_is_preempted_first(demo_model, wish, victim):
    """Without a wish it is the last admitted."""
    driver = driver_for(demo_model, blocks=20, max_num_batched_tokens=BUDGET)
    driver.add(job("early", 1, think=400))
    driver.add(job("late", 2, think=400), extra_args=wish)
    preempted = None
    while not preempted:
        preempted = driver.step().preempted_req_ids
    assert preempted == {victim}
    driver.drain()


@pytest.mark.parametrize(("wish", "is_preempted"), [(None, True), (PATIENT, False)])
def test_no_request_makes_room_for_a_higher_number(demo_model, monkeypatch, wish, is_preempted):
    """Time-sharing is among equals, or for those who are more urgent."""
    for name, value in (
        ("TIME_SHARING", "true"),
        ("LEVEL_TOKENS", "200"),
    ):
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name}", value)
    driver = driver_for(demo_model, blocks=40, max_num_batched_tokens=BUDGET)
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    driver.add(job("long", 50, think=700, answer=5))
    driver.add(job("other", 51, think=500, answer=5))
    step_until(driver, "long", Phase.THINK, 290)
    driver.add(job("new", 52, prompt=18 * 32, think=2, answer=3), extra_args=wish)
    while not driver.deliveries["new"]:
        driver.step()
    assert ("other" in driver.scheduler.requests) is is_preempted
    driver.drain()


def test_the_stock_policy_knows_no_wishes(demo_model, monkeypatch):
    """noop leaves every decision to vLLM."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    monkeypatch.delenv("MERIDIAN_PATCH_SET_POLICY__TIME_SHARING")
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    for name, wish in (("first", None), ("urgent", URGENT)):
        driver.add(job(name, len(name)), extra_args=wish)
    assert names(driver.scheduler.waiting) == ["first", "urgent"]
