"""What the step-time model learns on vLLM's real scheduler, from which steps, in which unit."""

import random

import pytest
from exit_driver import exit_driver
from plan_watch import watch_plans
from scheduler_driver import STEP_S, TOKEN_S, Driver, Job, engine_config, make_prompt
from tier_driver import SYNC_AND_ASYNC, driver_for, scheduler_class, step_until
from vllm.v1.outputs import DraftTokenIds

from meridian_patch.phase.tracker import Phase


def job(name, *, thinks=True, prompt=60, think=60, answer=20):
    tokens = make_prompt(random.Random(name), prompt, thinks=thinks, shared=len(name))
    return Job(name, tuple(tokens), think if thinks else None, answer)


def learnt_share(driver):
    steering = driver.scheduler.policy_parts.timing
    return steering.learnt_steps / steering.ran_steps


def is_accurate(model, shape):
    """The driver's steps take ``STEP_S`` and ``TOKEN_S`` for each token."""
    tokens = shape.decode_tokens + shape.prefill_tokens
    return model.seconds(shape) == pytest.approx(STEP_S + TOKEN_S * tokens, rel=0.05)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("gap", ["64", "4"], ids=["usual probes", "many probes"])
def test_nearly_all_steps_are_learnt_from_with_exit_observing(
    monkeypatch, demo_model, is_async, gap
):
    """Steps with probes too; with 8 thoughts probed each 4 tokens hardly a step is without."""
    settings = {"EXIT__MODE": "observe", "EXIT__PROBE_MIN_GAP_TOKENS": gap}
    settings |= {"EXIT__PROBE_MAX_GAP_TOKENS": str(2 * int(gap)), "EXIT__MIN_THINK_TOKENS": "20"}
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **settings)
    for number in range(40):
        driver.add(job(f"r{number}", prompt=40 + 10 * number, think=150 + number))
        for _ in range(15):
            driver.step()
    driver.drain()
    assert driver.scheduler.phase_counters.totals["probe:measured"] > 20
    assert driver.scheduler.policy_parts.timing.ran_steps > 600
    assert learnt_share(driver) >= 0.9


@SYNC_AND_ASYNC
def test_steps_without_a_thinking_request_are_noted_too(demo_model, is_async):
    """Chat traffic before: a step that was not noted took the next one's note with it."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200)
    for number in range(8):
        driver.add(job(f"chat{number}", thinks=False))
    for _ in range(5):
        driver.step()
    assert driver.scheduler.policy_parts.timing.ran_steps
    driver.add(job("thinks", think=200))
    driver.drain()
    assert learnt_share(driver) >= 0.9


@SYNC_AND_ASYNC
def test_a_step_that_was_not_noted_costs_its_own_note_only(demo_model, is_async):
    """The guard may drop any note; the steps behind it are learnt from, and timed by themselves."""
    driver = driver_for(demo_model, is_async=is_async, blocks=200)
    parts, watch = driver.scheduler.policy_parts, watch_plans(driver.scheduler)
    noted, steps = parts.load.of, iter(range(10_000))

    def fails_now_and_then(output, planned):
        if next(steps) % 20 == 5:
            raise RuntimeError("not noted")
        return noted(output, planned)

    parts.load.of = fails_now_and_then
    driver.add(job("r", think=400))
    driver.drain()
    assert learnt_share(driver) >= 0.9
    assert is_accurate(parts.model, watch.plan.shape)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_probes_make_prefill_look_no_dearer(monkeypatch, demo_model, is_async):
    """Behind hundreds of steps with probes, decoding and prefill are predicted as they are.

    A step with a probe takes half as long again, as one without a graph of its own.
    """
    settings = {"EXIT__MODE": "observe", "EXIT__PROBE_MIN_GAP_TOKENS": "8"}
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, blocks=400, **settings)
    driver.prefill_s = 0.005
    watch = watch_plans(driver.scheduler)
    for number in range(12):
        driver.add(job(f"lesson{number}", prompt=50 + 40 * number, think=20, answer=5))
        driver.drain()
    for number in range(6):
        driver.add(job(f"r{number}", think=600))
    driver.drain()
    model = driver.scheduler.policy_parts.model
    shape = watch.plan.shape._replace(decode_tokens=6)
    assert is_accurate(model, shape)
    room = model.prefill_room(shape, 0.030, 0)
    in_time = (0.030 - STEP_S - driver.prefill_s) / TOKEN_S - shape.decode_tokens
    assert room.in_time == pytest.approx(in_time, rel=0.2)


def with_drafts(demo_model, number=3):
    speculative = {"method": "ngram", "num_speculative_tokens": number, "prompt_lookup_max": 2}
    # Not the cached one: the settings are no key.
    config = engine_config.__wrapped__(
        demo_model, is_async=False, blocks=200, speculative_config=speculative
    )
    return Driver.build(scheduler_class(is_async=False), config, is_async=False)


def watch_decodes(driver):
    """Decode tokens that each step was planned with, and those that it had."""
    scheduler, seen = driver.scheduler, []
    load = scheduler.policy_parts.load
    noted = load.of

    def scheduled(output, planned):
        prefilling = {r.request_id for r in scheduler.running if r.num_output_tokens == 0}
        prefilling |= {new.req_id for new in output.scheduled_new_reqs}
        ran = [n for name, n in output.num_scheduled_tokens.items() if name not in prefilling]
        if ran and len(ran) == len(output.num_scheduled_tokens):
            seen.append((planned.decode_tokens, sum(ran)))
        return noted(output, planned)

    load.of = scheduled
    return seen


def test_drafts_count_alike_in_plans_and_in_steps(demo_model):
    """Some requests have drafts and some have none: predictions count them as the steps do."""
    driver = with_drafts(demo_model)
    seen = watch_decodes(driver)
    for number in range(4):
        driver.add(job(f"r{number}", think=80))
    rng = random.Random(0)
    for _ in range(60):
        names = [r.request_id for r in driver.scheduler.running if not r.is_prefill_chunk]
        drafted = [[65] * rng.randint(0, 3) for _ in names]
        driver.scheduler.update_draft_token_ids(DraftTokenIds(names, drafted))
        driver.step()
    assert len(seen) > 40
    assert len({planned for planned, _ in seen}) > 5
    assert all(planned == ran for planned, ran in seen)


def test_drafts_that_are_not_there_leave_prefill_no_more_room(demo_model, monkeypatch):
    """A budget of three drafts for each of 12 requests that have none let prompts in by 36 more."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__ANSWER_ITL_MS", "20")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US", "10000000")
    driver = with_drafts(demo_model)
    for number in range(12):
        driver.add(job(f"lesson{number}", prompt=50 + 30 * number, think=20, answer=5))
        driver.drain()
    for number in range(12):
        driver.add(job(f"r{number}", think=5, answer=300))
    for number in range(12):
        step_until(driver, f"r{number}", Phase.ANSWER)
    driver.add(job("long", prompt=1200, think=5, answer=5))
    steps = [driver.step() for _ in range(4)]
    largest = max(step.total_num_scheduled_tokens for step in steps)
    in_time = (0.020 - STEP_S) / TOKEN_S
    assert 0.7 * in_time < largest < 1.15 * in_time


class InFlight:
    """Two batches in flight, as with two stages of a pipeline: outputs come back a step late."""

    def __init__(self, driver):
        self.driver = driver

    def step(self):
        driver = self.driver
        output = driver.scheduler.schedule()
        driver._in_flight.append((output, driver._run(output)))
        while len(driver._in_flight) > 1:
            driver._deliver()


def test_with_a_pipeline_a_step_has_the_requests_that_are_due(demo_model):
    """Half of the requests are in each step; plans count those and not all that run."""
    driver = driver_for(demo_model, blocks=200, pipeline_parallel_size=2)
    seen = watch_decodes(driver)
    pipeline = InFlight(driver)
    for number in range(6):
        driver.add(job(f"r{number}", think=100))
        pipeline.step()
    for _ in range(80):
        pipeline.step()
    assert len(seen) > 40
    assert max(ran for _, ran in seen) < 6
    assert all(planned == ran for planned, ran in seen)
    assert learnt_share(driver) >= 0.9
