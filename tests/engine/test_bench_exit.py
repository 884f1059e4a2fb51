"""`meridian bench exit` on a real engine: thoughts are shorter, and every rule holds."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest
from run_engine import clean_environment

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PROFILE = files("meridian_patch.configs").joinpath("profiles/tiny_reasoner_exit.yaml")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench_exit")
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "bench", "exit"]
    command += ["--problems", "60", "--few", "40", "--stages", "exits,pressed", "--budgets", "96"]
    command += ["--profile", str(PROFILE), "--out", str(folder / "out")]
    run = subprocess.run(
        command,
        env=clean_environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    # 1: an output broke a rule, which a model may do by itself behind a cap far from an answer.
    assert run.returncode in {0, 1}, run.stdout + run.stderr
    return json.loads((folder / "out" / "exit.json").read_text())


def arms(report):
    return {f"{arm['stage']}: {arm['arm']}": arm for arm in report["arms"]}


def test_thoughts_are_shorter(report):
    """EAT closes thoughts, and the others are natural's to the token: their seeds are the same."""
    ours, natural = arms(report)["exits: eat"], arms(report)["exits: natural"]
    assert ours["reasons"]["eat"] >= 5
    assert ours["think_ratio"] < 0.95
    assert natural["reasons"] == {}
    assert natural["think_ratio"] == 1


def test_accuracy_holds(report):
    """As well as 60 problems can tell."""
    assert arms(report)["exits: natural"]["accuracy"] >= 0.85
    assert arms(report)["exits: eat"]["difference_pp"] >= -7


def test_probes_are_small(report):
    """A block and the boundary at most, on average."""
    ours = arms(report)["exits: eat"]
    assert 0 < ours["probe_tokens"] <= 33 * ours["probes"]


def test_pressure_was_there_and_no_rule_broke(report):
    """Preemptions happened; no thought that EAT closed broke a rule, and nothing forced one."""
    assert arms(report)["pressed: eat"]["preemptions"] > 0
    assert arms(report)["pressed: cap 96"]["reasons"]["hard_cap"] > 0
    ours = [each for each in report["violations"] if each["is_ours"]]
    assert not [each for each in ours if each["arm"].endswith("eat") or "forced" in each["rule"]]
