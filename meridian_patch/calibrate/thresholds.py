"""The strategies that can be calibrated, and the thresholds that are tried for each."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meridian_patch.errors import CalibrationError


@dataclass(frozen=True)
class StrategyKind:
    """A strategy with a threshold.

    Attributes:
        name: as in section ``exit``, where it is switched by it.
        key: of its threshold in section ``exit``.
        option: on the command line.
        symbol: for people.
        fires_below: it fires at values below the threshold, otherwise above it.
        above: what a threshold must be above.
        thresholds: tried where no others are given. They are fixed: thresholds taken from the
            records that they are tested on would void the bound.
    """

    name: str
    key: str
    option: str
    symbol: str
    fires_below: bool
    above: float
    thresholds: tuple[float, ...]


# From what no thought reaches to what every thought does, in nats squared.
EAT = StrategyKind(
    *("eat", "eat_delta", "--eat-deltas", "delta"),
    fires_below=True,
    above=0.0,
    thresholds=tuple(2.0 ** (power / 2) for power in range(-40, 7)),
)
RPDI = StrategyKind(
    *("rpdi", "rpdi_lambda", "--rpdi-lambdas", "lambda"),
    fires_below=False,
    above=1.0,
    thresholds=tuple(tenths / 10 for tenths in range(40, 10, -1)),
)
KINDS: Mapping[str, StrategyKind] = {kind.name: kind for kind in (EAT, RPDI)}


def read_kinds(text: str) -> list[StrategyKind]:
    """Strategies such as ``eat,rpdi``, each once."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in KINDS:
            raise CalibrationError(
                f"--strategies: unknown strategy {name!r}; known: {', '.join(KINDS)}"
            )
    return [KINDS[name] for name in names]


def read_thresholds(kind: StrategyKind, text: str | None) -> Sequence[float]:
    """Thresholds such as ``1e-4,1e-3``; without a text the fixed ones.

    Raises:
        CalibrationError: one that is no number, or out of range.
    """
    if text is None:
        return kind.thresholds
    return [_read(kind, part) for part in text.split(",")]


def _read(kind: StrategyKind, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not kind.above < value < math.inf:
        raise CalibrationError(f"{kind.option}: {text!r}, expected numbers above {kind.above:g}")
    return value


def read_share(option: str, text: str) -> float:
    """A number between 0 and 1, both excluded."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise CalibrationError(f"{option} is {text!r}, expected a number between 0 and 1")
    return value
