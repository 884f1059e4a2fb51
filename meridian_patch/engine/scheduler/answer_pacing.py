"""Who reads an answer, and what inter-token latency each of them is to see."""

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.policy.pacing import Reading, next_due_s


class AnswerPacing:
    """The answers under way.

    A request's own target counts down to the default, which is what the policy keeps when nothing
    is asked for. No step could keep a lower one: it would only hold prefill back.

    Args:
        itl_s: the configured inter-token latency; None where it follows the step time.
    """

    def __init__(self, tracker: PhaseTracker, itl_s: float | None) -> None:
        self._tracker = tracker
        self._itl_s = itl_s
        # When each answer began, by request id.
        self._since_s: dict[str, float] = {}
        # Requests with a target of their own are few: the tightest is sought among them alone.
        self._own_itl_s: dict[str, float] = {}

    def changed(self, request_id: str, options: RequestOptions, now_s: float) -> None:
        """The request's phase may have changed."""
        state = self._tracker.get(request_id)
        if state is None or state.phase is not Phase.ANSWER:
            self.left(request_id)
        elif request_id not in self._since_s:
            self._since_s[request_id] = now_s
            if options.itl_s is not None:
                self._own_itl_s[request_id] = options.itl_s

    def left(self, request_id: str) -> None:
        """The request is gone; unknown ones are fine."""
        self._since_s.pop(request_id, None)
        self._own_itl_s.pop(request_id, None)

    def __len__(self) -> int:
        return len(self._since_s)

    def target_s(self, default_s: float) -> float:
        """The tightest inter-token latency asked for; ``default_s`` where nothing is configured."""
        common_s = self._itl_s or default_s
        if not self._own_itl_s:
            return common_s
        have_all = len(self._own_itl_s) == len(self._since_s)
        tightest_s = max(min(self._own_itl_s.values()), default_s)
        return tightest_s if have_all else min(common_s, tightest_s)

    def due_s(self, default_s: float, now_s: float) -> float:
        """Seconds until somebody has read all there is; not below ``target_s``'s value."""
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
