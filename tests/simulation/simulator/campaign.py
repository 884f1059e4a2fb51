"""Many seeds on several processes, and what they met."""

import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from simulator.axes import AXES, Case, draw, repair
from simulator.run import Result, run_case
from simulator.shrink import shrink


@dataclass
class Campaign:
    """Results of many cases, added up.

    Attributes:
        failed: shrunk where that was asked for, in the order of their seeds.
        values, pairs: in how many cases each axis value, and each pair of two, was met.
    """

    cases: int = 0
    steps: int = 0
    void: list[Result] = field(default_factory=list)
    failed: list[tuple[Result, Result]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    values: Counter[tuple[str, Any]] = field(default_factory=Counter)
    pairs: Counter[tuple[tuple[str, Any], tuple[str, Any]]] = field(default_factory=Counter)

    def add(self, result: Result, smallest: Result | None = None) -> None:
        self.cases += 1
        if result.is_void:
            self.void.append(result)
            return
        self.steps += result.steps
        self.counts.update(result.counts)
        met = list(result.case.values.items())
        self.values.update(met)
        self.pairs.update(itertools.combinations(met, 2))
        if result.failures:
            self.failed.append((result, smallest or result))
            self.failed.sort(key=lambda pair: pair[0].case.seed)

    @property
    def unmet_pairs(self) -> list[tuple[tuple[str, Any], tuple[str, Any]]]:
        """Pairs that vLLM takes together, and that no case had."""
        return [pair for pair in possible_pairs() if not self.pairs[pair]]


def all_values() -> Iterator[tuple[str, Any]]:
    for name, axis in AXES.items():
        for value in axis.values:
            yield name, value


def possible_pairs() -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    """Pairs of values of two axes that some case can have."""
    plain = {name: axis.plain for name, axis in AXES.items()}
    # What some values need of others, so that they are not mended away.
    helpful = {"exit": "observe", "connector": "load", "images": "chunked"}
    for first, second in itertools.combinations(AXES, 2):
        for one, other in itertools.product(AXES[first].values, AXES[second].values):
            wanted = {first: one, second: other}
            for base in (plain, {**plain, **helpful}, {**plain, "exit": "observe"}):
                values = repair({**base, **wanted})
                if values[first] == one and values[second] == other:
                    yield (first, one), (second, other)
                    break


def run_seed(seed: int, steps: int, *, shrinks: bool) -> tuple[Result, Result | None]:
    """One seed, and the smallest case in which it still fails."""
    result = run_case(draw(seed, steps))
    if result.failures and shrinks:
        return result, shrink(result)
    return result, None


def run_all(
    seeds: Sequence[int],
    steps: int,
    workers: int,
    *,
    shrinks: bool = True,
    told: Callable[[Result], None] = lambda _: None,
    most_steps: int | None = None,
) -> Campaign:
    """Run seeds on several processes; Ctrl-C ends it with what was run so far.

    Args:
        steps: during which requests arrive, per seed.
        told: of every result as it comes.
        most_steps: no further seed is begun once so many steps were run; None: all are.
    """
    campaign = Campaign()
    # Load-bearing: the order of vLLM's sets of names follows the hashes of strings.
    assert os.environ.get("PYTHONHASHSEED") == "0", "PYTHONHASHSEED is to be 0"  # noqa: TID251
    context = multiprocessing.get_context("spawn")
    left = iter(seeds)
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = {
            pool.submit(run_seed, seed, steps, shrinks=shrinks)
            for seed in itertools.islice(left, 2 * workers)
        }
        try:
            while running:
                done = next(as_completed(running))
                running.discard(done)
                result, smallest = done.result()
                campaign.add(result, smallest)
                told(result)
                if most_steps is None or campaign.steps < most_steps:
                    running |= {
                        pool.submit(run_seed, seed, steps, shrinks=shrinks)
                        for seed in itertools.islice(left, 1)
                    }
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
    return campaign


def line_of(result: Result, smallest: Result) -> str:
    """One line on a failure."""
    case: Case = smallest.case
    shown = "; ".join(f"{name}: {text}" for name, text in result.failures.items())
    return f"seed {result.case.seed}: {shown} [smallest: {case.describe()}]"
