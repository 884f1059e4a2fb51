"""Decides what a lock-step rank leaves out of a step for the sake of the other ranks.

Ranks of a mixture of experts compute each step together: a step takes as long as the slowest rank
needs, so that prefill on one rank delays the answers of all of them.
"""

from collections.abc import Collection
from typing import Final, NamedTuple

THINK_WEIGHT: Final = 2.0
"""A request that thinks, or is about to, counts as so many that answer.

What counts on a rank is how long a request keeps its seat and its KV blocks. A rank keeps a request
to its end: one that thinks has two phases left, one that answers has one. That answers are delayed
by prefill speaks against no rank, since in lock step prefill delays the answers of all, wherever it
runs. Ranks of a dense model step on their own: there only the first reason holds, against the
second. An engine behind ``meridian route`` is weighed otherwise: see ``router/load.py``.
"""


class RankLoad(NamedTuple):
    """What one rank tells the others.

    Attributes:
        answering: running requests that answer, 0 on a rank on which no request reasons.
        thinking: running requests that think.
        other: running requests of neither kind: their prompts are computed.
        waiting: requests that wait.
        is_full: whether the rank can admit no request, for want of seats or of KV blocks.
    """

    answering: int = 0
    thinking: int = 0
    other: int = 0
    waiting: int = 0
    is_full: bool = False

    @property
    def running(self) -> int:
        return self.answering + self.thinking + self.other

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def weight(self) -> float:
        """Phase-weighted load, in answering requests."""
        stays = self.thinking + self.other + self.waiting
        return self.answering + THINK_WEIGHT * stays


def any_answers(peers: Collection[RankLoad]) -> bool:
    """Whether prefill on this rank would delay an answer on another one."""
    return any(peer.answering for peer in peers)


class AdmissionGate:
    """Holds new prefill of a rank back while another rank is full, for a few steps at most.

    A full rank takes up its next request when one of its own ends. If all ranks begin theirs in the
    same step, the answers are delayed once and not once per rank. The gate only ever delays:

    1. It needs an answer somewhere, which prefill would delay.
    2. A rank with less load than the others on average is not held: it has to catch up. Neither is
       one that runs nothing, which would be idle.
    3. After ``most_steps`` steps in a row one step is free, whatever the others say.

    Args:
        most_steps: 0 switches the gate off.
    """

    def __init__(self, most_steps: int) -> None:
        self._most_steps = most_steps
        self._held_steps = 0

    def holds(self, own: RankLoad, peers: Collection[RankLoad]) -> bool:
        """Whether the next step admits no request; asked once for each step."""
        is_held = self._held_steps < self._most_steps and _should_wait(own, peers)
        self._held_steps = self._held_steps + 1 if is_held else 0
        return is_held


def _should_wait(own: RankLoad, peers: Collection[RankLoad]) -> bool:
    if own.is_full or not own.waiting or not own.running:
        return False
    if not any(peer.is_full for peer in peers):
        return False
    if not own.answering and not any_answers(peers):
        return False
    return own.weight * len(peers) >= sum(peer.weight for peer in peers)
