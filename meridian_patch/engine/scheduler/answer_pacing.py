"""Tracks the requests that answer, and the inter-token latency that each should have."""

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.phase.tracker import Phase, PhaseTracker


class AnswerPacing:
    """The requests in their answer phase, with their latency targets.

    A request may set its own target. A target below the default (which the policy keeps when
    nothing is configured) is raised to it: no step could keep it, and it would only delay prefill.

    Args:
        itl_s: the configured inter-token latency in seconds; None: it follows the step time.
    """

    def __init__(self, tracker: PhaseTracker, itl_s: float | None) -> None:
        self._tracker = tracker
        self._itl_s = itl_s
        # Ids of the requests that answer; a dictionary serves as an ordered set.
        self._answering: dict[str, None] = {}
        # Only these are searched for the tightest target, because few requests set one.
        self._own_itl_s: dict[str, float] = {}

    def changed(self, request_id: str, options: RequestOptions) -> None:
        """Start or stop tracking a request whose phase may have changed."""
        state = self._tracker.get(request_id)
        if state is None or state.phase is not Phase.ANSWER:
            self.on_removed(request_id)
        elif request_id not in self._answering:
            self._answering[request_id] = None
            if options.itl_s is not None:
                self._own_itl_s[request_id] = options.itl_s

    def on_removed(self, request_id: str) -> None:
        """Stop tracking a request; unknown ids are ignored."""
        self._answering.pop(request_id, None)
        self._own_itl_s.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._answering)

    def target_s(self, default_s: float) -> float:
        """The tightest inter-token latency requested; ``default_s`` if none is configured."""
        common_s = self._itl_s or default_s
        if not self._own_itl_s:
            return common_s
        have_all = len(self._own_itl_s) == len(self._answering)
        tightest_s = max(min(self._own_itl_s.values()), default_s)
        return tightest_s if have_all else min(common_s, tightest_s)
