"""Engines of many configurations on vLLM's real scheduler, each from one seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mutants
import pytest
import vllm
from simulator.axes import AXES

from meridian_patch.config.policy import RULES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent

SEEDS = [3, 7, 11, 17]
BEGIN = f"""
import json, sys
sys.path[:0] = {[str(HERE), str(HERE.parent / "support" / "drivers")]!r}
from simulator.axes import AXES, Case, draw, repair
from simulator.campaign import all_values, possible_pairs
from simulator.run import run_case

def digests(seeds):
    results = [run_case(draw(seed, 60)) for seed in seeds]
    return [[each.steps, each.digest, each.counts] for each in results]

told = {{"first": digests({SEEDS})}}
"""
EVERY_HOOK = """
plain = {name: axis.plain for name, axis in AXES.items()}
result = run_case(Case(1, 20, repair({**plain, "exit": "observe", "fault_raises": True})))
told["every hook"] = [result.steps, result.failures]
"""
ASKS_ITSELF = """
result = run_case(draw(71219, 250))
told["asks itself"] = [result.case.exit, result.counts, result.failures]
"""
SCARCE_ADAPTERS = """
result = run_case(draw(60230, 250, experts=False))
told["scarce adapters"] = [result.case.lora, result.case.connector, result.failures]
"""
CHUNKS_AT_THE_END_OF_A_BLOCK = """
result = run_case(draw(26000197, 250))
told["chunks at the end of a block"] = [result.counts["displaced"], result.failures]
"""
DRAWS = """
cases = [draw(seed, 1) for seed in range(3000)]
met = {(name, repr(value)) for case in cases for name, value in case.values.items()}
told["draws"] = {
    "missing": [str(each) for each in all_values() if (each[0], repr(each[1])) not in met],
    "unstable": [case.seed for case in cases if repair(case.values) != case.values],
    "axes": len(AXES),
    "pairs": sum(1 for _ in possible_pairs()),
}
"""
DIGESTS = f"""
told["digests"] = digests({SEEDS[::-1]})
"""
END = """
print(json.dumps(told))
"""


def in_child(*scripts: str, timeout: float = 240) -> dict:
    """What scripts tell, by name, in one process whose strings have the same hashes each time."""
    child = subprocess.run(
        [sys.executable, "-P", "-c", "".join([BEGIN, *scripts, END])],
        env={**os.environ, "PYTHONHASHSEED": "0"},  # noqa: TID251
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def told() -> dict:
    """Importing vLLM takes longer than any of these: they share a process."""
    return in_child(
        EVERY_HOOK, ASKS_ITSELF, SCARCE_ADAPTERS, CHUNKS_AT_THE_END_OF_A_BLOCK, DRAWS, DIGESTS
    )


def test_the_same_seed_gives_the_same_bytes_whatever_ran_before(told):
    """In another order, and behind other cases."""
    assert told["first"] == told["digests"][::-1]
    assert all(steps and digest for steps, digest, _ in told["first"])


@pytest.mark.nightly
def test_a_seed_gives_the_same_bytes_in_another_process(told):
    assert in_child()["first"] == told["first"]


def test_every_hook_that_is_made_to_fail_exists(told):
    steps, failures = told["every hook"]
    assert steps
    assert failures == {}


def test_steps_are_not_stocks_where_a_request_asks_for_early_exit_and_is_probed(told):
    mode, counts, failures = told["asks itself"]
    assert mode == "off"
    assert counts["probes"]
    assert not counts["compared"]
    assert failures == {}


def test_no_adapter_comes_in_while_a_running_one_may_get_no_block(told):
    """A connector defers the frees of blocks: vLLM counts no adapter behind a request without."""
    assert told["scarce adapters"] == ["scarce", "load", {}]


def test_who_makes_room_leaves_no_longer_chunk_to_the_prompt_that_lacks_it(told):
    """Of 64 tokens it needs two blocks, of 65 three."""
    displaced, failures = told["chunks at the end of a block"]
    assert displaced
    assert failures == {}


def test_every_value_of_every_axis_is_drawn_and_a_repaired_case_stays_as_it_is(told):
    drawn = told["draws"]
    assert drawn["missing"] == []
    assert drawn["unstable"] == []
    assert drawn["axes"] >= 30
    assert drawn["pairs"] > 4000


def test_every_rule_of_a_policy_is_an_axis_value():
    """A rule that is not drawn is never simulated alone."""
    assert set(AXES["rule"].values) == {"profile", *RULES}


def test_every_mutant_finds_the_line_that_it_changes():
    assert len(mutants.MUTANTS) >= 25
    for mutant in mutants.MUTANTS:
        changed = mutants.change(mutants.source_of(mutant), mutant)
        compile(changed, mutant.module, "exec")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("a policy that is switched off acts", "switch"),
        ("a displaced request is forgotten", "place"),
        ("probes leave the engine", "tokens"),
        ("counts include probes", "counts"),
    ],
)
def test_a_mutant_is_noticed(name, invariant):
    (mutant,) = (each for each in mutants.MUTANTS if each.name == name)
    assert mutants.run(mutant)["invariant"] == invariant


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("steps", [6_000, pytest.param(240_000, marks=pytest.mark.nightly)])
def test_many_steps_hold_every_invariant(steps, tmp_path):
    page = tmp_path / "page.md"
    child = subprocess.run(
        [sys.executable, "-P", str(ROOT / "scripts" / "simulate"), "--seeds", "2000",
         "--most-steps", str(steps), "--page", str(page)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-6000:] + child.stderr[-2000:]
    text = page.read_text()
    assert f"| vLLM | {vllm.__version__} |" in text
    assert "| failures | 0 |" in text
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| ")]
    figures = {name.strip(): value.strip() for name, value in rows}
    assert int(figures["steps of ours, each with every check"].replace(",", "")) >= steps
    met, of, all_of = figures["axis values met"].partition(" of ")
    # Fewer steps meet fewer values.
    assert met == all_of or steps < 240_000, of
