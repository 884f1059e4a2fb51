"""Measures how fast a KV tier loads, and how much of a recompute a reload saves."""

# Busy seconds after which older loads count half.
_MEMORY_S = 10.0


class ReloadRate:
    """Tokens per second that a tier loads, while it loads at all.

    Loads overlap, so the time that counts is the time in which any load is under way. It includes
    what a scheduler sees of a load: waiting for the end of a step.
    """

    def __init__(self) -> None:
        # Tokens of the loads under way.
        self._loading: dict[str, int] = {}
        self._since_s = 0.0
        self._busy_s = self._tokens = 0.0

    def started(self, name: str, tokens: int, now_s: float) -> None:
        """Note that the load of a request's tokens begins."""
        self._advance(now_s)
        self._loading[name] = tokens

    def ended(self, name: str, now_s: float, *, is_loaded: bool) -> bool:
        """Note that a load ended; the tokens of one that failed do not count.

        Returns:
            Whether the load was under way.
        """
        self._advance(now_s)
        tokens = self._loading.pop(name, None)
        if tokens is not None and is_loaded:
            self._tokens += tokens
        return tokens is not None

    @property
    def seconds_per_token(self) -> float | None:
        """None before a load ended."""
        return self._busy_s / self._tokens if self._tokens else None

    def _advance(self, now_s: float) -> None:
        if self._loading:
            self._busy_s += now_s - self._since_s
        self._since_s = now_s
        if self._busy_s > _MEMORY_S:
            self._busy_s /= 2
            self._tokens /= 2


def saved_share(recompute_s: float | None, reload_s: float | None) -> float:
    """Share of a recompute that a reload of the same tokens saves, 0 to 1.

    Bringing a request back costs the lesser of the two.

    Args:
        recompute_s: time to compute the tokens; None: not known yet.
        reload_s: time to load them; None: not known yet. Then a reload counts as free.
    """
    if recompute_s is None or reload_s is None:
        return 1.0
    if recompute_s <= 0:
        return 0.0
    return max(0.0, 1.0 - reload_s / recompute_s)
