"""Probes that only observe wait for a step with prompts, where captured graphs run decodes."""

import pytest
from exit_driver import exit_driver, thinker

from meridian_patch.engine.scheduler.policy_part import _MOST_WAITED_STEPS


def driver_with_due_probe(monkeypatch, demo_model, graph_tokens=256, **settings):
    """A driver of three thinkers, one of which is due for a probe, and steps that only decode."""
    driver = exit_driver(monkeypatch, demo_model, **{"EXIT__MODE": "observe"} | settings)
    driver.scheduler.policy_parts.model.graph_tokens = graph_tokens
    for number in range(3):
        driver.add(thinker(f"r{number}"))
    probes = driver.scheduler.early_exit.probes
    for _ in range(200):
        if probes.are_next:
            return driver, probes
        driver.step()
    raise AssertionError("no probe is due")


def steps_until_probed(driver, probes) -> int:
    for steps in range(1, 100):
        driver.step()
        if probes.live or probes.num_probes:
            return steps
    raise AssertionError("no probe is made")


def test_a_probe_waits_for_prompts(monkeypatch, demo_model):
    """It comes with the next prompt, which makes the step longer anyway."""
    driver, probes = driver_with_due_probe(monkeypatch, demo_model)
    for _ in range(5):
        driver.step()
    assert not probes.live
    assert not probes.num_probes
    driver.add(thinker("newcomer"))
    assert steps_until_probed(driver, probes) == 1


def test_without_prompts_it_does_not_wait_for_ever(monkeypatch, demo_model):
    """After so many steps it is made in one that would only decode."""
    driver, probes = driver_with_due_probe(monkeypatch, demo_model)
    assert steps_until_probed(driver, probes) == _MOST_WAITED_STEPS + 1


def test_the_steps_that_it_waits_are_passed_over(monkeypatch, demo_model):
    """They only decode, so the policy arranges nothing in them."""
    driver, probes = driver_with_due_probe(monkeypatch, demo_model)
    driver.step()
    assert probes.due
    assert driver.scheduler.policy_parts.first.is_uncontended()


@pytest.mark.parametrize(
    ("graph_tokens", "mode"), [(None, "observe"), (256, "enforce")], ids=("no graphs", "enforce")
)
def test_others_do_not_wait(monkeypatch, demo_model, graph_tokens, mode):
    """A close that comes late costs tokens, and without graphs a probe costs its tokens alone."""
    settings = {"graph_tokens": graph_tokens, "EXIT__MODE": mode}
    driver, probes = driver_with_due_probe(monkeypatch, demo_model, **settings)
    assert steps_until_probed(driver, probes) == 1


def test_a_request_that_enforces_does_not_wait(monkeypatch, demo_model):
    """On a server that observes; due probes of others go with its own."""
    driver = exit_driver(monkeypatch, demo_model, EXIT__MODE="observe")
    driver.scheduler.policy_parts.model.graph_tokens = 256
    driver.add(thinker("own"), extra_args={"meridian_exit": "enforce"})
    probes = driver.scheduler.early_exit.probes
    while not probes.are_next:
        driver.step()
    assert steps_until_probed(driver, probes) == 1
