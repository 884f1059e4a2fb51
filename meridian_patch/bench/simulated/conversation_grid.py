"""Runs a whole table of ``s-turns`` replays in worker processes."""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from meridian_patch.bench.simulated.conversation_arms import STOCK, turns_arm
from meridian_patch.bench.simulated.conversation_figures import SATURATED, Place, RunKey, Runs
from meridian_patch.bench.simulated.conversation_run import TurnsJob, TurnsRun, run_job
from meridian_patch.bench.simulated.conversations import History
from meridian_patch.errors import BenchError


@dataclass(frozen=True)
class Grid:
    """Which replays; ``stock`` is added to the arms where it is missing."""

    histories: Sequence[History]
    pools: Sequence[int]
    rates: Sequence[float]
    seeds: Sequence[int]
    arms: Sequence[str]
    conversations: int
    cost: str
    think_factor: float = 1.0

    def jobs(self) -> Iterator[tuple[tuple[RunKey, ...], TurnsJob]]:
        """Each replay with all places that it belongs to.

        Saturated stock does not depend on the rate: it is replayed once for all rates.
        """
        arms = dict.fromkeys((STOCK, *self.arms))
        for history in self.histories:
            for pool in self.pools:
                for seed in self.seeds:
                    places = [Place(history.value, pool, rate) for rate in self.rates]
                    job = TurnsJob(
                        history=history,
                        pool_tokens=pool,
                        rate_per_s=self.rates[0],
                        seed=seed,
                        arm=turns_arm(STOCK, history),
                        conversations=self.conversations,
                        cost=self.cost,
                        think_factor=self.think_factor,
                    )
                    keys = tuple(RunKey(place, SATURATED, seed) for place in places)
                    yield keys, replace(job, is_saturated=True)
                    for place in places:
                        for arm in arms:
                            yield (
                                (RunKey(place, arm, seed),),
                                replace(
                                    job, rate_per_s=place.rate_per_s, arm=turns_arm(arm, history)
                                ),
                            )


def run_grid(grid: Grid, workers: int, on_done: Callable[[TurnsJob], None]) -> Runs:
    """Replay everything, in ``workers`` processes.

    Raises:
        BenchError: a replay cannot be run; what had not begun is dropped.
    """
    jobs = list(grid.jobs())
    runs: dict[RunKey, TurnsRun] = {}
    # Spawned, not forked: vLLM starts threads when it is imported.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_die_on_interrupt) as pool:
        futures = {pool.submit(run_job, job): (keys, job) for keys, job in jobs}
        try:
            for future in as_completed(futures):
                keys, job = futures[future]
                runs |= dict.fromkeys(keys, future.result())
                on_done(job)
        except BrokenProcessPool as error:
            raise BenchError(
                "a worker process died in the middle of a replay, most likely for want of memory "
                "(about 1 GiB each); give fewer --workers"
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    # In the order asked for, not in the order finished.
    return {key: runs[key] for keys, _ in jobs for key in keys}


def _die_on_interrupt() -> None:
    """Ctrl-C reaches the workers too: they end without a traceback each."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
