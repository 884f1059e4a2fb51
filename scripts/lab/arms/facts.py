"""What an arm may know: the step times, the boundary token, and for oracles the lengths."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from meridian_patch.replay.types import StepWork


class Lengths(NamedTuple):
    """Tokens that a request will sample; the thought includes the token that ends it."""

    think: int
    answer: int


@dataclass(frozen=True)
class Facts:
    """What is told to an arm before the first request.

    Attributes:
        step_seconds: of the replay's cost model. Ours has to learn it.
        chunk_tokens: the engine's own budget per step.
        think_end: the token that ends a thought.
        seed: of the trace; for arms that draw.
        lengths: by request id. Only oracles and predictors with noise read it.
    """

    step_seconds: Callable[[StepWork], float]
    chunk_tokens: int
    think_end: int
    seed: int
    lengths: Mapping[str, Lengths]
