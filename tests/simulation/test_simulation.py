"""Engines of many configurations on vLLM's real scheduler, each from one seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mutants
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


def in_child(script: str, *, timeout: float = 240) -> dict:
    """What a script prints last, in a process whose strings have the same hashes each time."""
    path = f"import sys; sys.path.insert(0, {str(HERE)!r})\n"
    child = subprocess.run(
        [sys.executable, "-P", "-c", path + script],
        env={**os.environ, "PYTHONHASHSEED": "0"},  # noqa: TID251
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


DIGESTS = """
import json
from simulator.axes import draw
from simulator.run import run_case
results = [run_case(draw(seed, 60)) for seed in {seeds}]
print(json.dumps([[each.steps, each.digest, each.counts] for each in results]))
"""


def test_the_same_seed_gives_the_same_bytes_whatever_ran_before():
    first = in_child(DIGESTS.format(seeds=[3, 7, 11, 17]))
    second = in_child(DIGESTS.format(seeds=[17, 11, 7, 3]))
    assert first == second[::-1]
    assert all(steps and digest for steps, digest, _ in first)


EVERY_HOOK = """
import json
from simulator.axes import AXES, Case, repair
from simulator.run import run_case
plain = {name: axis.plain for name, axis in AXES.items()}
result = run_case(Case(1, 20, repair({**plain, "exit": "observe", "fault_raises": True})))
print(json.dumps([result.steps, result.failures]))
"""


def test_every_hook_that_is_made_to_fail_exists():
    steps, failures = in_child(EVERY_HOOK)
    assert steps
    assert failures == {}


ASKS_ITSELF = """
import json
from simulator.axes import draw
from simulator.run import run_case
result = run_case(draw(70032, 250))
print(json.dumps([result.case.exit, result.counts, result.failures]))
"""


def test_steps_are_not_stocks_where_a_request_asks_for_early_exit_and_is_probed():
    mode, counts, failures = in_child(ASKS_ITSELF)
    assert mode == "off"
    assert counts["probes"]
    assert not counts["compared"]
    assert failures == {}


DRAWS = """
import json
from simulator.axes import AXES, draw, repair
from simulator.campaign import all_values, possible_pairs
cases = [draw(seed, 1) for seed in range(3000)]
met = {(name, repr(value)) for case in cases for name, value in case.values.items()}
missing = [str(each) for each in all_values() if (each[0], repr(each[1])) not in met]
print(json.dumps({
    "missing": missing,
    "unstable": [case.seed for case in cases if repair(case.values) != case.values],
    "axes": len(AXES),
    "pairs": sum(1 for _ in possible_pairs()),
}))
"""


def test_every_value_of_every_axis_is_drawn_and_a_repaired_case_stays_as_it_is():
    drawn = in_child(DRAWS)
    assert drawn["missing"] == []
    assert drawn["unstable"] == []
    assert drawn["axes"] >= 30
    assert drawn["pairs"] > 4000


def test_every_mutant_finds_the_line_that_it_changes():
    assert len(mutants.MUTANTS) >= 25
    for mutant in mutants.MUTANTS:
        changed = mutants.change(mutants.source_of(mutant), mutant)
        compile(changed, mutant.module, "exec")


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("a displaced request is forgotten", "place"),
        ("probes leave the engine", "tokens"),
        ("counts include probes", "counts"),
    ],
)
def test_a_mutant_is_noticed(name, invariant):
    (mutant,) = (each for each in mutants.MUTANTS if each.name == name)
    assert mutants.run(mutant)["invariant"] == invariant


@pytest.mark.timeout(420)
def test_a_quarter_of_a_million_steps_hold_every_invariant(tmp_path):
    page = tmp_path / "page.md"
    child = subprocess.run(
        [str(ROOT / "scripts" / "simulate"), "--seeds", "2000", "--most-steps", "240000",
         "--page", str(page)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    text = page.read_text()
    assert "| failures | 0 |" in text
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    figures = {name.strip(): value.strip() for name, value in rows}
    assert int(figures["steps of ours, each with every check"].replace(",", "")) >= 240_000
    met, of, all_of = figures["axis values met"].partition(" of ")
    assert met == all_of, of
