"""The entropies that pretended workers measure."""

import math
import zlib
from typing import Any

from simulator.axes import Case


class Entropies:
    """Signals of a row: [entropy in nats, log-sum-exp, max probability, boundary's probability].

    Some requests converge, so that their probes say the same each time; some derail; some are
    unsure for ever. With the fault ``nan``, a row in ten holds none.
    """

    def __init__(self, case: Case, ledger: Any) -> None:
        self._case = case
        self._ledger = ledger
        self.is_nan = False

    def __call__(self, name: str, num_tokens: int) -> list[float]:
        draw = zlib.crc32(f"{name} {num_tokens}".encode())
        if self.is_nan and draw % 10 == 0:
            return [math.nan] * 4
        kind = zlib.crc32(name.encode()) % 3
        entropy = (draw % 1000) / 1000
        if name not in self._ledger.records:
            # A probe: its parent converges after some tokens, or does not.
            entropy = 0.3 if num_tokens % 5 else entropy
        elif kind == 0:
            entropy = 0.2 if num_tokens % 64 < 40 else 2.0 + entropy
        ends = 0.6 if draw % 23 == 0 else 0.01
        return [entropy, 5.0, 0.5, ends]
