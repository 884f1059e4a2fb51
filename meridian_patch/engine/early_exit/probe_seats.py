"""Shares the last free seats between probes and waiting requests."""

from typing import Any

from meridian_patch.engine.scheduler.admission_checks import first_ready, num_seated


class ProbeSeats:
    """Computes how many of the free seats a step's probes may take.

    A probe holds a seat for one or two steps, a request for as long as it runs. If no waiting
    request could use a seat, probes may take all free ones. Otherwise:

    1. If seats are kept for probes, probes take only these. They are kept because in a full batch
       without probes an endless thought would not be closed and would keep its seat.
    2. If none are kept and several are free, probes leave one free.
    3. If none are kept and one is free, probes and requests take it in turn, so a waiting request
       is passed over at most once.

    A request that waits for KV blocks cannot use a seat, so probes continue beside it.

    Attributes:
        places: seats that probes may take in the next step.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        # Whether probes had the last turn, and whether a request wanted a seat.
        self._had_turn = False
        self._is_wanted = False
        self.places = 0

    def share(self, num_kept: int, num_probes: int, most_probes: int) -> None:
        """Update ``places``; call once per step, before probes are offered to it.

        Args:
            num_kept: seats to keep for probes.
            num_probes: number of live probes.
            most_probes: upper bound of live probes.
        """
        scheduler = self._scheduler
        free = free_seats(scheduler)
        self.places = free
        if not 0 < free + num_probes <= num_kept + most_probes or not scheduler.waiting:
            self._is_wanted = False
            return
        if free:
            # If probes hold the last seats this cannot be checked, and the last result is kept.
            self._is_wanted = first_ready(scheduler) is not None
        if not self._is_wanted:
            return
        if num_kept:
            if free + num_probes > num_kept:
                self.places = max(num_kept - num_probes, 0)
        elif free > 1:
            self.places = free - 1
        elif free:
            self.places = 0 if self._had_turn else 1
            self._had_turn = not self._had_turn


def free_seats(scheduler: Any) -> int:
    """Number of requests that upstream would still admit; call outside of ``schedule()``."""
    # Load-bearing: upstream admits requests up to this number, paused sessions included. The model
    # runner may have more slots (max_num_seqs).
    return int(scheduler.max_num_active_reqs - num_seated(scheduler))
