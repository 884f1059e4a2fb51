"""When a thought is due for a probe."""

from collections.abc import Sequence

from meridian_patch.exit.breaks import Breaks


class ProbeSchedule:
    """Probes at paragraph ends, neither too often nor too rarely.

    1. A paragraph's end is due when the last due point is at least ``min_gap_tokens`` back.
    2. Any token is due when it is ``max_gap_tokens`` back.

    Args:
        think_tokens: that the thought has already.
    """

    def __init__(
        self, min_gap_tokens: int, max_gap_tokens: int, breaks: Breaks, think_tokens: int = 0
    ) -> None:
        self._min_gap_tokens = min_gap_tokens
        self._max_gap_tokens = max_gap_tokens
        self._breaks = breaks
        self._seen = think_tokens
        # Think tokens at the last due point, at first of the thought's begin.
        self._last = think_tokens
        self._is_line_end = False

    @property
    def due_by(self) -> int:
        """Think tokens at which a probe is due in any case."""
        return self._last + self._max_gap_tokens

    @property
    def due_from(self) -> int:
        """Think tokens at which a probe may be due, at a paragraph's end."""
        return min(self._last + self._min_gap_tokens, self.due_by)

    def accept(self, token_ids: Sequence[int]) -> int | None:
        """Take in the thought's next tokens.

        Returns:
            Think tokens at the due point; the last one when there are several.
        """
        before, due = self._seen, None
        self._seen += len(token_ids)
        for end in (*self._paragraph_ends(token_ids, before), None):
            while (end or self._seen) >= self.due_by:
                due = self._last = self.due_by
            if end is not None and end - self._last >= self._min_gap_tokens:
                due = self._last = end
        if token_ids:
            self._is_line_end = token_ids[-1] in self._breaks.line
        return due

    def _paragraph_ends(self, token_ids: Sequence[int], before: int) -> list[int]:
        """Think tokens at the end of each paragraph."""
        paragraph, newline, line = (
            self._breaks.paragraph,
            self._breaks.newline,
            self._breaks.line,
        )
        if paragraph.isdisjoint(token_ids) and newline.isdisjoint(token_ids):
            return []
        return [
            before + index + 1
            for index, token_id in enumerate(token_ids)
            if token_id in paragraph
            or (
                token_id in newline
                and (token_ids[index - 1] in line if index else self._is_line_end)
            )
        ]
