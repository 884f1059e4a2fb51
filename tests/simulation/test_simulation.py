"""Engines of many configurations on vLLM's real scheduler, each from one seed."""

import json
import os
import subprocess
import sys
from pathlib import Path

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
