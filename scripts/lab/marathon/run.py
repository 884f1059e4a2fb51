"""Runs a marathon: starts the fleet, learns the canaries, keeps the load up, injects the faults."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import aiohttp

from marathon.faults import REST_S
from marathon.fleet import MODEL, SEATS, Fleet
from marathon.inject import Injector
from marathon.load import Canary, Load, know
from marathon.logs import read_logs
from marathon.records import Result, Sample, Settings
from marathon.verdict import mark_lost
from marathon.warm_up import WarmUp
from meridian_patch.demo.problems import make_problems

_SAMPLE_S: Final = 1.0
_SAY_EVERY_S: Final = 15.0
_NUM_CANARIES: Final = 24
_NUM_QUESTIONS: Final = 400
_CANARIES_AT_A_TIME: Final = 4


async def run_marathon(settings: Settings, folder: Path, say: Callable[[str], None]) -> Result:
    """Run to the end.

    Args:
        settings: what to do.
        folder: takes logs.
        say: prints progress.

    Raises:
        BenchError: a server does not start, or a canary has no answer.
    """
    say("starting the answer engine, two think servers and their gateway")
    fleet = Fleet(settings.model, folder)
    result = Result()
    async with fleet, aiohttp.ClientSession() as http:
        say("asking the answer engine for the canaries' tokens")
        canaries = await _canaries(fleet, settings.seed)
        questions = [each.question for each in make_problems(_NUM_QUESTIONS, settings.seed + 1)]
        say("letting each engine serve alone, in all its seats")
        warm_up = WarmUp(MODEL, SEATS, settings.seed + 2)
        for engine in fleet.engines.values():
            await warm_up.warm(engine, lambda: 0.0)
        load = Load(
            fleet.gateway.url,
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
            asyncio.ensure_future(_report(fleet, load, result, say)),
        ]
        say(f"load for {settings.length_s / 60:g} minutes, {settings.concurrency} at a time")
        # What the last fault killed comes back, also after the load.
        work: asyncio.Future[Any] = asyncio.gather(
            load.run(settings.length_s), _inject(settings, injector, load, say)
        )
        try:
            await _until_done(work, watches)
        finally:
            tasks: list[asyncio.Future[Any]] = [work, *watches]
            for task in tasks:
                task.cancel()
            await asyncio.gather(work, *watches, return_exceptions=True)
            await warm_up.close()
        result.warmed = warm_up.warmed
        result.handoffs = await fleet.handoffs(http)
        # Before the servers end: what they say then is about that.
        result.lines = read_logs([server.log for server in fleet.servers])
    mark_lost(result.asked, result.injected)
    return result


async def _until_done(work: asyncio.Future[Any], watches: Sequence[asyncio.Future[None]]) -> None:
    """Wait for load and faults; what a watch raises ends the marathon."""
    pending: set[asyncio.Future[Any]] = {work, *watches}
    while not work.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


async def _canaries(fleet: Fleet, seed: int) -> list[Canary]:
    engine = fleet.engines["answer"]
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
        core_mib: dict[str, float] = {}
        for engine in fleet.engines.values():
            core_mib |= engine.core_mib()
        num_healthy = await fleet.num_healthy(http)
        samples.append(Sample(load.now_s, load.in_flight, num_healthy, core_mib))
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


async def _report(fleet: Fleet, load: Load, result: Result, say: Callable[[str], None]) -> None:
    while True:
        await asyncio.sleep(_SAY_EVERY_S)
        mark_lost(result.asked, result.injected)
        outcomes = [each.outcome for each in result.asked]
        wrong = sum(each.is_equal is False for each in result.asked)
        say(
            f"{load.now_s:5.0f} s  {outcomes.count('ok')} ok, {outcomes.count('error')} errors, "
            f"{outcomes.count('lost')} lost, {outcomes.count('cancelled')} cancelled, "
            f"{load.in_flight} in flight, {wrong} canaries differ, "
            f"exports {fleet.collector.num_exports}"
        )
