"""Seeded arithmetic problems, their solutions as text, and a grader.

The task: a chain of one-digit values, each computed from the one before, modulo ten::

    p=7, q=p+5, r=q*3. r?        ->  6

Every operation is a bijection modulo ten (add, subtract, times 3, 7 or 9), so any answer is
possible until the last step is solved. A thought writes one line per step and then goes
over its work again; a first pass sometimes holds a wrong step, which a later pass repairs.

Run ``python -m meridian_patch.demo.problems --count 5 --seed 1`` to see some.
"""

import argparse
import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_STEPS = 2
MAX_STEPS = 10
# Heavy tail: half of the problems have two or three steps, one in twelve has ten.
STEP_WEIGHTS = (30, 24, 12, 8, 6, 4, 4, 4, 8)
# First passes of problems up to this size hold no error and may go unchecked.
EASY_STEPS = 3

_ANSWER = re.compile(r"\s*(\d)(?!\d)")


@dataclass(frozen=True)
class Step:
    """``name = previous operator operand`` (modulo ten)."""

    name: str
    previous: str
    operator: str
    operand: int

    def apply(self, value: int) -> int:
        """The value of ``name`` when the previous name has ``value``."""
        if self.operator == "+":
            return (value + self.operand) % 10
        if self.operator == "-":
            return (value - self.operand) % 10
        return (value * self.operand) % 10

    @property
    def expression(self) -> str:
        return f"{self.previous}{self.operator}{self.operand}"


@dataclass(frozen=True)
class Problem:
    """A chain of steps from a given first value."""

    first: str
    start: int
    steps: tuple[Step, ...]

    @property
    def values(self) -> tuple[int, ...]:
        """Value after each step, in order."""
        values = []
        value = self.start
        for step in self.steps:
            value = step.apply(value)
            values.append(value)
        return tuple(values)

    @property
    def question(self) -> str:
        chain = "".join(f", {s.name}={s.expression}" for s in self.steps)
        return f"{self.first}={self.start}{chain}. {self.steps[-1].name}?"

    @property
    def answer(self) -> str:
        return str(self.values[-1])

    @property
    def answer_text(self) -> str:
        """The right answer: the digit, then the chain that leads to it."""
        chain = "".join(f", {s.name}={s.expression}" for s in self.steps)
        return (
            f"{self.answer}\nFrom {self.first}={self.start}{chain}"
            f" we get {self.steps[-1].name}={self.answer}."
        )


def make_problem(rng: random.Random, steps: int | None = None) -> Problem:
    """Draw one problem; ``steps`` fixes its size (2 to 10)."""
    if steps is None:
        steps = rng.choices(range(MIN_STEPS, MAX_STEPS + 1), STEP_WEIGHTS)[0]
    if not MIN_STEPS <= steps <= MAX_STEPS:
        raise ValueError(f"steps is {steps}, expected {MIN_STEPS} to {MAX_STEPS}")
    offset = rng.randrange(len(LETTERS) - steps)
    names = LETTERS[offset : offset + steps + 1]
    chain = []
    for previous, name in pairwise(names):
        operator = rng.choice("+-*")
        operand = rng.choice((3, 7, 9)) if operator == "*" else rng.randrange(1, 10)
        chain.append(Step(name, previous, operator, operand))
    return Problem(names[0], rng.randrange(10), tuple(chain))


def make_problems(count: int, seed: int, steps: int | None = None) -> list[Problem]:
    """``count`` problems that depend on ``seed`` alone."""
    rng = random.Random(seed)
    return [make_problem(rng, steps) for _ in range(count)]


def grade(answer_text: str, expected: str) -> bool:
    """True when the answer's first word is the expected digit."""
    match = _ANSWER.match(answer_text)
    return match is not None and match.group(1) == expected


def _records(count: int, seed: int, steps: int | None) -> Iterator[dict[str, object]]:
    for problem in make_problems(count, seed, steps):
        yield {
            "question": problem.question,
            "answer": problem.answer,
            "steps": len(problem.steps),
        }


def main(argv: list[str] | None = None) -> None:
    """Print problems as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m meridian_patch.demo.problems")
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=None, help="2 to 10; default: heavy-tailed")
    args = parser.parse_args(argv)
    for record in _records(args.count, args.seed, args.steps):
        print(json.dumps(record))


if __name__ == "__main__":
    main()
