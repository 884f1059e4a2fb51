"""Two engine cores in lock step, a mixture of experts between them: balance on and off."""

import time

import pytest
from run_engine import PATCHED, Job, run_job
from tiny_models import make_tiny
from workloads import ask, engine_arguments, token_ids

from meridian_patch.demo.problems import make_problems

pytestmark = [pytest.mark.engine, pytest.mark.nightly, pytest.mark.timeout(1200)]

PROBLEMS = make_problems(40, seed=31, steps=3)
ANSWERS = {"template": {"enable_thinking": False}}
SEATS = {
    "max_num_seqs": 4,
    "max_model_len": 512,
    "max_num_batched_tokens": 256,
    "data_parallel_size": 2,
    "async_scheduling": True,
}
ARMS = {
    "off": {"BALANCE": "false"},
    "off again": {"BALANCE": "false"},
    "on": {"BALANCE": "true"},
    "holding": {"BALANCE": "true", "BALANCE_HOLD_STEPS": "16"},
}


def crowd():
    """More requests than both ranks have seats: long thinkers, short answers, some that leave."""
    free = {"ignore_eos": True}
    asked = []
    for number in range(24):
        kind = number % 3
        tokens = (160, 30, 60)[kind]
        one = ask(f"r{number}", PROBLEMS[number], max_tokens=tokens, **free)
        one["at_step"] = number * 2
        if kind:
            one |= ANSWERS
        if number % 8 == 6:
            one["leaves_after"] = 10
        asked.append(one)
    # When both ranks are idle again.
    asked.append(ask("late", PROBLEMS[30], max_tokens=20, **free) | {"at_step": 1500})
    return {"name": "crowd", "requests": asked, "events": []}


def interrupted():
    """One rank is idle; the engine is paused, put to sleep and woken under way."""
    asked = [
        ask(f"i{number}", PROBLEMS[number], max_tokens=80, ignore_eos=True) | {"rank": 0}
        for number in range(6)
    ]
    events = [
        {"do": "pause", "mode": "keep", "at_token": 60, "hold_s": 2},
        {"do": "sleep", "level": 0, "mode": "keep", "at_token": 200, "hold_s": 2},
    ]
    return {"name": "interrupted", "requests": asked, "events": events}


@pytest.fixture(scope="module")
def arms(demo_model, tmp_path_factory):
    """Runs, cores and statuses by arm."""
    model = make_tiny("moe", demo_model, tmp_path_factory.mktemp("models"))
    results = {}
    for name, settings in ARMS.items():
        changes = {f"MERIDIAN_PATCH_SET_POLICY__{key}": value for key, value in settings.items()}
        env = PATCHED | changes | {"MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "10000000"}
        runs = [crowd(), interrupted()]
        stage = {"name": "dp", "engine": engine_arguments(model, **SEATS), "runs": runs}
        job = Job([stage], env=env, allow_async=True, is_async=True, share_experts=True)
        began_s = time.monotonic()
        results[name] = run_job(job, tmp_path_factory.mktemp("dp"), 540)["stages"]["dp"]
        assert "error" not in results[name], results[name]
        results[name]["seconds"] = time.monotonic() - began_s
    return results


def cores_of(arm):
    return [status for status in arm["status"] if status.get("role") == "engine_core"]


def test_balance_changes_no_token(arms):
    for name, arm in arms.items():
        for run in ("crowd", "interrupted"):
            expected = token_ids(arms["off"]["runs"][run])
            found = token_ids(arm["runs"][run])
            whole = {n for n, out in arm["runs"][run]["outputs"].items() if out["finished"]}
            assert {n: found[n] for n in whole} == {n: expected[n] for n in whole}, name


def test_every_request_ends(arms):
    for arm in arms.values():
        outputs = arm["runs"]["crowd"]["outputs"]
        assert sum(out["finished"] for out in outputs.values()) >= 22
        assert outputs["late"]["finished"]
        assert all(out["finished"] for out in arm["runs"]["interrupted"]["outputs"].values())
        for core in arm["runs"]["interrupted"]["cores"]:
            assert core["counts"] == [0, 0]
            assert not core["counted"].get("fallback:exception")


def test_ranks_met(arms):
    for name, settings in ARMS.items():
        cores = cores_of(arms[name])
        assert len(cores) == 2
        for core in cores:
            assert ("balance" in core["rules"]) == (settings["BALANCE"] == "true")
            assert not core["rules_off"]


def test_ranks_hear_each_other(arms):
    """A rank is held only because of what another one said."""
    held = {
        name: sum(
            core["counted"].get("limited_step:ranks", 0) for core in arm["runs"]["crowd"]["cores"]
        )
        for name, arm in arms.items()
    }
    assert held["holding"] > 0
    assert held["off"] == held["off again"] == held["on"] == 0


def test_figures(arms):
    """For the page of figures: what both ranks did in the crowd."""
    for name, arm in arms.items():
        ranks = [core["ranks"] for core in arm["runs"]["crowd"]["cores"]]
        idle, steps = (sum(rank[key] for rank in ranks) for key in ("idle_steps", "steps"))
        worst = max(rank["worst_queue"] for rank in ranks)
        print(f"{name}: {idle} idle, {steps} steps, worst queue {worst}")
        assert steps
