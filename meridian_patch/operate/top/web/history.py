"""The windows that the page draws: the last minutes of a server, or a whole recording."""

import secrets
import threading
import time
from collections import deque
from typing import Any, Final

from meridian_patch.errors import MeridianError
from meridian_patch.operate.top.verdict import Load
from meridian_patch.operate.top.view import View, finite

KEPT: Final = 450
"""Windows of a running server: 15 minutes of 2 seconds each."""


class History:
    """Windows in the order in which they ended; one thread adds while others read.

    Args:
        source: the address or file that they are from.
        interval_s: seconds between two scrapes; None: a recording, which does not go on.
    """

    def __init__(self, source: str, interval_s: float | None) -> None:
        self._source = source
        self._interval_s = interval_s
        # Tells a page that was opened before this program was started anew.
        self._run = secrets.token_hex(8)
        self._points: deque[dict[str, Any]] = deque(maxlen=KEPT if interval_s else None)
        self._number = 0
        self._added_at_s = time.monotonic()
        self._lock = threading.Lock()

    def add(self, at_s: float, shown: View | MeridianError) -> None:
        """Add a window.

        Args:
            at_s: when it ended, in seconds of any clock that goes on.
            shown: what happened in it, or why that is unknown.
        """
        point: dict[str, Any] = {"at_s": at_s, "error": None, "phases": {}, "view": None}
        if isinstance(shown, View):
            point |= {"phases": phases(shown.load), "view": shown.as_dict()}
        else:
            point["error"] = str(shown)
        with self._lock:
            self._number += 1
            self._points.append(finite(point) | {"number": self._number})
            self._added_at_s = time.monotonic()

    def since(self, run: str, number: int) -> dict[str, Any]:
        """What a page does not have yet, for JSON.

        Args:
            run: as it was told before; anything else gets all windows.
            number: of the last window that it has.
        """
        with self._lock:
            after = number if run == self._run else 0
            return {
                "run": self._run,
                "source": self._source,
                "interval_s": self._interval_s,
                "age_s": time.monotonic() - self._added_at_s,
                "first": self._points[0]["number"] if self._points else 0,
                "points": [point for point in self._points if point["number"] > after],
            }


def phases(load: Load) -> dict[str, float]:
    """Unfinished requests, each counted once; empty: the server does not tell it.

    Waiting requests that have not begun are ``waiting``; one that was preempted stays in its phase.
    """
    if load.is_patched and load.requests:
        prefill = load.requests.get("prefill", 0.0)
        waiting = min(prefill, load.waiting or 0.0)
        return {
            "answer": load.requests.get("answer", 0.0),
            "think": load.requests.get("think", 0.0),
            "prefill": prefill - waiting,
            "waiting": waiting,
        }
    if load.running is None:
        return {}
    return {"running": load.running, "waiting": load.waiting or 0.0}
