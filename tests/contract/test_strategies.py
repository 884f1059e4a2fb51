"""Each listed strategy closes thoughts on the real scheduler; a new one is tested without more."""

from dataclasses import dataclass

import pytest
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import THINK_END, WORD, Job
from short_thoughts import NAMES, as_variables, short_thoughts

# A line of four tokens; the two in the middle are a pattern.
NEWLINE = 198
LINE = (WORD, 70, 71, NEWLINE)
# Tokens of the thought after which its entropy rises.
CALM_TOKENS = 150


@dataclass(frozen=True)
class Rambler(Job):
    """A thought that says one line over and over."""

    def token(self, index):
        said = super().token(index)
        return LINE[index % len(LINE)] if said == WORD and index < self.think_tokens else said


def play(driver):
    """One request, whose entropy rises within its thought, and whose model would rather end it."""
    driver.end_prob = 0.9
    driver.add(Rambler("r", thinker("r").prompt, 400, 30))
    for _ in range(CALM_TOKENS):
        driver.step()
    driver.entropy_nats = 3.0
    driver.drain()
    return driver.scheduler.phase_counters.totals


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("strategy", NAMES)
def test_each_strategy_closes_a_thought(monkeypatch, demo_model, strategy, is_async):
    """Once, as its own reason, and nothing is left of the request."""
    settings = as_variables(short_thoughts(strategy))
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **settings)
    totals = play(driver)
    assert driver.forced == [("r", THINK_END)]
    assert {name for name in totals if name.startswith("exit:")} == {f"exit:{strategy}"}
    assert totals[f"exit:{strategy}"] == totals[f"exit_verdict:{strategy}"] == 1
    assert totals[f"think_tokens:{strategy}"] < 400
    assert is_empty(driver)


@pytest.mark.parametrize("strategy", NAMES)
def test_each_strategy_closes_nothing_where_it_observes(monkeypatch, demo_model, strategy):
    """It says that it would have."""
    settings = as_variables({**short_thoughts(strategy), "mode": "observe"})
    driver = exit_driver(monkeypatch, demo_model, **settings)
    totals = play(driver)
    assert not driver.forced
    assert totals["exit:natural"] == totals[f"exit_verdict:{strategy}"] == 1
    assert is_empty(driver)


def test_without_a_strategy_the_same_thought_is_left_alone(monkeypatch, demo_model):
    """What closes it above is the strategy."""
    settings = as_variables(short_thoughts("none of them"))
    driver = exit_driver(monkeypatch, demo_model, **settings)
    totals = play(driver)
    assert not driver.forced
    assert totals["exit:natural"] == 1
