"""Chooses the sentence that a forced close says before the end marker, per request."""

from functools import lru_cache
from typing import Any

from vllm.logger import init_logger

from meridian_patch.config.request_options import stop_scope
from meridian_patch.engine.early_exit.close_checks import CloseChecks
from meridian_patch.errors import ConfigError
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.sequences import Vocabulary
from meridian_patch.phase.wrap_up import wrap_up_ids
from meridian_patch.telemetry.counters import WRAP_UP_LEFT_OUT, LeftOut, PhaseCounters

logger = init_logger("vllm.meridian_patch")

# Different texts of requests that are kept as tokens.
_KEPT_TEXTS = 64


class WrapUps:
    """The wrap-ups of one engine's requests, in tokens.

    Args:
        vocabulary: the served tokenizer's.
        boundaries: of the served model.
        checks: checks whether a close would be undone.
        default_scope: ``requests.stop_scope``.
        counters: counts the wrap-ups that are left out.

    Attributes:
        ids_of: tokens of a wrap-up's text; empty where it cannot be said.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        boundaries: Boundaries,
        checks: CloseChecks,
        default_scope: str,
        counters: PhaseCounters,
    ) -> None:
        self._checks = checks
        self._default_scope = default_scope
        self._counters = counters
        self._close_text = vocabulary.decode(list(boundaries.close))

        @lru_cache(_KEPT_TEXTS)
        def ids_of(text: str) -> TokenIds:
            try:
                return wrap_up_ids(text, vocabulary, boundaries)
            except ConfigError as error:
                # The API server refuses such a request; this one came past it.
                logger.warning("meridian_patch: wrap-up %.80r is left out: %s", text, error)
                return ()

        self.ids_of = ids_of

    def choose(self, request: Any, text: str, think_tokens: int) -> TokenIds:
        """Tokens of a request's wrap-up; none if they would end the request, or be undone.

        Those that are left out are counted.

        Args:
            request: the request whose thought is to be closed.
            text: its wrap-up.
            think_tokens: known tokens of its thought.
        """
        ids = self.ids_of(text)
        why = self._obstacle(request, text, ids, think_tokens)
        if why is None:
            return ids
        self.left_out(why)
        return ()

    def left_out(self, why: LeftOut) -> None:
        """Count a close without its wrap-up."""
        self._counters.count(WRAP_UP_LEFT_OUT, why)

    def _obstacle(
        self, request: Any, text: str, ids: TokenIds, think_tokens: int
    ) -> LeftOut | None:
        if not ids:
            return LeftOut.TEXT
        sampling = request.sampling_params
        # Load-bearing: the request ends at such a token in its thought, too.
        if not sampling.all_stop_token_ids.isdisjoint(ids):
            return LeftOut.STOP
        is_everywhere = stop_scope(sampling.extra_args, self._default_scope) == "all"
        if is_everywhere and any(self._may_complete(text, each) for each in sampling.stop or ()):
            return LeftOut.STOP
        return LeftOut.UNDONE if self._checks.obstacle(request, think_tokens, ids) else None

    def _may_complete(self, text: str, stop: str) -> bool:
        """Whether a stop string may match once the text and the close are said.

        It may begin in the thought before them: that one mostly ends with a line.
        """
        ends = (stop[begin:] for begin in range(1, len(stop)))
        return stop in text + self._close_text or text.startswith(tuple(ends))
