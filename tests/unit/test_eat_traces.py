"""scripts/eat_traces.py: where the last step of a first pass is solved, and the table."""

import importlib.util
import random
from pathlib import Path

import pytest

from meridian_patch.bench.exit_trace import TracedThought
from meridian_patch.demo.problems import make_problem
from meridian_patch.demo.thoughts import make_thought

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "eat_traces.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("eat_traces", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("steps", [2, 5, 10])
def test_the_place_is_behind_the_last_value_of_the_first_pass(script, steps):
    """Whatever passes follow."""
    rng = random.Random(steps)
    problem = make_problem(rng, steps)
    text = make_thought(problem, rng, derail_rate=0.0).text
    place = script.solved_at(problem, text + "</think>1")
    assert text[:place].count("\n") == steps - 1
    assert text[:place].splitlines()[-1].startswith(f"{problem.steps[-1].name}=")
    assert text[place] == "\n"


def test_a_thought_without_its_last_step_has_no_place(script):
    """Cut short, or with another line among the first."""
    rng = random.Random(1)
    problem = make_problem(rng, 4)
    thought = make_thought(problem, rng, derail_rate=0.0)
    assert script.solved_at(problem, thought.cut(3)) is None
    assert script.solved_at(problem, thought.cut(4).removesuffix("\n")) is None
    assert script.solved_at(problem, "Hmm.\n" + thought.text) is None


def test_probes_are_sorted_by_the_place(script):
    """Before it, at the value and its line's end, and after."""
    thoughts = []
    for number in range(3):
        probes = [
            {"think_tokens": n, "entropy_nats": float(n), "variance_nats2": n / 10}
            for n in (2, 4, 10, 11, 12, 14)
        ]
        thoughts.append(TracedThought(f"{number}-abc", 1, probes))
    table = script.table(thoughts, {"0": 10, "1": 10, "2": 10}).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:6]] for line in table[2:]]
    assert [row[1:4] for row in cells] == [
        ["3", "6", "3.000"],
        ["3", "6", "10.500"],
        ["3", "6", "13.000"],
        ["3", "3", "14.000"],
        ["3", "3", "0.400"],
        ["3", "3", "1.400"],
    ]
