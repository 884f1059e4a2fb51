"""Judges a marathon: arithmetic over what it noted."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from marathon.faults import Kind
from marathon.records import Asked, Injected, LogLine, Result, Sample

MOST_ERRORS: Final = 0.01
"""As a share of requests, outside of windows and within those of faults that clients do not see."""
MOST_ERRORS_SEEN: Final = 0.10
"""As a share of requests within the window of a killed think server, beside those lost with it."""
LOST_WITHIN_S: Final = 5.0
"""After a think server was killed: what was there has broken off by then."""
MOST_LOST: Final = 0.75
"""As a share of those in flight when a think server was killed: one of two has about half."""
MOST_RECOVERY_S: Final = 30.0
MOST_GROWTH: Final = 0.05
"""What the memory of an EngineCore may grow by, as a share, after it is warm."""

_WARM_S: Final = 60.0
# Shorter lives of a warm EngineCore say nothing about its memory.
_LEAST_WARM_S: Final = 60.0
# Requests whose end no client chose.
_ENDED: Final = frozenset(("ok", "error", "lost"))


@dataclass(frozen=True)
class Check:
    """One demand on a marathon.

    Attributes:
        name: what is demanded.
        bar: the limit, for people.
        value: what was measured, for people.
        is_met: whether the demand is met.
    """

    name: str
    bar: str
    value: str
    is_met: bool


@dataclass(frozen=True)
class Window:
    """What happened within the window of one fault.

    Attributes:
        injected: the fault.
        num_requests: that ended and belong to the window, without lost and cancelled ones.
        num_errors: of these.
        num_lost: requests that broke off because their think server was killed.
        num_in_flight: when the fault began.
        recovery_s: from the fault until the service answers again: requests succeed, and none fails
            or has wrong tokens any more; None: not within the window.
    """

    injected: Injected
    num_requests: int
    num_errors: int
    num_lost: int
    num_in_flight: int
    recovery_s: float | None

    @property
    def error_share(self) -> float:
        """Errors by request; 0 without requests."""
        return self.num_errors / self.num_requests if self.num_requests else 0.0


def mark_lost(asked: Sequence[Asked], injections: Sequence[Injected]) -> None:
    """Let what broke off with a think server be lost, which is no error.

    No gateway goes on with a response that has begun. A request is lost if it was in flight when a
    think server was killed, and broke off within `LOST_WITHIN_S`.

    Args:
        asked: all requests; their outcome is set.
        injections: all faults that happened.
    """
    kills = [each.begin_s for each in injections if each.fault.kills_think_server]
    for each in asked:
        if each.outcome == "error" and each.is_cut and each.end_s is not None:
            since_s = [each.end_s - kill_s for kill_s in kills if kill_s >= each.begin_s]
            if any(0 <= seconds <= LOST_WITHIN_S for seconds in since_s):
                each.outcome = "lost"


def windows_of(injections: Sequence[Injected], asked: Sequence[Asked]) -> list[Window]:
    """What happened within the window of each fault.

    A request belongs to one window at most: that of the last fault that began before its end, if it
    was in flight at any time of it.
    """
    own: list[list[Asked]] = [[] for _ in injections]
    for each in asked:
        if each.outcome in _ENDED and (place := _place_of(each, injections)) is not None:
            own[place].append(each)
    return [
        _window_of(injected, ended, sum(_is_in_flight(each, injected.begin_s) for each in asked))
        for injected, ended in zip(injections, own, strict=True)
    ]


def judge(result: Result, planned: Collection[Kind]) -> list[Check]:
    """All demands on a marathon.

    Args:
        result: what was noted.
        planned: kinds of fault that should have happened.
    """
    windows = windows_of(result.injected, result.asked)
    seen = [window for window in windows if window.injected.fault.kills_think_server]
    unseen = [window for window in windows if window not in seen]
    return [
        _all_injected(result.injected, planned),
        _canaries(result.asked),
        _moved(result.handoffs),
        _outside(result.asked, result.injected),
        _within(
            "errors within each window in which no think server is killed", unseen, MOST_ERRORS
        ),
        _within("errors within each window of a killed think server", seen, MOST_ERRORS_SEEN),
        _lost(seen),
        _recovery(windows),
        _back(result.injected),
        _memory(result.samples, result.warmed),
        _log(result.lines),
    ]


def growth_of(samples: Sequence[Sample], warmed: Mapping[str, float]) -> Mapping[str, float]:
    """Growth of each EngineCore that was warm long enough, as a share: last quarter over first.

    Memory within the first minute of a process is left out, and all until it has served alone:
    caches fill, and code is loaded.

    Args:
        samples: of processes, in order of time.
        warmed: when each EngineCore had served alone.
    """
    lives: dict[str, list[tuple[float, float]]] = {}
    for sample in samples:
        for name, mib in sample.core_mib.items():
            lives.setdefault(name, []).append((sample.at_s, mib))
    growth = {}
    for name, life in lives.items():
        if name not in warmed:
            continue
        begin_s = max(life[0][0] + _WARM_S, warmed[name])
        warm = [mib for at_s, mib in life if at_s >= begin_s]
        if life[-1][0] - begin_s >= _LEAST_WARM_S and warm:
            part = max(len(warm) // 4, 1)
            growth[name] = median(warm[-part:]) / median(warm[:part]) - 1
    return growth


def _is_in_flight(each: Asked, at_s: float) -> bool:
    return each.begin_s <= at_s and (each.end_s is None or each.end_s >= at_s)


def _place_of(each: Asked, injections: Sequence[Injected]) -> int | None:
    """Which fault's window a request belongs to; None: it was outside of all."""
    assert each.end_s is not None
    begun = [place for place, fault in enumerate(injections) if fault.begin_s <= each.end_s]
    if not begun:
        return None
    last = max(begun, key=lambda place: injections[place].begin_s)
    return last if each.begin_s <= injections[last].end_s else None


def _window_of(injected: Injected, ended: Sequence[Asked], num_in_flight: int) -> Window:
    lasting = [each for each in ended if each.outcome != "lost"]
    num_errors = sum(each.outcome == "error" for each in lasting)
    num_lost = len(ended) - len(lasting)
    recovery_s = _recovery_s(injected, lasting)
    return Window(injected, len(lasting), num_errors, num_lost, num_in_flight, recovery_s)


def _recovery_s(injected: Injected, ended: Sequence[Asked]) -> float | None:
    wrong = [each.end_s for each in ended if each.end_s is not None and not _is_right(each)]
    last_wrong_s = max(wrong, default=injected.begin_s)
    # Sent after the fault began, so that it was served in spite of it.
    good = [
        each.end_s
        for each in ended
        if _is_right(each) and each.end_s is not None and each.begin_s >= injected.begin_s
    ]
    after = [end_s for end_s in good if end_s >= last_wrong_s]
    return min(after) - injected.begin_s if after else None


def _is_right(each: Asked) -> bool:
    return each.outcome == "ok" and each.is_equal is not False


def _all_injected(injections: Sequence[Injected], planned: Collection[Kind]) -> Check:
    seen = {each.fault.kind for each in injections}
    value = f"{len(seen)} kinds, {len(injections)} faults"
    return Check("kinds of fault injected", f"all {len(planned)}", value, seen >= set(planned))


def _canaries(asked: Sequence[Asked]) -> Check:
    seen = [each for each in asked if each.is_canary and each.outcome == "ok"]
    equal = sum(each.is_equal is True for each in seen)
    name = "canaries with the tokens of one engine"
    return Check(name, "all", f"{equal} of {len(seen)}", bool(seen) and equal == len(seen))


def _outside(asked: Sequence[Asked], injections: Sequence[Injected]) -> Check:
    ended = [each for each in asked if each.outcome in _ENDED]
    outside = [each for each in ended if _place_of(each, injections) is None]
    errors = sum(each.outcome == "error" for each in outside)
    share = errors / len(outside) if outside else 0.0
    return Check(
        "errors outside of windows",
        f"< {MOST_ERRORS:.0%}",
        f"{share:.2%} ({errors} of {len(outside)})",
        bool(outside) and share < MOST_ERRORS,
    )


def _within(name: str, windows: Sequence[Window], most: float) -> Check:
    bar = f"< {most:.0%}"
    if not windows:
        return Check(name, bar, "no window", is_met=True)
    worst = max(windows, key=lambda window: window.error_share)
    value = f"at most {worst.error_share:.2%} ({worst.injected.fault.kind})"
    # A window without requests shows nothing.
    is_met = all(window.num_requests for window in windows)
    return Check(name, bar, value, is_met and worst.error_share < most)


def _lost(windows: Sequence[Window]) -> Check:
    """All windows together: a window of few requests may have most of them at one server."""
    lost = sum(window.num_lost for window in windows)
    in_flight = sum(window.num_in_flight for window in windows)
    share = lost / in_flight if in_flight else 0.0
    return Check(
        "requests lost with their think server, of those in flight then",
        f"<= {MOST_LOST:.0%}",
        f"{share:.0%} ({lost} of {in_flight}, {len(windows)} times)",
        share <= MOST_LOST,
    )


def _moved(handoffs: Mapping[str, int]) -> Check:
    moved, ended = handoffs.get("moved", 0), sum(handoffs.values())
    share = f" ({moved / ended:.0%})" if ended else ""
    name = "requests that answered at the answer engine"
    return Check(name, "> 0", f"{moved} of {ended}{share}", moved > 0)


def _recovery(windows: Sequence[Window]) -> Check:
    name, bar = "recovery of the service", f"< {MOST_RECOVERY_S:.0f} s"
    lost = [window for window in windows if window.recovery_s is None]
    if lost:
        kinds = ", ".join(window.injected.fault.kind for window in lost)
        return Check(name, bar, f"not within the window of {kinds}", is_met=False)
    if not windows:
        return Check(name, bar, "no window", is_met=True)
    worst = max(windows, key=lambda window: window.recovery_s or 0.0)
    slowest = worst.recovery_s or 0.0
    value = f"at most {slowest:.1f} s ({worst.injected.fault.kind})"
    return Check(name, bar, value, slowest < MOST_RECOVERY_S)


def _back(injections: Sequence[Injected]) -> Check:
    killed = [each for each in injections if each.must_return]
    took = [each.back_s - each.begin_s for each in killed if each.back_s is not None]
    value = f"{len(took)} of {len(killed)}"
    value += f", after at most {max(took):.1f} s" if took else ""
    return Check("killed processes are back", "all", value, len(took) == len(killed))


def _memory(samples: Sequence[Sample], warmed: Mapping[str, float]) -> Check:
    growth = growth_of(samples, warmed)
    name, bar = "growth of an EngineCore's memory", f"< {MOST_GROWTH:.0%}"
    if not growth:
        return Check(name, bar, "no EngineCore lived long enough", is_met=False)
    worst = max(growth, key=lambda each: growth[each])
    value = f"at most {growth[worst]:+.1%} ({worst})"
    return Check(name, bar, value, growth[worst] < MOST_GROWTH)


def _log(lines: Sequence[LogLine]) -> Check:
    forbidden = [line for line in lines if not line.known]
    return Check("forbidden lines in logs", "none", f"{len(forbidden)}", not forbidden)
