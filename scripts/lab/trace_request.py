"""Counts the files and functions of ours that an event of a request passes in the engine core.

    python -P scripts/lab/trace_request.py [--names]

vLLM's own scheduler and KV cache manager run without a model, all defaults on: asynchronous, KV
tiers, early exit observing. A *return* is a return of a function of ``meridian_patch``; a *stay* is
a row of them in one file. Of nine steps that decode, the one with the fewest returns is shown.
``--names`` lists the functions.
"""

import argparse
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import meridian_patch

OURS = str(Path(str(meridian_patch.__file__)).resolve().parent)
TESTS = Path(__file__).resolve().parents[2] / "tests" / "support"
sys.path += [str(TESTS / "drivers"), str(TESTS / "jobs")]


@dataclass
class Trace:
    """The returns of functions of ours, in order.

    Attributes:
        returns: file below the package, and the function's name.
    """

    returns: list[tuple[str, str]] = field(default_factory=list)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Add what returns within the block."""
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    @property
    def files(self) -> int:
        """Files that any of them is in."""
        return len({file for file, _ in self.returns})

    @property
    def stays(self) -> int:
        """How often the file changes."""
        return sum(1 for _ in groupby(self.returns, key=lambda each: each[0]))

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "return" and code.co_filename.startswith(OURS):
            self.returns.append((os.path.relpath(code.co_filename, OURS), code.co_qualname))


def traces(model: Path) -> dict[str, Trace]:
    """Each event of one request beside eight others, by its name."""
    import pytest
    from exit_driver import exit_driver, thinker

    gaps = {"EXIT__PROBE_MIN_GAP_TOKENS": "64", "EXIT__PROBE_MAX_GAP_TOKENS": "512"}
    settings = {"EXIT__MODE": "observe", "EXIT__PROBE_EVERY_STEPS": "8", **gaps}
    with pytest.MonkeyPatch.context() as patch:
        driver = exit_driver(patch, model, is_async=True, tiered=True, **settings)
        for number in range(8):
            driver.add(thinker(f"r{number}", think_tokens=1000))
        for _ in range(30):
            driver.step()
        found = {"added": traced(lambda: driver.add(thinker("own", think_tokens=20)))}
        found["prefill"] = traced(driver.step)
        decodes = [traced(driver.step) for _ in range(9)]
        found["decode"] = min(decodes, key=lambda each: len(each.returns))
        found["thought ends"] = step_where(driver, lambda: answers(driver, "own"))
        found["freed"] = traced(lambda: driver.abort("own"))
    return found


def answers(driver: Any, name: str) -> bool:
    """Whether the request's thought has ended."""
    return driver.scheduler.requests[name].num_output_tokens > driver.jobs[name].think_tokens


def traced(run: Callable[[], object]) -> Trace:
    """What returns while it runs."""
    trace = Trace()
    with trace.watching():
        run()
    return trace


def step_where(driver: Any, is_over: Callable[[], bool]) -> Trace:
    """What returns in the step behind which it is true."""
    for _ in range(400):
        trace = traced(driver.step)
        if is_over():
            return trace
    raise RuntimeError("the event did not come within 400 steps")


def main() -> None:
    """Print a line per event; with --names the functions, too."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--names", action="store_true", help="list the functions, too")
    options = parser.parse_args()
    found = traces(Path(OURS) / "demo" / "tiny-reasoner")
    print("| event | files | stays | returns |\n|---|---|---|---|")
    for event, trace in found.items():
        print(f"| {event} | {trace.files} | {trace.stays} | {len(trace.returns)} |")
    if options.names:
        for event, trace in found.items():
            print(f"\n{event}:")
            for (file, name), count in Counter(trace.returns).items():
                print(f"{count:5} {file} {name}")


if __name__ == "__main__":
    main()
