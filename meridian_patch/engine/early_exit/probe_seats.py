"""Shares the last free seats between probes and requests that wait."""

from typing import Any

from meridian_patch.engine.scheduler.admission_checks import next_in_line, num_seated


class ProbeSeats:
    """How many of the seats that are free a step's probes may take.

    A probe holds a seat for one step or two, a request for as long as it runs. Where no request
    waits that could use a seat, probes may have all of them. Otherwise:

    1. Where seats are kept for probes, because they end thoughts and so free seats, these are all
       that probes take. Without a probe in a full batch a thought without end would not be closed.
    2. Where none are kept, probes leave one seat free if several are.
    3. The last one goes to probes and to requests in turn: one that waits is passed over once.

    A request that waits for KV blocks cannot take its turn, so that probes go on beside it.

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
        """Once per step, before probes are offered to it.

        Args:
            num_kept: seats to keep for probes.
            num_probes: that are under way.
            most_probes: that may be under way at a time.
        """
        scheduler = self._scheduler
        free = free_seats(scheduler)
        self.places = free
        if not 0 < free + num_probes <= num_kept + most_probes or not scheduler.waiting:
            self._is_wanted = False
            return
        if free:
            # While probes hold the last seats it cannot be told: what was true before stays true.
            self._is_wanted = next_in_line(scheduler) is not None
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
    """Requests that upstream would still admit; to be asked outside of ``schedule()``."""
    # Load-bearing: upstream admits requests up to this number, paused sessions included. The model
    # runner may have more slots (max_num_seqs).
    return int(scheduler.max_num_active_reqs - num_seated(scheduler))
