"""What one request may do to all others by asking for it, on vLLM's real scheduler."""

import random

import pytest
from scheduler_driver import Job, make_prompt
from tier_driver import driver_for, step_until

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.phase.tracker import Phase

BUDGET = 512
HOSTILE = (-(2**63), 2**63)


@pytest.fixture
def settings(monkeypatch):
    """Configures the drivers that the test builds; a busy machine changes nothing."""

    def configure(**values):
        for name, value in values.items():
            monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", str(value))

    configure(POLICY__TIME_BUDGET_US=10_000_000)
    return configure


def job(name, seed, *, prompt=60, think=50, answer=20, **more):
    tokens = make_prompt(random.Random(seed), prompt, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, answer, **more)


def learn(driver):
    """Serve requests of all sizes, so that the step-time model knows this machine."""
    for number in range(12):
        driver.add(job(f"lesson{number}", number, prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()


def steps_of_a_prompt(driver, wish):
    """Steps until a long prompt beside a reader is computed, whose target is ``wish``."""
    learn(driver)
    driver.add(job("reader", 50, think=5, answer=400, max_tokens=900), extra_args=wish)
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(job("long", 51, prompt=1900, think=5, answer=5, max_tokens=20))
    before = driver.steps
    while not driver.deliveries["long"]:
        driver.step()
    return driver.steps - before


@pytest.mark.parametrize("itl_ms", [1e-9, 5.0])
def test_a_target_that_no_step_can_keep_is_the_default(demo_model, settings, itl_ms):
    """A step takes 10 ms here. One request held everybody's prefill at the least chunk."""
    settings(POLICY__MIN_PREFILL_TOKENS=1)
    steps = {}
    for name, wish in (("default", None), ("hostile", {"meridian_itl_ms": itl_ms})):
        driver = driver_for(demo_model, blocks=200, max_num_batched_tokens=BUDGET)
        steps[name] = steps_of_a_prompt(driver, wish)
        assert not driver.scheduler.phase_counters.totals.get("fallback:exception")
    # Pacing spends what an answer is ahead by, and one with the least target is seldom ahead.
    assert steps["hostile"] <= 1.25 * steps["default"]


def names(requests):
    return [request.request_id for request in requests]


@pytest.mark.parametrize("priority", [*HOSTILE, -1])
def test_the_bodys_priority_orders_no_request(demo_model, settings, priority):
    """vLLM ignores it where it schedules first come, first served; so do we."""
    settings(POLICY__TIME_SHARING="false")
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    driver.add(job("runs", 0, think=200))
    driver.step()
    driver.add(job("first", 1))
    driver.add(job("ours", 2), extra_args={"meridian_priority": 1})
    driver.add(job("urgent", 3, priority=priority))
    driver.add(job("last", 4), extra_args={"meridian_priority": -1})
    assert names(driver.scheduler.waiting) == ["last", "first", "urgent", "ours"]


@pytest.mark.parametrize(("early", "late"), [(2**63, 0), (0, -(2**63))])
def test_the_bodys_priority_chooses_no_victim(demo_model, settings, early, late):
    """The last admitted is preempted, as without it."""
    settings(POLICY__TIME_SHARING="false")
    driver = driver_for(demo_model, blocks=20, max_num_batched_tokens=BUDGET)
    driver.add(job("early", 1, think=400, priority=early))
    driver.add(job("late", 2, think=400, priority=late))
    preempted = None
    while not preempted:
        preempted = driver.step().preempted_req_ids
    assert preempted == {"late"}
    driver.drain()


def test_the_bodys_priority_protects_no_thinker(demo_model, settings):
    """Time-sharing takes the place of one that thought for long, whatever its body says."""
    settings(POLICY__LEVEL_TOKENS=200)
    driver = driver_for(demo_model, blocks=40, max_num_batched_tokens=BUDGET)
    learn(driver)
    driver.add(job("long", 50, think=700, answer=5, priority=-(2**63)))
    driver.add(job("other", 51, think=500, answer=5, priority=-(2**63)))
    step_until(driver, "long", Phase.THINK, 290)
    driver.add(job("new", 52, prompt=32 * 18, think=2, answer=3))
    while not driver.deliveries["new"]:
        driver.step()
    assert "other" in driver.scheduler.requests


@pytest.mark.usefixtures("past_the_check")
@pytest.mark.parametrize("number", HOSTILE)
def test_a_number_out_of_bounds_is_no_priority(demo_model, settings, number):
    """It is refused before the engine; where it comes all the same, the request has none."""
    settings(POLICY__TIME_SHARING="false")
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    driver.add(job("runs", 0, think=200))
    driver.step()
    driver.add(job("first", 1))
    driver.add(job("hostile", 2), extra_args={"meridian_priority": number})
    driver.add(job("last", 3))
    assert names(driver.scheduler.waiting) == ["first", "hostile", "last"]
    driver.drain()


@pytest.mark.usefixtures("past_the_check")
def test_a_field_that_is_not_allowed_is_ignored_and_counted(demo_model, settings):
    """It came past the API server: the request is served as without it."""
    settings(REQUESTS__ALLOWED_FIELDS="[meridian_max_think_tokens]", POLICY__TIME_SHARING="false")
    driver = driver_for(demo_model, max_num_seqs=1, max_num_batched_tokens=BUDGET)
    driver.add(job("runs", 0, think=200))
    driver.step()
    driver.add(job("first", 1))
    asked = {
        "meridian_priority": -1,
        "meridian_itl_ms": 5.0,
        "meridian_max_think_tokens": 30,
        "someone_elses": 1,
    }
    driver.add(job("urgent", 2), extra_args=asked)
    assert names(driver.scheduler.waiting) == ["first", "urgent"]
    # The caller's own dict is left alone.
    assert len(asked) == 4
    options = driver.scheduler.request_states.get("urgent").options
    assert options == RequestOptions(meridian_max_think_tokens=30)
    totals = driver.scheduler.phase_counters.totals
    ignored = {name: number for name, number in totals.items() if name.startswith("ignored")}
    assert ignored == {"ignored_field:meridian_priority": 1, "ignored_field:meridian_itl_ms": 1}
    driver.drain()
    assert not totals.get("fallback:exception")


def ended_of_two_clients(driver, fields):
    """Requests that two clients with four at a time each got answered; one sets ``fields``."""
    made = dict.fromkeys(("eager", "plain"), 0)
    for _ in range(1500):
        for client in made:
            while sum(name.startswith(client) for name in driver.scheduler.requests) < 4:
                made[client] += 1
                name = f"{client}{made[client]}"
                asked = fields if client == "eager" else None
                driver.add(job(name, hash_of(name), think=40, answer=10), extra_args=asked)
        driver.step()
    return {client: number - 4 for client, number in made.items()}


def hash_of(name):
    return sum(map(ord, name)) * 1000


@pytest.mark.usefixtures("past_the_check")
@pytest.mark.parametrize("fields", [{"meridian_priority": -4}, {"meridian_itl_ms": 1e-9}])
def test_by_default_equal_clients_are_served_alike(demo_model, settings, monkeypatch, fields):
    """One asks for more; the field is ignored where it comes past the API server."""
    monkeypatch.delenv("MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS")
    driver = driver_for(demo_model, blocks=200, max_num_seqs=2, max_num_batched_tokens=BUDGET)
    ended = ended_of_two_clients(driver, fields)
    assert ended["plain"] > 20
    assert abs(ended["eager"] - ended["plain"]) <= 2
    totals = driver.scheduler.phase_counters.totals
    assert totals[f"ignored_field:{next(iter(fields))}"] == ended["eager"] + 4


def test_where_priorities_are_allowed_one_client_goes_first(demo_model, settings):
    """So they are not, by default."""
    settings(REQUESTS__ALLOWED_FIELDS="[meridian_priority]")
    driver = driver_for(demo_model, blocks=200, max_num_seqs=2, max_num_batched_tokens=BUDGET)
    ended = ended_of_two_clients(driver, {"meridian_priority": -4})
    assert ended["eager"] > 3 * ended["plain"]
