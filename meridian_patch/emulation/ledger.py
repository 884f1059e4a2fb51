"""Counts how late an emulated device hands over its outputs, and says whether figures count.

A step is *late* when the real model took longer than the emulated one, and *overslept* when the
machine woke the worker after its deadline. Neither is the scheduler's doing, and a real device
does neither.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meridian_patch.emulation.clock import Window
from meridian_patch.errors import BenchError

# More than this share of the device's time, and figures are of this machine.
MOST_LATE = 0.01
# Caches fill, kernels are compiled and the allocator grows in the first steps.
WARM_UP_STEPS = 100
NOT_CERTIFIED = "not certified: this machine is too slow for this device"


@dataclass
class Totals:
    """Sums over the steps of one kind; all in seconds but the counts.

    Attributes:
        steps: number of steps.
        device_s: time that the emulated device ran them.
        work_s: time that the real model took.
        late_steps: number of steps whose output was not there in time.
        late_s: from when it was due, or asked for, to when it was there.
        overslept_s: from a deadline to when the worker woke.
        engine_s: CPU time that EngineCore took outside of the worker, to schedule steps and to take
            their tokens in.
    """

    steps: int = 0
    device_s: float = 0.0
    work_s: float = 0.0
    late_steps: int = 0
    late_s: float = 0.0
    overslept_s: float = 0.0
    engine_s: float = 0.0


@dataclass
class Ledger:
    """What an emulated device did since its warm-up.

    Attributes:
        prefill: steps that computed prompts, or parts of them.
        decode: all other steps.
        overlapped_steps: submitted while the device ran an earlier one.
        warm_up_steps: left out of all sums.
    """

    prefill: Totals = field(default_factory=Totals)
    decode: Totals = field(default_factory=Totals)
    overlapped_steps: int = 0
    warm_up_steps: int = 0

    def record(
        self,
        window: Window,
        *,
        is_prefill: bool,
        asked_s: float,
        ready_s: float,
        handed_s: float,
        work_s: float,
        engine_s: float = 0.0,
    ) -> None:
        """Count one step; times are of the clock that made its window.

        Args:
            window: when the device ran it.
            is_prefill: it computed a prompt, or a part of one.
            asked_s: when the engine wanted the output.
            ready_s: when the real model had it.
            handed_s: when the engine got it.
            work_s: time that the real model took.
            engine_s: CPU time of EngineCore outside of the worker since the step before.
        """
        if self.warm_up_steps < WARM_UP_STEPS:
            self.warm_up_steps += 1
            return
        totals = self.prefill if is_prefill else self.decode
        totals.steps += 1
        totals.device_s += window.due_s - window.start_s
        totals.work_s += work_s
        totals.engine_s += engine_s
        self.overlapped_steps += window.is_overlapped
        # An output that is asked for late would have been there on a real device.
        wanted_s = max(window.due_s, asked_s)
        if ready_s > wanted_s:
            totals.late_steps += 1
            totals.late_s += ready_s - wanted_s
        else:
            totals.overslept_s += max(0.0, handed_s - wanted_s)

    @property
    def steps(self) -> int:
        """All steps, the warm-up included."""
        return self.warm_up_steps + self.prefill.steps + self.decode.steps

    @property
    def late_share(self) -> float:
        """Time late or overslept over the device's; 0 before the first step."""
        both = (self.prefill, self.decode)
        device_s = sum(totals.device_s for totals in both)
        late_s = sum(totals.late_s + totals.overslept_s for totals in both)
        return late_s / device_s if device_s else 0.0

    @property
    def is_certified(self) -> bool:
        """The machine was fast enough, as far as it was tried."""
        return self.late_share <= MOST_LATE

    def sentence(self) -> str:
        """The verdict and how it came about."""
        steps = self.prefill.steps + self.decode.steps
        if not steps:
            return "not certified: no step has run since the warm-up"
        verdict = "certified" if self.is_certified else NOT_CERTIFIED
        parts = [
            f"{name} late {_share(totals.late_s, totals.device_s)} in {totals.late_steps} of "
            f"{totals.steps} steps, overslept {_share(totals.overslept_s, totals.device_s)}"
            for name, totals in (("prefill", self.prefill), ("decode", self.decode))
        ]
        return f"{verdict} ({self.late_share:.2%} of its time; {'; '.join(parts)})"

    def as_dict(self) -> dict[str, Any]:
        """All sums and the verdict as plain data."""
        verdict = {"late_share": self.late_share, "is_certified": self.is_certified}
        return asdict(self) | verdict | {"sentence": self.sentence()}


def read_counters(report: Path) -> dict[str, float]:
    """Sums of a device's report, as counters that only rise.

    Raises:
        BenchError: the file is missing or is no report.
    """
    try:
        data: Mapping[str, Any] = json.loads(report.read_text())
        kinds = {kind: data[kind] for kind in ("prefill", "decode")}
        return {
            f"emulated_{kind}_{name}": float(value)
            for kind, totals in kinds.items()
            for name, value in totals.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BenchError(
            f"the emulated device's report {report} cannot be read ({error}): its server ended "
            "early, or does not run on an emulated device"
        ) from None


def late_share(counters: Mapping[str, float]) -> float | None:
    """Time late or overslept over the device's, of sums by ``read_counters``; None without any."""
    device_s = _sum(counters, "device_s")
    late_s = _sum(counters, "late_s") + _sum(counters, "overslept_s")
    return late_s / device_s if device_s else None


def engine_seconds(counters: Mapping[str, float]) -> float | None:
    """CPU time of EngineCore per step, of sums by ``read_counters``; None without a step."""
    steps = _sum(counters, "steps")
    return _sum(counters, "engine_s") / steps if steps else None


def _sum(counters: Mapping[str, float], name: str) -> float:
    return sum(counters.get(f"emulated_{kind}_{name}", 0.0) for kind in ("prefill", "decode"))


def _share(part_s: float, whole_s: float) -> str:
    return f"{part_s / whole_s:.2%}" if whole_s else "0 %"
