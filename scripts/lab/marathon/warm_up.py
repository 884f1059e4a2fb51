"""Lets an engine serve alone, in all its seats, before its memory counts.

An engine grows until it has used all its code, its widest batch and every block of its KV pool. A
think engine also answers when its answer engine is lost: here it answers all that it thinks.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from marathon.load import know
from marathon.processes import Supervised
from meridian_patch.demo.problems import make_problems
from meridian_patch.errors import BenchError

_ROUNDS: Final = 2
# Characters, which are tokens of the tiny reasoner, before one question in four.
_LONG: Final = 700
# A request with a penalty answers where it thinks. This one changes no choice of a token.
_STAYS: Final = {"presence_penalty": 1e-6}


class WarmUp:
    """Asks engines, each directly, to think and to answer.

    Args:
        model: served name.
        seats: requests that an engine runs at once; it gets so many at a time, twice.
        seed: of the questions.

    Attributes:
        warmed: when each EngineCore had answered all, by ``ENGINE-PID``, in seconds of load; 0
            before the load began.
    """

    def __init__(self, model: str, seats: int, seed: int) -> None:
        self._model = model
        self._questions = [
            problem.question if number % 4 else _preface(number) + problem.question
            for number, problem in enumerate(make_problems(_ROUNDS * seats, seed))
        ]
        self._places = asyncio.Semaphore(seats)
        self._tasks: list[asyncio.Task[None]] = []
        self.warmed: dict[str, float] = {}

    async def warm(self, engine: Supervised, now: Callable[[], float]) -> None:
        """Ask this engine everything.

        Raises:
            BenchError: it did not answer.
        """
        cores = engine.cores()
        await asyncio.gather(*(self._ask(engine.url, each) for each in self._questions))
        self.warmed |= {f"{engine.name}-{core}": now() for core in cores}

    def start(self, engine: Supervised, now: Callable[[], float]) -> None:
        """Ask an engine that is back, beside the load; one that is killed again stays cold."""
        self._tasks.append(asyncio.create_task(self._warm_if_it_stays(engine, now)))

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _warm_if_it_stays(self, engine: Supervised, now: Callable[[], float]) -> None:
        with suppress(BenchError):
            await self.warm(engine, now)

    async def _ask(self, url: str, question: str) -> None:
        async with self._places:
            await know(url, self._model, question, **_STAYS)


def _preface(number: int) -> str:
    """A long text that no other prompt begins with."""
    return (f"{number} " * _LONG)[:_LONG]
