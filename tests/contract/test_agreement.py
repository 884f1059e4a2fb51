"""vLLM's external launcher: schedulers of one model decide alike, whatever their clocks say."""

import random
from copy import copy

import pytest
from scheduler_driver import Driver, Job, engine_config, make_prompt
from tier_driver import SYNC_AND_ASYNC, scheduler_class
from vllm.v1.executor.abstract import Executor, ExecutorWithExternalLauncher
from vllm.v1.worker import worker_base

from meridian_patch.engine import status
from meridian_patch.engine.early_exit import report
from meridian_patch.patching.candidate import MARK


class OwnLauncher(ExecutorWithExternalLauncher):
    """A user's own executor of that kind."""


def rank(demo_model, backend, *, is_async, clock):
    """One rank's scheduler, on a machine on which seconds pass at a pace of their own."""
    config = copy(engine_config(demo_model, is_async=is_async, blocks=40))
    config.parallel_config = copy(config.parallel_config)
    config.parallel_config.distributed_executor_backend = backend
    driver = Driver.build(
        scheduler_class(is_async=is_async), config, is_async=is_async, tiered=True
    )
    driver.scheduler.clock = lambda: driver.now_s * clock
    driver.scheduler.kv_cache_manager.clock = lambda: driver.now_s * clock
    return driver


def decisions(driver, seed=3, requests=40, steps=600):
    """What each step schedules and preempts while requests come at the same steps."""
    rng = random.Random(seed)
    seen = []
    for step in range(steps):
        if step % 6 == 0 and step // 6 < requests:
            prompt = make_prompt(rng, rng.randrange(40, 400), thinks=rng.random() < 0.8)
            thinks = prompt[-1] == 256
            think = rng.randrange(20, 400) if thinks else None
            job = Job(f"r{step}", tuple(prompt), think, rng.randrange(5, 60))
            driver.add(job, extra_args={"meridian_exit": "enforce"})
        output = driver.step()
        seen.append((dict(output.num_scheduled_tokens), set(output.preempted_req_ids or ())))
    return seen


@pytest.fixture
def eager(monkeypatch, demo_model):
    """Whatever may follow a clock does so soon; workers measure."""
    for is_async in (False, True):
        engine_config(demo_model, is_async=is_async, blocks=40)
    monkeypatch.setattr(worker_base.WorkerBase, MARK, "worker", raising=False)
    for name, value in {
        "POLICY__TIME_BUDGET_US": "10000000",
        "POLICY__LEVEL_TOKENS": "50",
        "POLICY__AGING_S": "2",
        "KV__RETAIN_S": "1",
        "EXIT__MODE": "enforce",
        "EXIT__MIN_THINK_TOKENS": "20",
        "EXIT__EAT_WARMUP_PROBES": "2",
        "EXIT__PROBE_MIN_GAP_TOKENS": "8",
    }.items():
        monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{name}", value)


@SYNC_AND_ASYNC
@pytest.mark.parametrize("backend", ["external_launcher", OwnLauncher])
def test_ranks_decide_alike(demo_model, eager, is_async, backend, caplog):
    """Rules that follow clocks made one rank schedule what the other did not: both would hang."""
    first, second = (
        decisions(rank(demo_model, backend, is_async=is_async, clock=clock)) for clock in (1.0, 7.0)
    )
    assert first == second
    assert any(preempted for _, preempted in first)
    assert "external launcher" in caplog.text
    assert "policy is noop" in caplog.text


def test_it_is_told_in_the_status(demo_model, eager, monkeypatch):
    """`meridian status` says why the configured policy is not the one in force."""
    told = {}
    monkeypatch.setattr(status, "publish", lambda **facts: told.update(facts))
    driver = rank(demo_model, "external_launcher", is_async=False, clock=1.0)
    assert (told["policy"], told["rules"], told["exit"]) == ("noop", [], "off")
    assert told["kv_tiers"] == "keep"
    assert "external launcher" in told["limited_by"]
    assert driver.scheduler.early_exit is None
    # A request that asks for early exit is told why there is none.
    said = []
    attach = lambda _, news: said.extend(news.values())  # noqa: E731
    monkeypatch.setattr(report, "attach_all", attach)
    prompt = make_prompt(random.Random(1), 40, thinks=True)
    driver.add(Job("asks", tuple(prompt), 20, 5), extra_args={"meridian_exit": "enforce"})
    driver.drain()
    [news] = said
    assert set(news.not_enforced.values()) == {"external_launcher"}


@pytest.mark.parametrize("backend", ["mp", "uni", "ray", None, Executor])
def test_one_scheduler_is_not_limited(demo_model, eager, backend, monkeypatch):
    """Tensor, pipeline and data parallelism have one scheduler for each model copy."""
    told = {}
    monkeypatch.setattr(status, "publish", lambda **facts: told.update(facts))
    rank(demo_model, backend, is_async=False, clock=1.0)
    assert told["policy"] == "latency"
    assert told["limited_by"] is None


def test_a_launcher_of_the_users_own_is_what_vllm_makes_of_it(demo_model):
    """vLLM takes a class as it is, and the name for the class that we look for."""
    config = copy(engine_config(demo_model, is_async=False, blocks=40))
    config.parallel_config = copy(config.parallel_config)
    for backend, expected in (
        ("external_launcher", ExecutorWithExternalLauncher),
        (OwnLauncher, OwnLauncher),
    ):
        config.parallel_config.distributed_executor_backend = backend
        assert Executor.get_class(config) is expected
