"""Runs one case: ours with every check, and vLLM's own scheduler on the same seed."""

import contextlib
import hashlib
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest.mock import patch

from simulator.axes import Case
from simulator.build import surroundings
from simulator.engine import Arm, Clock
from simulator.failure import Failure
from simulator.faults import Faults
from simulator.invariants import check_drained, check_times
from simulator.watching import Checker, Recorder

# Iterations that ours may take: so many times stock's, and so many more.
STRETCH, MORE_TICKS = 3, 600
_MOST_TICKS = 12_000


@dataclass
class Result:
    """What came of a case.

    Attributes:
        failures: invariants that do not hold, and how that shows; the first one first.
        message: why it is void.
        is_void: stock itself does not serve this case, so it says nothing about ours.
        digest: of every decision of ours, in hex.
        counts: of what happened.
    """

    case: Case
    steps: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    message: str = ""
    where: str = ""
    is_void: bool = False
    digest: str = ""
    counts: dict[str, float] = field(default_factory=dict)


def run_case(case: Case) -> Result:
    """Run a case; never raises for what the scheduler does."""
    result = Result(case)
    clock = Clock()
    with (
        surroundings(case),
        patch.object(time, "monotonic", clock),
        patch.object(time, "perf_counter", clock),
        patch.object(time, "time", clock),
    ):
        stock, recorder = None, Recorder()
        try:
            stock = _run_stock(case, clock, recorder)
        except Exception as error:
            result.is_void, result.message = True, f"stock: {error!r}"
            result.where = _where(error)
            return result
        clock.now = Clock().now
        try:
            _run_ours(case, clock, stock, recorder, result)
        except Failure as failure:
            result.failures.setdefault(failure.invariant, failure.message)
            result.where = _where(failure)
        except Exception as error:
            result.failures["crash"] = repr(error)
            result.where = _where(error)
    return result


def _run_stock(case: Case, clock: Clock, recorder: Recorder) -> Arm:
    stock = Arm(case, clock, is_stock=True)
    stock.watch = recorder
    with _closing(stock):
        _loop(stock, Faults(case, stock), lambda: _MOST_TICKS, lambda: None)
    check_drained(stock)
    return stock


def _run_ours(case: Case, clock: Clock, stock: Arm, recorder: Recorder, result: Result) -> None:
    ours = Arm(case, clock, is_stock=False)
    faults = Faults(case, ours)
    checker = Checker(ours, faults, recorder)
    ours.watch = checker

    def limit() -> int:
        # Aborts and closed thoughts leave other work to do than stock has.
        more_work = max(1.0, ours.ledger.num_tokens / max(stock.ledger.num_tokens, 1))
        # One that stock's clients aborted may go on here, by a token in each iteration.
        longest = max((len(each.request.output_token_ids) for each in ours.live()), default=0)
        return int(STRETCH * stock.tick * more_work) + MORE_TICKS + longest

    try:
        with _closing(ours):
            _loop(ours, faults, limit, checker.after_tick)
    finally:
        result.steps = ours.num_steps
        result.failures = checker.failures
        result.digest = hashlib.sha256(b"".join(checker.digests)).hexdigest()
        result.counts = {
            "stock_steps": stock.num_steps,
            "tokens": ours.ledger.num_tokens,
            "requests": len(ours.ledger.records),
            "closes": ours.ledger.num_closes,
            "displaced": checker.num_preempted_for_room,
            "steered": checker.num_steered,
            "learnt": checker.num_learnt,
            "probes": checker.num_probes,
            **{f"fault_{name}": number for name, number in faults.met.items()},
        }
    checker.at_end()
    check_times(stock, ours)
    check_drained(ours, knows_all=not faults.num_raised)
    extras = [each.ask.extra for each in ours.ledger.records.values()]
    is_noop = case.profile == "noop" and case.rule == "profile" and case.exit == "off"
    # A request may ask for early exit where the engine's own is off; a probe is in steps then.
    asks_exit = any(extra.get("meridian_exit", "off") != "off" for extra in extras)
    if asks_exit and (checker.num_probes or ours.ledger.num_closes):
        is_noop = False
    wishes = any({"meridian_priority", "meridian_history"} & extra.keys() for extra in extras)
    # There the thought of an earlier turn, in the prompt, has a tier of its own.
    has_tiers = case.tiers and case.history == "keep_in_tool_loop"
    result.counts["compared"] = is_noop or not (checker.num_reasoning or wishes or has_tiers)
    if result.counts["compared"]:
        _compare(recorder, checker)


@contextlib.contextmanager
def _closing(arm: Arm) -> Iterator[None]:
    """Close an arm; what closing raises does not hide what failed before."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(Exception):
            arm.close()
        raise
    arm.close()


def _compare(stock: Recorder, ours: Recorder) -> None:
    """Invariant 7."""
    for index, (theirs, own) in enumerate(zip(stock.digests, ours.digests, strict=False)):
        if theirs != own:
            raise Failure("stock", f"step {index} differs from stock's")
    if len(stock.digests) != len(ours.digests):
        raise Failure("stock", f"{len(ours.digests)} steps, stock has {len(stock.digests)}")


def _loop(arm: Arm, faults: Faults, limit, after_tick) -> None:
    while faults.is_paused or not arm.is_drained:
        arm.begin_tick()
        faults.before_step()
        arm.step()
        after_tick()
        if arm.tick >= limit():
            left = [record.ask.name for record in arm.live()]
            raise Failure(
                "progress",
                f"{len(left)} requests are left after {arm.tick} iterations ({limit()} allowed): "
                f"{left[:3]}",
            )


def _where(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))
