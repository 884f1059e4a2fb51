"""Keeps when a request's thoughts and answers began and ended, for its trace."""

from dataclasses import dataclass

from meridian_patch.phase.progress import ANSWER, THINK, PhaseProgress

MOST_SPANS = 32
"""Spans that are kept of one request; later ones are left out."""


@dataclass(slots=True)
class PhaseSpan:
    """One thought or one answer.

    Attributes:
        place: ``THINK`` or ``ANSWER``.
        begin_s: when its first token came, in seconds since the epoch.
        begin_token: index of that token in the output.
        end_s: when its last token came; for a thought, the last one of its end boundary.
        end_token: index behind that token.
        is_ended: whether the next phase ended it, and not the end of the request.
        preemptions: how often the request was preempted within.
    """

    place: int
    begin_s: float
    begin_token: int
    end_s: float
    end_token: int
    preemptions: int
    is_ended: bool = False


class PhaseLog:
    """The thoughts and answers of one request, in their order."""

    def __init__(self) -> None:
        self.spans: list[PhaseSpan] = []
        self._open: PhaseSpan | None = None

    def note(self, progress: PhaseProgress, now_s: float, preemptions: int) -> None:
        """Take in the phase after a step that may have changed it.

        Args:
            progress: the request's, after the step.
            now_s: when the step's tokens came, in seconds since the epoch.
            preemptions: of the request so far.
        """
        place, begin = progress.place, progress.phase_begin
        if self._open is not None and (place, begin) != (self._open.place, self._open.begin_token):
            # Of a phase that is not known any more, the end is not known either.
            self._close(now_s, begin, preemptions, is_ended=place is not None)
        if self._open is None and place in (THINK, ANSWER) and len(self.spans) < MOST_SPANS:
            # Preemptions so far, until the span is closed.
            self._open = PhaseSpan(place, now_s, begin, now_s, begin, preemptions)

    def end(self, progress: PhaseProgress, now_s: float, preemptions: int) -> list[PhaseSpan]:
        """All spans of a request that ended, the last one up to now; to be called once."""
        if self._open is not None:
            self._close(now_s, progress.num_tokens, preemptions, is_ended=False)
        return self.spans

    def _close(self, now_s: float, end_token: int, preemptions: int, *, is_ended: bool) -> None:
        span, self._open = self._open, None
        assert span is not None
        span.end_s, span.end_token, span.is_ended = now_s, end_token, is_ended
        span.preemptions = preemptions - span.preemptions
        self.spans.append(span)
