"""Closes beside LoRA adapters, which vLLM counts over the requests of one step alone."""

import pytest
from exit_driver import exit_driver, is_empty, thinker
from vllm.lora.request import LoRARequest

CLOSES = {"EXIT__MAX_THINK_TOKENS": "40", "EXIT__EAT": "false"}
LORA = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8}


def add(driver, name, adapter, **job):
    driver.add(thinker(name, 100, **job))
    request = driver.scheduler.requests[name]
    request.lora_request = LoRARequest(f"adapter{adapter}", adapter, f"adapter{adapter}")


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_no_other_adapter_comes_in_while_a_close_sits_out_a_step(monkeypatch, demo_model, is_async):
    """Both would be in the step after it, and vLLM stops at more adapters than it has slots for."""
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, engine_args=LORA, **CLOSES)
    add(driver, "first", 1)
    driver.step()
    add(driver, "second", 2)
    driver.drain()
    assert len(driver.forced) == 2
    # One behind the other.
    assert driver.deliveries["first"][-1] < driver.deliveries["second"][0]
    assert is_empty(driver)


def test_a_close_without_an_adapter_keeps_no_request_out(monkeypatch, demo_model):
    """The step that it sits out admits others as ever."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True, engine_args=LORA, **CLOSES)
    driver.add(thinker("first", 100))
    scheduler = driver.scheduler
    while not scheduler.early_exit.forced_closes:
        driver.step()
    add(driver, "new", 1)
    assert list(driver.step().num_scheduled_tokens) == ["new"]
    driver.drain()
    assert is_empty(driver)


def test_a_step_whose_probes_fail_admits_no_other_adapter_either(monkeypatch, demo_model):
    """The close sits it out already when that happens."""
    driver = exit_driver(monkeypatch, demo_model, is_async=True, engine_args=LORA, **CLOSES)
    early_exit = driver.scheduler.early_exit
    share = early_exit.probes.share_seats

    def fails_beside_a_close(**kwargs):
        if early_exit.forced_closes.skips_adapter:
            raise RuntimeError("no seats")
        share(**kwargs)

    monkeypatch.setattr(early_exit.probes, "share_seats", fails_beside_a_close)
    add(driver, "first", 1)
    driver.step()
    add(driver, "second", 2)
    driver.drain()
    assert driver.scheduler.phase_counters.totals["fallback:exception"] == 2
    assert driver.deliveries["first"][-1] < driver.deliveries["second"][0]
