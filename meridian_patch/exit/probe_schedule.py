"""Decides at which tokens a thought is due for a probe."""

from collections.abc import Iterator, Sequence

from meridian_patch.exit.text_breaks import Breaks


class ProbeSchedule:
    """Schedules probes at ends of paragraphs, with a least and a greatest distance.

    1. The end of a paragraph is due if the last due point is at least ``min_gap_tokens`` back.
    2. Any token is due if the last due point is ``max_gap_tokens`` back.

    Args:
        min_gap_tokens: least distance, in tokens.
        max_gap_tokens: greatest distance, in tokens.
        breaks: text breaks of the served vocabulary.
        think_tokens: number of tokens that the thought has already.
    """

    def __init__(
        self, min_gap_tokens: int, max_gap_tokens: int, breaks: Breaks, think_tokens: int = 0
    ) -> None:
        self._min_gap_tokens = min_gap_tokens
        self._max_gap_tokens = max_gap_tokens
        self._breaks = breaks
        self._seen = think_tokens
        # Think tokens at the last due point; initially at the beginning of the thought.
        self._last = think_tokens
        self._last_token: int | None = None

    @property
    def due_by(self) -> int:
        """Think tokens at which a probe is due at any token."""
        return self._last + self._max_gap_tokens

    @property
    def due_from(self) -> int:
        """Think tokens from which on a probe is due at the end of a paragraph."""
        return min(self._last + self._min_gap_tokens, self.due_by)

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Process the thought's next tokens.

        Returns:
            Think tokens at the last due point among them; None if there is none.
        """
        before, due = self._seen, None
        self._seen += len(token_ids)
        for end in (*self._paragraph_ends(token_ids, before), None):
            while (end or self._seen) >= self.due_by:
                due = self._last = self.due_by
            if end is not None and end - self._last >= self._min_gap_tokens:
                due = self._last = end
        if token_ids:
            self._last_token = token_ids[-1]
        return due

    def is_paragraph_end_in(self, token_ids: Sequence[int], number: int) -> bool:
        """Whether a paragraph ends in the last ``number`` of these unprocessed tokens."""
        first = len(token_ids) - number
        last_token = token_ids[first - 1] if first else self._last_token
        pairs = _with_predecessors(token_ids[first:], last_token)
        return any(self._breaks.ends_paragraph(*pair) for pair in pairs)

    def _paragraph_ends(self, token_ids: Sequence[int], before: int) -> list[int]:
        """Think tokens at the end of each paragraph."""
        breaks = self._breaks
        if breaks.paragraph.isdisjoint(token_ids) and breaks.newline.isdisjoint(token_ids):
            return []
        pairs = _with_predecessors(token_ids, self._last_token)
        return [
            before + number
            for number, pair in enumerate(pairs, start=1)
            if breaks.ends_paragraph(*pair)
        ]


def _with_predecessors(
    token_ids: Sequence[int], before: int | None
) -> Iterator[tuple[int, int | None]]:
    return zip(token_ids, (before, *token_ids), strict=False)
