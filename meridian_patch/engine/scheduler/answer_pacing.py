"""Tracks the requests that answer, and the inter-token latency that each should have."""

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.pacing import Reading, next_due_s


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
        # The start time of each answer, by request id.
        self._since_s: dict[str, float] = {}
        # Only these are searched for the tightest target, because few requests set one.
        self._own_itl_s: dict[str, float] = {}

    def changed(self, request_id: str, options: RequestOptions, now_s: float) -> None:
        """Start or stop tracking a request whose phase may have changed."""
        state = self._tracker.get(request_id)
        if state is None or state.phase is not Phase.ANSWER:
            self.on_removed(request_id)
        elif request_id not in self._since_s:
            self._since_s[request_id] = now_s
            if options.itl_s is not None:
                self._own_itl_s[request_id] = options.itl_s

    def on_removed(self, request_id: str) -> None:
        """Stop tracking a request; unknown ids are ignored."""
        self._since_s.pop(request_id, None)
        self._own_itl_s.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._since_s)

    def target_s(self, default_s: float) -> float:
        """The tightest inter-token latency requested; ``default_s`` if none is configured."""
        common_s = self._itl_s or default_s
        if not self._own_itl_s:
            return common_s
        have_all = len(self._own_itl_s) == len(self._since_s)
        tightest_s = max(min(self._own_itl_s.values()), default_s)
        return tightest_s if have_all else min(common_s, tightest_s)

    def due_s(self, default_s: float, now_s: float) -> float:
        """Seconds until the first reader needs a new token, at least that reader's target."""
        common_s = self._itl_s or default_s
        own_s = {name: max(itl_s, default_s) for name, itl_s in self._own_itl_s.items()}
        readings = (
            Reading(since_s, self._tokens(request_id), own_s.get(request_id, common_s))
            for request_id, since_s in self._since_s.items()
        )
        return next_due_s(readings, now_s) or default_s

    def _tokens(self, request_id: str) -> int:
        state = self._tracker.get(request_id)
        return state.tokens_in_phase if state else 0
