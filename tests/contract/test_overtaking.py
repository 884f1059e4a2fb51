"""Requests that others overtake are served all the same, on vLLM's real scheduler."""

import random
from types import SimpleNamespace

import pytest
from full_pool import BLOCKS, job, newcomer, share_time_alone, taught_driver
from scheduler_driver import Job, make_prompt
from tier_driver import driver_for, step_until
from vllm.v1.request import RequestStatus

from meridian_patch.engine.request_state import RequestStates
from meridian_patch.phase.tracker import Phase

AGING_S = 30.0


@pytest.fixture(autouse=True)
def sharing(monkeypatch):
    share_time_alone(monkeypatch)


def plain(name, seed, prompt=20, answer=5):
    tokens = make_prompt(random.Random(seed), prompt, thinks=False, shared=seed)
    return Job(name, tuple(tokens), 0, answer)


def names(queue):
    return [request.request_id for request in queue]


def pass_time(driver, seconds):
    now_s = driver.scheduler.clock()
    driver.scheduler.clock = lambda: now_s + seconds


def test_an_aged_thinker_that_finds_a_seat_thinks_for_a_level(demo_model):
    """Also where no request made room for it: the next newcomer does not take its seat at once."""
    driver = driver_for(demo_model, max_num_seqs=1)
    scheduler = driver.scheduler
    driver.add(job("long", 1, think=900))
    step_until(driver, "long", Phase.THINK, 250)
    driver.add(plain("first", 2))
    while scheduler.requests["long"].status != RequestStatus.PREEMPTED:
        driver.step()
    pass_time(driver, AGING_S + 1)
    while scheduler.requests["long"].status != RequestStatus.RUNNING:
        driver.step()
    thought = scheduler.phase_tracker.get("long").think_tokens
    driver.add(plain("next", 3))
    for _ in range(150):
        driver.step()
    assert scheduler.requests["long"].status == RequestStatus.RUNNING
    assert scheduler.phase_tracker.get("long").think_tokens >= thought + 140


def test_a_plain_prompt_that_was_overtaken_is_served_when_no_request_thinks_any_more(
    demo_model, monkeypatch
):
    """Plain requests that come later keep the seat busy, and do not keep it out for ever."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__PROMPT_WEIGHT", "1")
    driver = driver_for(demo_model, max_num_seqs=1)
    scheduler = driver.scheduler
    driver.add(job("thinks", 1, think=30))
    driver.step()
    driver.add(plain("overtaken", 2, prompt=400))
    while "thinks" in scheduler.requests:
        driver.add(plain(f"before{len(driver.deliveries)}", len(driver.deliveries) + 10))
        driver.step()
    assert not scheduler.phase_tracker.num_reasoning
    assert names(scheduler.waiting)[-1] == "overtaken"
    pass_time(driver, 10 * AGING_S + 1)
    for number in range(30):
        driver.add(plain(f"after{number}", 500 + number))
        driver.step()
    assert driver.deliveries["overtaken"]
    assert names(scheduler.waiting)[-1] == "after29"


def test_late_requests_go_in_the_order_in_which_they_came(demo_model, monkeypatch):
    """Each stays among the first until it begins."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__PROMPT_WEIGHT", "1")
    driver = driver_for(demo_model, max_num_seqs=1)
    scheduler = driver.scheduler
    driver.add(job("thinks", 1, think=1000))
    driver.step()
    for number in range(4):
        driver.add(job(f"late{number}", 10 + number, prompt=400))
        driver.add(job(f"short{number}", 20 + number, prompt=20))
        pass_time(driver, 10 * AGING_S / 2)
        driver.step()
    for _ in range(8):
        driver.step()
    late = [name for name in names(scheduler.waiting) if name.startswith("late")]
    assert late == ["late0", "late1", "late2", "late3"]
    # One that came before the next late one, and waits even longer, stands before that.
    assert names(scheduler.waiting)[:2] == ["late0", "short0"]


def test_thinkers_of_another_priority_do_not_hide_a_long_one(demo_model):
    """They stand behind it in the order of service, whatever they have thought."""
    driver = driver_for(demo_model, max_num_seqs=10, blocks=400)
    scheduler = driver.scheduler
    driver.add(job("long", 1, think=900))
    step_until(driver, "long", Phase.THINK, 250)
    for number in range(9):
        driver.add(job(f"r{number}", 10 + number, think=300), extra_args={"meridian_priority": 1})
    for _ in range(10):
        driver.step()
    assert len(scheduler.running) == 10
    driver.add(job("new", 30))
    for _ in range(20):
        driver.step()
    assert scheduler.requests["long"].status == RequestStatus.PREEMPTED


def test_a_session_begins_anew_with_each_turn():
    """What was noted of its last thought does not count for the next one."""
    states = RequestStates()
    session = states.add(SimpleNamespace(request_id="s"))
    session.safe_tokens, session.room_made = 1, (1, 1)
    notes = (states.away, states.overtaken, states.to_place, states.to_move)
    for each in notes:
        each[session] = None
    states.end_turn(session)
    assert not any(notes)
    assert (session.safe_tokens, session.room_made) == (0, (0, 0))


def test_room_is_made_between_steps_that_may_not_compute_prompts(demo_model):
    """Under a prefill cadence a thinker has a token on its way at each step that may; it goes on.

    It is left out of one step, not of those between.
    """
    driver = taught_driver(demo_model, is_async=True)
    scheduler = driver.scheduler
    driver.add(job("long", 50, think=700, answer=5))
    step_until(driver, "long", Phase.THINK, 290)
    driver.add(newcomer(BLOCKS - 8))
    # As after its grammar was compiled late; vLLM overrules the cadence for others.
    scheduler.deferred_waiting.add(scheduler.requests["new"])
    schedule, idle = scheduler.schedule, 0
    for number in range(40):
        is_throttled = number % 8 > 0
        scheduler.schedule = lambda throttle=is_throttled: schedule(throttle)
        idle += not driver.step().total_num_scheduled_tokens
    assert scheduler.requests["long"].num_preemptions == 1
    assert driver.deliveries["new"]
    assert idle <= 1


def test_plain_traffic_is_as_in_stock_once_no_request_thinks(demo_model, monkeypatch):
    """A long plain prompt that was served does not keep later ones from their order of arrival."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__PROMPT_WEIGHT", "1")
    driver = driver_for(demo_model, is_async=True, blocks=400)
    driver.add(job("thinks", 1, think=20, answer=2))
    driver.step()
    driver.add(plain("long0", 2, prompt=400, answer=100))
    for number in range(1, 5):
        for _ in range(60):
            driver.step()
        driver.add(plain(f"long{number}", 2 + number, prompt=400, answer=100))
    scheduler = driver.scheduler
    assert not (scheduler.phase_tracker.num_reasoning or scheduler.request_states.overtaken)


@pytest.fixture
def queue(demo_model, monkeypatch):
    """One seat, which a thinker has; the second of three that wait is long and overtaken."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__PROMPT_WEIGHT", "1")
    driver = driver_for(demo_model, max_num_seqs=1)
    scheduler = driver.scheduler
    driver.add(job("thinks", 1, think=300))
    driver.step()
    begin_s = scheduler.clock()
    for number, (name, prompt) in enumerate((("first", 20), ("long", 400), ("later", 20))):
        scheduler.clock = lambda number=number: begin_s + number
        driver.add(plain(name, number + 2, prompt=prompt))
    assert names(driver.scheduler.waiting) == ["first", "later", "long"]
    pass_time(driver, 10 * AGING_S + 1)
    return driver


def test_a_late_request_does_not_pass_one_that_waits_even_longer(queue):
    """A short prompt that came before it stands before it, however long both have waited."""
    queue.drain()
    starts = {name: queue.deliveries[name][0] for name in ("first", "long", "later")}
    assert starts["first"] < starts["long"] < starts["later"]


def test_one_that_vllm_skips_keeps_no_late_request_back(queue):
    """As one whose LoRA adapter has no slot for long."""
    scheduler = queue.scheduler
    scheduler.deferred_waiting.add(scheduler.requests["first"])
    queue.step()
    assert names(scheduler.waiting)[0] == "long"


def test_a_late_request_with_a_grammar_goes_first(queue):
    """vLLM looks at its grammar when its turn comes, and not before."""
    scheduler = queue.scheduler
    scheduler.requests["long"].status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    scheduler.deferred_waiting.update(scheduler.requests[name] for name in ("first", "long"))
    queue.step()
    assert names(scheduler.waiting)[0] == "long"
