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


def test_ends_of_passes(script):
    """Behind blank lines, and at the end."""
    assert script.pass_ends("a=1\n\nNo.\nb\n</think>2\n\n") == {5, 11}


def test_probes_are_sorted_by_the_place(script):
    """Before it, and behind its line at ends of passes or within them."""
    thoughts = []
    for number in range(3):
        places = (2, 4, 10, 11, 12, 14, 16, 18)
        probes = [{"think_tokens": n, "entropy_nats": float(n)} for n in places]
        thoughts.append(TracedThought(f"{number}-abc", 1, probes))
    names = ("0", "1", "2")
    table = script.table(thoughts, dict.fromkeys(names, 10), {key: {12, 16, 18} for key in names})
    cells = [[cell.strip() for cell in line.split("|")[2:6]] for line in table.splitlines()[2:10]]
    assert table.endswith("0 of 3 thoughts.")
    assert cells == [
        ["3", "6", "3.000", "3.000"],
        ["3", "9", "15.333", "15.333"],
        ["3", "3", "12.000", "12.000"],
        ["3", "3", "16.000", "16.000"],
        ["3", "3", "18.000", "18.000"],
        ["3", "3", "14.000", "14.000"],
        ["3", "3", "2.494", "2.494"],
        ["3", "3", "1.000", "1.000"],
    ]
