"""Places in vLLM's own queues: the order against a plain sort, and that no move walks through."""

import random
import time
from types import SimpleNamespace

import pytest
from full_pool import (
    BLOCKS,
    newcomer,
    num_preempted_for_room,
    share_time_alone,
    taught_driver,
)
from full_pool import job as full_job
from plan_watch import watch_plans
from scheduler_driver import Job, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, preempt, step_until
from vllm.v1.core.sched.request_queue import FCFSRequestQueue, PriorityRequestQueue
from vllm.v1.request import RequestStatus

from meridian_patch.engine.request_state import FRONT, RequestStates
from meridian_patch.engine.scheduler.running_order import ArrivalOrder
from meridian_patch.engine.scheduler.waiting_order import MOST_STEPS, REACH, WaitingOrder, first
from meridian_patch.phase.tracker import Phase

AGING_S = 30.0
# Of CPU time, the least of several tries.
MOST_S = 0.3e-3


class Waiter:
    """What the queues look at of a request."""

    def __init__(self, name, priority=0, arrival_time=0.0):
        self.request_id = name
        self.priority = priority
        self.arrival_time = arrival_time
        self.status = RequestStatus.WAITING

    def __lt__(self, other):
        mine = (self.priority, self.arrival_time, self.request_id)
        return mine < (other.priority, other.arrival_time, other.request_id)


class PlacedOrder:
    """The order of a queue, with the records of those that are in it or were."""

    def __init__(self):
        self.states = RequestStates()
        self._order = WaitingOrder(self.states, AGING_S)

    def record(self, one):
        return self.states.get(one.request_id) or self.states.add(one)

    def on_added(self, one, queue, level, priority, now_s):
        self._order.place_new(self.record(one), queue, level, priority, now_s)

    def on_removed(self, one):
        self.states.drop(one)

    def moved_to_front(self, one):
        self.record(one).place = FRONT

    def put_at_level(self, one, level, queue):
        self._order.put_at_level(self.record(one), level, queue)

    def bring_forward(self, ones, queue):
        self._order.bring_forward([self.record(one) for one in ones], queue)


def names(queue):
    return [one.request_id for one in queue]


@pytest.mark.parametrize("seed", range(20))
def test_the_order_is_that_of_a_plain_sort(seed):
    """Newcomers of all priorities and levels, preempted ones of all levels, and departures."""
    rng = random.Random(seed)
    order, queue, number = PlacedOrder(), FCFSRequestQueue(), 0
    front, arrivals, sorted_ones = [], {}, []
    for now_s in range(400):
        move = rng.random()
        if move < 0.5:
            number += 1
            one = Waiter(f"r{number}")
            priority = rng.choice([-9, -1, 0, 0, 0, 1])
            queue.add_request(one)
            level = rng.choice([0, 0, 0, 1, 3])
            order.on_added(one, queue, level, priority, float(now_s))
            steps = max(-MOST_STEPS, min(MOST_STEPS, priority))
            # Of those that arrived at once the first one goes first.
            arrivals[one] = now_s + steps * AGING_S, number
            sorted_ones.append((level, arrivals[one], one))
        elif move < 0.7 and queue:
            # What the next step admits; some of it runs on, some is preempted.
            one = queue.pop_request()
            front = [other for other in front if other is not one]
            sorted_ones = [row for row in sorted_ones if row[2] is not one]
            if rng.random() < 0.3:
                order.on_removed(one)
                continue
            queue.prepend_request(one)
            order.moved_to_front(one)
            if rng.random() < 0.7:
                level = rng.randrange(5)
                order.put_at_level(one, level, queue)
                sorted_ones.append((level, arrivals[one], one))
            else:
                front.insert(0, one)
        elif move < 0.85 and sorted_ones:
            chosen = [row[2] for row in rng.sample(sorted_ones, min(2, len(sorted_ones)))]
            order.bring_forward(chosen, queue)
            sorted_ones = [row for row in sorted_ones if row[2] not in chosen]
            front = chosen + front
        elif queue:
            one = rng.choice(list(queue))
            queue.remove_requests([one])
            order.on_removed(one)
            front = [other for other in front if other is not one]
            sorted_ones = [row for row in sorted_ones if row[2] is not one]
        sorted_ones.sort(key=lambda row: row[:2])
        assert names(queue) == names([*front, *(row[2] for row in sorted_ones)])


def test_one_of_many_that_came_at_once_is_found_again():
    """More arrive in the same moment than are searched; the first is preempted, then answers."""
    order, queue = PlacedOrder(), FCFSRequestQueue()
    ones = [Waiter(f"r{number}") for number in range(REACH + 20)]
    for one in ones:
        queue.add_request(one)
        order.on_added(one, queue, 0, 0, 1.0)
    first_one = queue.pop_request()
    queue.prepend_request(first_one)
    order.moved_to_front(first_one)
    order.put_at_level(first_one, 0, queue)
    assert queue[0] is first_one
    order.put_at_level(first_one, 1, queue)
    assert queue[-1] is first_one
    order.bring_forward([first_one], queue)
    assert queue[0] is first_one


def test_the_first_of_a_heap_are_those_of_its_order():
    """Without taking one out, or copying it."""
    rng = random.Random(0)
    for count in (0, 1, 2, 7, 300):
        queue = PriorityRequestQueue()
        for number in range(count):
            queue.add_request(Waiter(f"r{number}", rng.randrange(3), rng.random()))
        assert names(first(queue, 5)) == names(list(queue)[:5])
        assert len(queue) == count


def least_seconds(prepare, operation, tries=7):
    """Of CPU time; ``prepare`` is not timed."""
    taken = []
    for _ in range(tries):
        given = prepare()
        start = time.thread_time()
        operation(given)
        taken.append(time.thread_time() - start)
    return min(taken)


def deep_queue(waiting, num_displaced=40):
    order, queue = PlacedOrder(), FCFSRequestQueue()
    newcomers = [Waiter(f"r{number}") for number in range(waiting)]
    for number, one in enumerate(newcomers):
        queue.append(one)
        order.on_added(one, SimpleNamespace(), 0, 0, float(number))
    displaced = [Waiter(f"d{number}") for number in range(num_displaced)]
    for one in displaced:
        queue.prepend_request(one)
        order.moved_to_front(one)
        order.put_at_level(one, 1, queue)
    return order, queue, displaced


@pytest.mark.parametrize("priority", [0, -2])
def test_an_arrival_costs_the_same_however_many_wait(priority):
    """5,000 wait and 40 were displaced: 30 ms before, and 1.5 ms for one with a priority."""

    def prepare():
        order, queue, _ = deep_queue(5000)
        one = Waiter("new")
        queue.add_request(one)
        return order, queue, one

    seconds = least_seconds(prepare, lambda g: g[0].on_added(g[2], g[1], 0, priority, 5000.0))
    assert seconds < MOST_S


def test_making_room_and_coming_back_cost_the_same_however_many_wait():
    """One goes behind 5,000; the one that waits longest behind them goes first."""

    def displace(given):
        order, queue, _ = given
        one = Waiter("one")
        queue.prepend_request(one)
        order.moved_to_front(one)
        order.put_at_level(one, 1, queue)

    assert least_seconds(lambda: deep_queue(5000), displace) < MOST_S
    assert (
        least_seconds(lambda: deep_queue(5000), lambda g: g[0].bring_forward(g[2][:1], g[1]))
        < MOST_S
    )


def test_a_request_that_is_not_in_the_queue_is_not_looked_for_everywhere():
    """Such as one that loads its KV."""

    def search(given):
        order, queue, _ = given
        order.bring_forward([Waiter("elsewhere")], queue)

    assert least_seconds(lambda: deep_queue(5000), search) < MOST_S


def test_a_preempted_request_enters_the_heap_with_its_true_time():
    """So nothing has to be found in the heap afterwards."""
    running = [Waiter(f"r{number}", 0, float(10 - number)) for number in range(4)]
    true_times = {one: one.arrival_time for one in running}
    arrivals = ArrivalOrder(running)
    assert sorted(running) == running
    arrivals.restore_one(running[2])
    assert running[2].arrival_time == true_times[running[2]]
    arrivals.restore()
    assert {one: one.arrival_time for one in running} == true_times


@pytest.fixture
def sharing(monkeypatch):
    for name, value in {"time_budget_us": "10000000", "aging_s": "5"}.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_POLICY__{name.upper()}", value)


def job(name, seed, think=400, **more):
    tokens = make_prompt(random.Random(seed), 60, thinks=True, shared=1000 + seed)
    return Job(name, tuple(tokens), think, 20, **more)


def test_a_displaced_thought_whose_boundary_was_on_the_way_resumes_first(
    demo_model, sharing, monkeypatch
):
    """It stands behind all newcomers, becomes an answer there, and goes before them."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS", "50")
    driver = driver_for(demo_model, is_async=True, max_num_seqs=2)
    scheduler = driver.scheduler
    driver.add(job("thinker", 1, think=100))
    driver.add(job("runs", 2))
    step_until(driver, "thinker", Phase.THINK, 100)
    for number in range(5):
        driver.add(job(f"new{number}", 10 + number))
    request = scheduler.requests["thinker"]
    scheduler.running.remove(request)
    # Its output on the way is delivered, as when upstream preempts.
    scheduler._preempt_request(request, 0.0, drop_stale_output=False)
    scheduler.max_num_active_reqs = 1
    driver.step()
    assert names(scheduler.waiting).index("thinker") == 5
    for _ in range(4):
        driver.step()
    # An answer may take the place of any thinker.
    assert names(scheduler.running) == ["thinker"]
    scheduler.max_num_active_reqs = 2
    driver.drain()


@pytest.mark.parametrize("thinks", [True, False])
def test_a_long_prompt_waits_behind_short_ones_but_not_for_ever(demo_model, thinks, monkeypatch):
    """Where anyone thinks; else the queue is stock's."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS", "50")
    driver = driver_for(demo_model, max_num_seqs=1)
    scheduler = driver.scheduler
    if thinks:
        driver.add(job("runs", 1, think=500))
    else:
        tokens = make_prompt(random.Random(1), 60, thinks=False, shared=1)
        driver.add(Job("runs", tuple(tokens), 0, 500))
    driver.step()
    for number, prompt in enumerate((400, 20, 30)):
        tokens = make_prompt(random.Random(number), prompt, thinks=thinks, shared=number)
        driver.add(Job(f"new{number}", tuple(tokens), 5 * thinks, 5))
    driver.step()
    if not thinks:
        assert names(scheduler.waiting) == ["new0", "new1", "new2"]
        return
    assert names(scheduler.waiting) == ["new1", "new2", "new0"]
    now_s = scheduler.clock()
    scheduler.clock = lambda: now_s + 301
    while "new0" not in {request.request_id for request in scheduler.running}:
        assert "new1" in scheduler.requests
        driver.step()


@SYNC_AND_ASYNC
def test_an_answer_goes_before_a_thinker_of_its_level_that_made_room(
    demo_model, is_async, monkeypatch
):
    """Without the rule `order` it stands among thinkers, and the longest is before it."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__ORDER", "false")
    share_time_alone(monkeypatch)
    driver = taught_driver(demo_model, is_async=is_async)
    scheduler = driver.scheduler
    driver.add(full_job("long", 50, think=700, answer=5))
    step_until(driver, "long", Phase.THINK, 290)
    driver.add(newcomer(2, "reads"))
    step_until(driver, "reads", Phase.ANSWER, 1)
    preempt(driver, "reads")
    reads = scheduler.requests["reads"]
    parts, states = scheduler.policy_parts, scheduler.request_states
    parts.queue._order_waiting(scheduler.clock())
    parts.waiting_order.put_at_level(states.of(reads), 9, scheduler.waiting)
    pool = scheduler.kv_cache_manager.block_pool
    pool.get_new_blocks(pool.get_num_free_blocks())
    while not num_preempted_for_room(driver):
        driver.step()
    driver.step()
    assert reads.status == RequestStatus.RUNNING


@pytest.mark.parametrize("in_flight", ["boundary", "thought"])
def test_a_thinker_whose_boundary_is_in_flight_makes_no_room(demo_model, in_flight, monkeypatch):
    """Whether the token in flight ends its thought is seen first; it costs one step.

    vLLM refuses the newcomer in a step in which it thinks; the boundary is in flight after that.
    """
    share_time_alone(monkeypatch)
    driver = taught_driver(demo_model, is_async=True)
    scheduler = driver.scheduler
    think = 286 if in_flight == "boundary" else 287
    driver.add(full_job("reads", 50, think=think, answer=30))
    driver.add(full_job("other", 51, think=500, answer=5))
    step_until(driver, "reads", Phase.THINK, 285)
    scheduler.requests["other"].priority = -1
    driver.add(newcomer(BLOCKS - 22))
    lengths = []
    while "reads" in scheduler.requests:
        driver.step()
        lengths.append(len(driver.deliveries["reads"]))
    is_displaced = bool(scheduler.phase_counters.totals.get("preemption:think"))
    assert is_displaced is (in_flight == "thought")
    pauses = len(lengths) - len(set(lengths))
    assert pauses > 5 if is_displaced else pauses <= 2


def test_the_heap_is_in_order_after_preemptions(demo_model, sharing, monkeypatch):
    """vLLM's priority policy with requests that are preempted: a heap all the time."""
    driver = driver_for(demo_model, blocks=24, scheduling_policy="priority")
    for number in range(30):
        driver.add(
            job(f"r{number}", number, think=50 + 10 * number, arrival_time=float(number % 7))
        )
    seen = 0
    while driver.scheduler.has_unfinished_requests():
        driver.step()
        heap = driver.scheduler.waiting._heap
        assert all(not heap[i] < heap[(i - 1) // 2] for i in range(1, len(heap)))
        seen += len(heap)
    assert seen
    assert driver.scheduler.phase_counters.totals["preemption:think"]


def raises(*_args, **_kwargs):
    raise RuntimeError("made to fail")


@pytest.mark.parametrize("fails", [False, True])
def test_a_step_is_not_cut_where_the_policy_failed(monkeypatch, demo_model, fails):
    """The order fails behind the cut; the step runs as stock, as the log says."""
    driver = driver_for(demo_model)
    driver.add(job("reader", 1, think=5))
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(Job("long", tuple(make_prompt(random.Random(3), 300, thinks=True)), 5, 5))
    if fails:
        monkeypatch.setattr(driver.scheduler.policy_parts.order.order, "arrange", raises)
    tokens = max(driver.step().num_scheduled_tokens.values())
    full = min(driver.scheduler.max_num_scheduled_tokens - 1, 300)
    assert tokens == full if fails else tokens < full


def test_an_answer_is_ranked_as_one_where_the_levels_fail(monkeypatch, demo_model):
    """A new answer must not keep a thinker's rank."""
    driver = driver_for(demo_model)
    parts, changed = driver.scheduler.policy_parts, []
    monkeypatch.setattr(parts.levels, "ended", raises)
    monkeypatch.setattr(parts.order.order, "changed", changed.append)
    driver.add(job("reader", 1, think=5))
    step_until(driver, "reader", Phase.ANSWER)
    assert driver.scheduler.phase_counters.totals["fallback:exception"]
    assert driver.scheduler.requests["reader"] in changed


def test_a_slow_plan_is_carried_out(demo_model):
    """It counts as slow, and its cut holds all the same; before, the step went uncut."""
    driver = driver_for(demo_model)
    driver.scheduler.policy_parts.order.time_budget_s = 0.0
    watch = watch_plans(driver.scheduler)
    driver.add(job("reader", 1, think=5))
    step_until(driver, "reader", Phase.ANSWER)
    driver.add(Job("long", tuple(make_prompt(random.Random(3), 300, thinks=True)), 5, 5))
    tokens = max(driver.step().num_scheduled_tokens.values())
    assert driver.scheduler.phase_counters.totals["fallback:slow"]
    assert tokens == watch.plan.token_budget - 1


def test_preempting_leaves_nothing_behind(demo_model, sharing):
    """The places and lists of requests that are gone are gone."""
    driver = driver_for(demo_model)
    driver.add(job("a", 1))
    driver.add(job("b", 2))
    step_until(driver, "a", Phase.THINK, 50)
    preempt(driver, "a")
    driver.abort("a")
    driver.drain()
    assert not len(driver.scheduler.request_states)


def test_an_answer_that_was_displaced_before_stays_first(demo_model, sharing):
    """Upstream preempts it, and puts it first; more requests wait than are searched at the end."""
    driver = driver_for(demo_model, max_num_seqs=2)
    scheduler, order = driver.scheduler, driver.scheduler.policy_parts.waiting_order
    driver.add(job("reader", 1, think=30))
    driver.add(job("thinks", 2))
    step_until(driver, "reader", Phase.THINK, 20)
    reader = scheduler.requests["reader"]
    preempt(driver, "reader")
    order.put_at_level(scheduler.request_states.of(reader), 3, scheduler.waiting)
    step_until(driver, "reader", Phase.ANSWER, 3)
    for number in range(REACH + 20):
        driver.add(job(f"new{number}", 10 + number))
    preempt(driver, "reader")
    driver.add(job("urgent", 3), extra_args={"meridian_priority": -4})
    scheduler.max_num_active_reqs = 0
    driver.step()
    assert names(scheduler.waiting)[:2] == ["reader", "urgent"]
