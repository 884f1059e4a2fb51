"""Training chains for the tiny reasoner: what a thought about a problem looks like.

A thought is a list of lines. Passes over the problem are separated by a blank line and opened by
a cue; an error of the first pass is written down, carried on, and repaired by a later pass with
``No,`` before the right line. A small share of chains derails: it repeats steps with values that
were never computed, and then goes on as usual.
"""

import random
from dataclasses import dataclass

from meridian_patch.demo.problems import EASY_STEPS, Problem

ERROR_RATE = 0.04
DERAIL_RATE = 0.03
CUES = ("Let me check.", "Check again.", "Wait, once more.")
DERAIL_CUE = "Hmm."


@dataclass(frozen=True)
class Thought:
    """The text between ``<think>`` and ``</think>``, and where a cut leaves whole lines."""

    lines: tuple[str, ...]
    # Number of lines up to the end of the derailed part; 0 when the chain never derails.
    derailed_lines: int = 0

    @property
    def text(self) -> str:
        return "".join(line + "\n" for line in self.lines)

    def cut(self, keep: int) -> str:
        """The text of the first ``keep`` lines."""
        return "".join(line + "\n" for line in self.lines[:keep])


def make_thought(problem: Problem, rng: random.Random, derail_rate: float = DERAIL_RATE) -> Thought:
    """Draw one chain of thought for the problem; easy problems never derail."""
    is_easy = len(problem.steps) <= EASY_STEPS
    error_rate = 0.0 if is_easy else ERROR_RATE
    lines, broken = _pass(problem, rng, error_rate, broken=frozenset())
    derailed_lines = 0
    if not is_easy and rng.random() < derail_rate:
        lines += ["", DERAIL_CUE, *_wander(problem, rng)]
        derailed_lines = len(lines)
    for _ in range(_rechecks(is_easy, rng)):
        again, broken = _pass(problem, rng, 0.0, broken)
        lines += ["", rng.choice(CUES), *again]
    return Thought(tuple(lines), derailed_lines)


def _rechecks(is_easy: bool, rng: random.Random) -> int:
    if is_easy:
        return rng.choices((0, 1, 2), (7, 2, 1))[0]
    return rng.choices((1, 2, 3, 4), (4, 3, 2, 2))[0]


def _pass(
    problem: Problem, rng: random.Random, error_rate: float, broken: frozenset[str]
) -> tuple[list[str], frozenset[str]]:
    """One pass over all steps: its lines, and the names whose last line is wrong in itself."""
    lines = []
    wrong: set[str] = set()
    value = problem.start
    for step in problem.steps:
        prefix = "No, " if step.name in broken else ""
        result = step.apply(value)
        if rng.random() < error_rate:
            result = (result + rng.randrange(1, 10)) % 10
            wrong.add(step.name)
        lines.append(
            f"{prefix}{step.name}={step.expression}={value}{step.operator}{step.operand}={result}"
        )
        value = result
    return lines, frozenset(wrong)


def _wander(problem: Problem, rng: random.Random) -> list[str]:
    lines = []
    for _ in range(rng.randrange(10, 32)):
        step = rng.choice(problem.steps)
        value, result = rng.randrange(10), rng.randrange(10)
        lines.append(f"{step.name}={step.expression}={value}{step.operator}{step.operand}={result}")
    return lines
