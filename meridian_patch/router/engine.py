"""An engine behind the router: its address, its health, and the requests that wait for it."""

import asyncio
from dataclasses import dataclass, field
from typing import Final, Literal

import httpx

from meridian_patch.router.silence import Silence

Role = Literal["think", "answer"]

LOST_AFTER: Final = 2
"""Health checks in a row that an engine must fail until its requests are given up."""

# Load-bearing: for a connection that is reset just as it opens, the HTTP client's own layers raise
# an AttributeError: its socket has no peer any more.
BROKEN: Final = (httpx.HTTPError, httpx.InvalidURL, AttributeError)
"""What the HTTP client raises when an engine cannot be reached, or breaks off."""


@dataclass(slots=True, eq=False)
class Engine:
    """An engine's address and state.

    Attributes:
        url: base address, without a slash at its end.
        role: what the router uses it for.
        is_healthy: whether it answered its last health check, does not hang, and no connection
            failed since.
        num_requests: requests that the router has there now.
        load: its own phase-weighted load when last read; 0 if it reports none.
        silence: since when it has shown no sign of life.
        check_now: set to check it without delay.
    """

    url: str
    role: Role
    is_healthy: bool = False
    num_requests: int = 0
    load: float = 0.0
    silence: Silence = field(default_factory=Silence, repr=False)
    check_now: asyncio.Event = field(default_factory=asyncio.Event, repr=False)
    # What waits for a reply of it, and whether another engine could serve it as well.
    _waits: dict[asyncio.Timeout, bool] = field(default_factory=dict, repr=False)
    # Health checks that it failed in a row, and requests there when `load` was read.
    _failed_checks: int = field(default=0, repr=False)
    _num_at_check: int = field(default=0, repr=False)

    @property
    def weight(self) -> float:
        """Load now: as it was at the last check, with what the router sent and ended since."""
        return max(self.load + self.num_requests - self._num_at_check, 0.0)

    @property
    def is_waited_for(self) -> bool:
        """Whether any request waits for a reply of it."""
        return bool(self._waits)

    def begin_wait(self, wait: asyncio.Timeout, *, may_leave: bool) -> None:
        """Note that a request waits; the wait is ended when the engine is lost.

        Args:
            wait: of the request.
            may_leave: whether to end it when the engine hangs, too.
        """
        self._waits[wait] = may_leave
        self.silence.begin(_now())

    def end_wait(self, wait: asyncio.Timeout) -> None:
        """Note that a request waits no more."""
        del self._waits[wait]
        # One that was given up is still owed.
        if not self._waits and not wait.expired():
            self.silence.settle()

    def heard(self) -> None:
        """Note a byte that its EngineCore caused."""
        self.silence.heard(_now(), is_waiting=self.is_waited_for)

    def passed(self, load: float | None) -> None:
        """Note a check that succeeded.

        Args:
            load: that the engine reports; None keeps the last one, so that the router's own
                requests count since then, or from the first one if there never was any.
        """
        self._failed_checks = 0
        self.is_healthy = True
        if load is not None:
            self.load, self._num_at_check = load, self.num_requests

    def failed(self) -> None:
        """Note a check that failed; after some in a row, give up what waits for the engine."""
        self.is_healthy = False
        self._failed_checks += 1
        if self._failed_checks >= LOST_AFTER:
            self._give_up(list(self._waits))

    def hangs(self) -> None:
        """Note that it hangs: give up what another engine can serve."""
        self.silence.is_hung = True
        self._give_up([wait for wait, may_leave in self._waits.items() if may_leave])

    def _give_up(self, waits: list[asyncio.Timeout]) -> None:
        for wait in waits:
            if not wait.expired():
                wait.reschedule(_now())


def _now() -> float:
    return asyncio.get_running_loop().time()
