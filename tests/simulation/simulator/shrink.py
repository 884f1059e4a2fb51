"""Finds the smallest configuration in which a failure still shows."""

from collections.abc import Callable

from simulator.axes import AXES, Case
from simulator.run import Result, run_case

# Features first that many others hang on.
_ORDER = ("traffic", *(name for name in AXES if name.startswith("fault_")))


def shrink(result: Result, ran: Callable[[Case], Result] = run_case) -> Result:
    """Make one axis after the other plain, and keep that where the first failure stays.

    Args:
        result: of a case that failed.
        ran: runs a case.
    """
    invariant = next(iter(result.failures))
    best = result
    names = list(dict.fromkeys((*_ORDER, *AXES)))
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for name in names:
            if best.case.values[name] == AXES[name].plain:
                continue
            smaller = best.case.with_value(name, AXES[name].plain)
            if smaller.num_odd >= best.case.num_odd:
                continue
            tried = ran(smaller)
            if invariant in tried.failures:
                best, is_smaller = tried, True
    return best
