"""Which faults a marathon injects, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from meridian_patch.errors import BenchError

Kind = Literal["peer", "api-server", "frozen", "disk", "collector", "resets"]
Engine = Literal["think-1", "think-2", "answer"]

STRUCK: Final[tuple[Engine, ...]] = ("answer", "think-1", "answer", "think-2")
"""Which engine each round strikes, over and over."""

REST_S: Final = 12.0
"""Seconds between a fault, when its window and what it killed are over, and the next one."""


@dataclass(frozen=True)
class Shape:
    """How a kind of fault runs.

    Attributes:
        title: for people.
        fault_s: how long it lasts; 0 for what happens at once.
        window_s: its window, in which more requests may fail: from its beginning, the fault
            included.
    """

    title: str
    fault_s: float
    window_s: float


SHAPES: Final[dict[Kind, Shape]] = {
    "peer": Shape("all processes of an engine killed", 0, 45),
    "api-server": Shape("an API server killed, its EngineCore left", 0, 45),
    "frozen": Shape("an EngineCore stopped and continued", 15, 40),
    "disk": Shape("no byte can be written to a file of an engine", 15, 30),
    "collector": Shape("the trace collector and a metrics scraper are slow", 20, 35),
    "resets": Shape("connections to the answer engine reset", 8, 30),
}


@dataclass(frozen=True)
class Fault:
    """One injection.

    Attributes:
        kind: of the fault.
        engine: that it strikes, where it strikes one.
        at_s: when it begins at the earliest, seconds from the start of the load.
    """

    kind: Kind
    engine: Engine
    at_s: float

    @property
    def shape(self) -> Shape:
        """How it runs."""
        return SHAPES[self.kind]

    @property
    def strikes(self) -> str:
        """What it strikes, for people."""
        at_large = {"collector": "all engines", "resets": "between engines"}
        return at_large.get(self.kind, self.engine)

    @property
    def kills_think_server(self) -> bool:
        """Whether it ends a think server, and with it the requests that are there."""
        return self.kind in {"peer", "api-server"} and self.engine != "answer"

    @property
    def window_end_s(self) -> float:
        """When its window ends at the earliest, seconds from the start of the load."""
        return self.at_s + self.shape.window_s


def plan_faults(length_s: float, kinds: Sequence[Kind], warm_up_s: float = 45.0) -> list[Fault]:
    """Faults in rounds of all kinds; each round strikes another engine.

    Args:
        length_s: of the load.
        kinds: to inject, in this order.
        warm_up_s: until the first one.

    Raises:
        BenchError: the load is too short for one round.
    """
    faults: list[Fault] = []
    at_s, round_number = warm_up_s, 0
    while kinds:
        for kind in kinds:
            fault = Fault(kind, STRUCK[round_number % len(STRUCK)], at_s)
            if fault.window_end_s > length_s:
                if round_number == 0:
                    raise BenchError(
                        f"the marathon lasts {length_s / 60:g} minutes, expected at least "
                        f"{_least_s(kinds, warm_up_s) / 60:.1f} for these faults; give more "
                        "--minutes or fewer --faults"
                    )
                return faults
            faults.append(fault)
            at_s = fault.window_end_s + REST_S
        round_number += 1
    return faults


def _least_s(kinds: Sequence[Kind], warm_up_s: float) -> float:
    windows = [SHAPES[kind].window_s for kind in kinds]
    return warm_up_s + sum(windows) + REST_S * (len(windows) - 1)
