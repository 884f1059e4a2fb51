"""How late a close comes, on the real schedulers, and that calibration says the same."""

import random
from dataclasses import dataclass
from importlib.resources import files

import pytest
import yaml
from exit_driver import exit_driver
from scheduler_driver import BLOCK_SIZE, THINK_END, Job, make_prompt

from meridian_patch.calibrate.stops import eat_close_points, probe_points
from meridian_patch.engine.early_exit import binding as exit_binding
from meridian_patch.engine.early_exit.close_checks import lag_of, pace_of
from meridian_patch.exit.lag import Lag

# The tiny reasoner's line break.
LINE = 198
SETTINGS = {
    "EXIT__GRACE_TOKENS": "9",
    "EXIT__PROBE_MIN_GAP_TOKENS": "11",
    "EXIT__PROBE_MAX_GAP_TOKENS": "17",
    "EXIT__RPDI": "false",
}


@dataclass(frozen=True)
class Lines(Job):
    """One that thinks in lines, some of which are followed by a blank one."""

    line_tokens: int = 7

    def token(self, index: int) -> int:
        is_line_end = index % self.line_tokens in (0, index // 30 % 2)
        return LINE if index < self.think_tokens and is_line_end else super().token(index)


@pytest.mark.parametrize("every_steps", [1, 3])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_close_comes_where_calibration_says(demo_model, monkeypatch, is_async, every_steps):
    """To the token, at ends of paragraphs, inside lines, and at borders of blocks."""
    rng = random.Random(3)
    kinds = set()
    for _ in range(15):
        warmup = rng.randrange(1, 7)
        settings = {
            "EXIT__EAT_WARMUP_PROBES": str(warmup),
            "EXIT__PROBE_EVERY_STEPS": str(every_steps),
        }
        driver = exit_driver(monkeypatch, demo_model, is_async=is_async, **SETTINGS, **settings)
        exits = driver.scheduler.early_exit
        prompt = make_prompt(rng, rng.randrange(30, 80), thinks=True)
        job = Lines("r", tuple(prompt), 200, 5, line_tokens=rng.randrange(4, 40))
        driver.add(job)
        offered, offer = {}, exits.probes.offer

        def watched_offer(*limits, offered=offered, offer=offer, exits=exits):
            # Steps from the first one that could have had the probe to the one that has it.
            for due in exits.probes.due.values():
                offered[due.probe.think_tokens] = offered.get(due.probe.think_tokens, -1) + 1
            offer(*limits)

        monkeypatch.setattr(exits.probes, "offer", watched_offer)
        driver.drain()
        ((_, token),) = driver.forced
        assert token == THINK_END
        thought = [job.token(index) for index in range(200)]
        [closed_at] = [
            count - 1
            for name, count in driver.scheduler.phase_counters.totals.items()
            if name == "think_tokens:eat"
        ]
        config, breaks = exits.config, exits.breaks
        assert breaks.line == {LINE}
        lag = lag_of(driver.scheduler, every_steps)
        assert lag == Lag(2 if is_async else 1, 1, BLOCK_SIZE, every_steps)
        probes = [(at, 1.0) for at in probe_points(thought, config, breaks)]
        if every_steps == 1:

            def wait_steps(at, lag=lag, prompt=prompt):
                return lag.wait_steps(len(prompt) + at, 0)

            for at, waited in offered.items():
                assert waited == wait_steps(at)
        else:
            wait_steps = offered.get
            for at, waited in offered.items():
                turn = waited - lag.wait_steps(len(prompt) + at, 0)
                assert 0 <= turn < every_steps
        place = eat_close_points(thought, probes[: warmup + 1], config, breaks, lag, wait_steps)[0]
        assert closed_at == place.close_at
        judged_at = probes[warmup][0]
        kinds.add((thought[judged_at - 1] == LINE, (len(prompt) + judged_at) % BLOCK_SIZE == 0))
    assert len(kinds) > 2


def test_the_shipped_profile_is_for_synchronous_engines(demo_model, monkeypatch):
    """As vLLM's CPU build schedules, which it was calibrated on."""
    profile = files("meridian_patch.configs").joinpath("profiles/tiny_reasoner_exit.yaml")
    monkeypatch.setenv("MERIDIAN_PATCH_CONFIG", str(profile))
    for is_async in (False, True):
        warned = []
        monkeypatch.setattr(exit_binding.logger, "warning", lambda *args, w=warned: w.append(args))
        exit_driver(monkeypatch, demo_model, is_async=is_async)
        assert len([args for args in warned if "calibrated" in args[0]]) == is_async


@pytest.mark.parametrize(
    ("batches", "warns"), [(1, False), (2, True), (None, True)], ids=["same", "other", "unknown"]
)
def test_thresholds_of_another_engine_are_told_of(
    demo_model, monkeypatch, tmp_path, batches, warns
):
    """One warning at the start, with what differs and what to do."""
    lag = Lag(batches or 1, batches or 1, 2 * BLOCK_SIZE)._asdict()
    provenance = {"curve": {}, **({} if batches is None else {"lag": lag})}
    path = tmp_path / "profile.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "provenance": provenance}))
    monkeypatch.setenv("MERIDIAN_PATCH_CONFIG", str(path))
    warned = []
    monkeypatch.setattr(exit_binding.logger, "warning", lambda *args: warned.append(args))
    # Blocks of another size hardly matter.
    driver = exit_driver(monkeypatch, demo_model)
    said = [args[0] % args[1:] for args in warned if "calibrated" in args[0]]
    assert len(said) == warns
    if batches:
        assert all("with batches_in_flight 2" in text for text in said)
    assert all("batches_in_flight 1" in text and "meridian calibrate" in text for text in said)
    assert pace_of(driver.scheduler)["batches_in_flight"] == 1
