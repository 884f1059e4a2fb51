"""Runs a marathon: starts the fleet, learns the canaries, keeps the load up, injects the faults."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp

from meridian_patch.bench.marathon.faults import REST_S, Fault
from meridian_patch.bench.marathon.fleet import MODEL, SEATS, Fleet
from meridian_patch.bench.marathon.inject import Injector
from meridian_patch.bench.marathon.load import Canary, Load, know
from meridian_patch.bench.marathon.logs import read_logs
from meridian_patch.bench.marathon.records import Asked, Injected, LogLine, Sample
from meridian_patch.bench.marathon.warm_up import WarmUp
from meridian_patch.demo.problems import make_problems

_SAMPLE_S: Final = 1.0
_SAY_EVERY_S: Final = 15.0
_NUM_CANARIES: Final = 24
_NUM_QUESTIONS: Final = 400
_CANARIES_AT_A_TIME: Final = 4


@dataclass(frozen=True)
class Settings:
    """What a marathon does.

    Attributes:
        model: folder of the model.
        length_s: of the load.
        concurrency: clients.
        pause_s: between two requests of a client.
        faults: to inject.
        hands_off: think on one engine and answer on the other.
        num_routers: that clients spread their requests over.
        seed: of all choices.
    """

    model: Path
    length_s: float
    concurrency: int
    pause_s: float
    faults: Sequence[Fault]
    hands_off: bool
    num_routers: int
    seed: int


@dataclass
class Result:
    """What a marathon noted.

    Attributes:
        asked: all requests.
        injected: all faults.
        samples: of processes.
        lines: of logs.
        warmed: when each EngineCore had served alone, by ``ROLE-PID``.
        num_moved: hand-offs that the routers counted, by outcome, since each was started last.
    """

    asked: list[Asked] = field(default_factory=list)
    injected: list[Injected] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lines: list[LogLine] = field(default_factory=list)
    warmed: dict[str, float] = field(default_factory=dict)
    num_moved: dict[str, int] = field(default_factory=dict)


async def run_marathon(settings: Settings, folder: Path, say: Callable[[str], None]) -> Result:
    """Run to the end.

    Args:
        settings: what to do.
        folder: takes logs.
        say: prints progress.

    Raises:
        BenchError: a server does not start, or a canary has no answer.
    """
    say(f"starting two engines and {settings.num_routers} routers")
    fleet = Fleet(
        settings.model, folder, hands_off=settings.hands_off, num_routers=settings.num_routers
    )
    result = Result()
    async with fleet, aiohttp.ClientSession() as http:
        say("asking one engine for the canaries' tokens")
        canaries = await _canaries(fleet, settings.seed)
        questions = [each.question for each in make_problems(_NUM_QUESTIONS, settings.seed + 1)]
        say("letting each engine serve alone, in all its seats")
        warm_up = WarmUp(MODEL, SEATS, settings.seed + 2)
        for role, engine in fleet.engines.items():
            await warm_up.warm(role, engine, lambda: 0.0)
        load = Load(
            [router.url for router in fleet.routers],
            MODEL,
            canaries,
            questions,
            settings.concurrency,
            settings.pause_s,
            settings.seed,
        )
        injector = Injector(fleet, http, lambda: load.now_s, warm_up)
        result.asked, result.injected = load.asked, injector.injected
        fleet.supervise()
        watches = [
            asyncio.ensure_future(_sample(fleet, load, http, result.samples)),
            asyncio.ensure_future(_inject(settings, injector, load, say)),
            asyncio.ensure_future(_report(fleet, load, say)),
        ]
        say(f"load for {settings.length_s / 60:g} minutes, {settings.concurrency} at a time")
        work = asyncio.ensure_future(load.run(settings.length_s))
        try:
            await _until_done(work, watches)
        finally:
            for task in (work, *watches):
                task.cancel()
            await asyncio.gather(work, *watches, return_exceptions=True)
            await warm_up.close()
        result.warmed = warm_up.warmed
        result.num_moved = await _moved(fleet, http)
        # Before the servers end: what they say then is about that.
        result.lines = read_logs([server.log for server in fleet.servers])
    return result


async def _until_done(work: asyncio.Future[None], watches: Sequence[asyncio.Future[None]]) -> None:
    """Wait for the load; what a watch raises ends the marathon."""
    pending: set[asyncio.Future[None]] = {work, *watches}
    while not work.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _canaries(fleet: Fleet, seed: int) -> list[Canary]:
    engine = fleet.engines["think"]
    problems = make_problems(_NUM_CANARIES, seed)
    places = asyncio.Semaphore(_CANARIES_AT_A_TIME)

    async def ask(question: str) -> Canary:
        async with places:
            return await know(engine.url, MODEL, question)

    return list(await asyncio.gather(*(ask(problem.question) for problem in problems)))


async def _sample(
    fleet: Fleet, load: Load, http: aiohttp.ClientSession, samples: list[Sample]
) -> None:
    while True:
        fleet.check_supervisors()
        cores = {
            f"{role}-{core}": mib
            for role, engine in fleet.engines.items()
            for core in engine.cores()
            if (mib := engine.memory_mib(core)) is not None
        }
        healthy = await fleet.num_healthy(http)
        router_mib = _total(router.memory_mib() for router in fleet.routers)
        cpu_s = _total(router.cpu_s() for router in fleet.routers)
        samples.append(Sample(load.now_s, load.in_flight, healthy, cores, router_mib, cpu_s))
        await asyncio.sleep(_SAMPLE_S)


async def _inject(
    settings: Settings, injector: Injector, load: Load, say: Callable[[str], None]
) -> None:
    free_s = 0.0
    for fault in settings.faults:
        # Later than planned, where processes take longer to be back than their windows last.
        begin_s = max(fault.at_s, free_s)
        if begin_s + fault.shape.window_s > settings.length_s:
            say(f"{load.now_s:5.0f} s  no time is left for a fault: {fault.kind}")
            return
        await asyncio.sleep(max(begin_s - load.now_s, 0.0))
        at_s = load.now_s
        say(f"{at_s:5.0f} s  fault: {fault.shape.title} ({fault.kind}, {fault.strikes})")
        await injector.inject(fault)
        injected = injector.injected[-1]
        note = f"; {injected.note}" if injected.note else ""
        say(f"{load.now_s:5.0f} s  fault over after {load.now_s - at_s:.1f} s{note}")
        free_s = max(injected.end_s, load.now_s) + REST_S


async def _report(fleet: Fleet, load: Load, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_SAY_EVERY_S)
        outcomes = [each.outcome for each in load.asked]
        wrong = sum(each.is_equal is False for each in load.asked)
        say(
            f"{load.now_s:5.0f} s  {outcomes.count('ok')} ok, {outcomes.count('error')} errors, "
            f"{outcomes.count('cancelled')} cancelled, {load.in_flight} in flight, "
            f"{wrong} canaries differ, exports {fleet.collector.num_exports}"
        )


def _total(numbers: Iterable[float | None]) -> float | None:
    """Sum of what is known; None if nothing is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if known else None


async def _moved(fleet: Fleet, http: aiohttp.ClientSession) -> dict[str, int]:
    moved: Counter[str] = Counter()
    for router in fleet.routers:
        with suppress(aiohttp.ClientError):
            async with http.get(f"{router.url}/metrics") as reply:
                page = await reply.text()
            lines = [line for line in page.splitlines() if "handoffs_total{" in line]
            moved.update({line.split('"')[1]: int(float(line.split()[-1])) for line in lines})
    return dict(moved)
