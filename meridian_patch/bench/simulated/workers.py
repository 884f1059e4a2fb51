"""Runs replays in worker processes; one that fails does not stop the others."""

import multiprocessing
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from types import TracebackType
from typing import Self, TypeVar

from meridian_patch.bench.simulated.run import LabJob, LabRun, run_job
from meridian_patch.errors import MeridianError

Key = TypeVar("Key")
_DIED = (
    "a worker process died in the middle of a replay, most likely for want of memory (about 1 GiB "
    "each); give fewer --workers"
)


class Workers:
    """A pool of processes, kept over several calls of ``run``; ended on leaving the context."""

    def __init__(self, processes: int) -> None:
        # Spawned, not forked: vLLM starts threads when it is imported.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            processes, context, initializer=_leave_interrupts_to_parent
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:
            # What still runs would be waited for at the end of this process.
            for child in multiprocessing.active_children():
                child.terminate()

    def run(self, jobs: Mapping[Key, LabJob]) -> Iterator[tuple[Key, LabRun | str]]:
        """Replay all jobs; each with its run, or with what went wrong, as they end."""
        try:
            futures = {self._pool.submit(run_job, job): key for key, job in jobs.items()}
        except BrokenProcessPool:
            yield from ((key, _DIED) for key in jobs)
            return
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], _DIED
            except MeridianError as error:
                yield futures[future], str(error)
            except Exception as error:
                yield futures[future], f"{type(error).__name__}: {error}"


def _leave_interrupts_to_parent() -> None:
    """Ctrl-C reaches the workers too, but who ends them is ``Workers.__exit__``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
