"""Lets an engine serve alone before its memory counts.

An engine that has only answered grows when it thinks for the first time, because the other engine
was killed: by code that it had not used, and blocks that it had not written.
"""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from meridian_patch.bench.marathon.faults import Role
from meridian_patch.bench.marathon.load import know
from meridian_patch.bench.marathon.processes import Supervised
from meridian_patch.errors import BenchError


class WarmUp:
    """Asks engines, each directly, so that it thinks and answers.

    Args:
        model: served name.
        questions: to ask.
        at_a_time: as many as the load has.

    Attributes:
        warmed: when each EngineCore had answered all, by ``ROLE-PID``, in seconds of load; 0 before
            the load began.
    """

    def __init__(self, model: str, questions: Sequence[str], at_a_time: int) -> None:
        self._model = model
        self._questions = questions
        self._places = asyncio.Semaphore(at_a_time)
        self._tasks: list[asyncio.Task[None]] = []
        self.warmed: dict[str, float] = {}

    async def warm(self, role: Role, engine: Supervised, now: Callable[[], float]) -> None:
        """Ask this engine everything.

        Raises:
            BenchError: it did not answer.
        """
        cores = engine.cores()
        await asyncio.gather(*(self._ask(engine.url, each) for each in self._questions))
        self.warmed |= {f"{role}-{core}": now() for core in cores}

    def start(self, role: Role, engine: Supervised, now: Callable[[], float]) -> None:
        """Ask an engine that is back, beside the load; one that is killed again stays cold."""
        self._tasks.append(asyncio.create_task(self._warm_if_it_stays(role, engine, now)))

    async def close(self) -> None:
        """Ask no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _warm_if_it_stays(
        self, role: Role, engine: Supervised, now: Callable[[], float]
    ) -> None:
        with suppress(BenchError):
            await self.warm(role, engine, now)

    async def _ask(self, url: str, question: str) -> None:
        async with self._places:
            await know(url, self._model, question)
