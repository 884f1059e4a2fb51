"""What a close of a thought must regard: what would undo it, what it says, and its answer's room.

The plug-in's masks are applied to the logits first. This table lists everything that both model
runners apply after them, and its effect on the one token that a mask leaves:

=====================  ============================================================================
structured output      shares the mask's row; a token that its grammar rejects ends the request
                       with an error, so the grammar is asked first
allowed_token_ids      removes all other tokens: refused if a token of the close is not allowed
bad_words              removes the last token of a word: refused if the close contains it
logit_bias             adds to logits: a finite bias neither raises a masked token nor removes the
                       forced one; refused if a bias is not finite
min_tokens             removes stop tokens up to a length: refused if the close contains one
custom processors      unknown effect: refused
penalties, min_p,      keep the one token: penalties add and scale finite numbers, the others
top_k, top_p           keep the most probable token
thinking_token_budget  forces vLLM's own close: refused right before it, and if vLLM would not
                       recognize the close as an end
trace replay           replaces the sampled tokens: refused
=====================  ============================================================================
"""

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Any

from vllm.logger import init_logger

from meridian_patch.config.request_options import stop_scope
from meridian_patch.config.schema import ExitConfig
from meridian_patch.errors import ConfigError
from meridian_patch.exit.actions import Obstacle
from meridian_patch.exit.lag import Lag
from meridian_patch.exit.strategies.answer_reserve import thought_room
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.sequences import Vocabulary
from meridian_patch.phase.wrap_up import wrap_up_ids
from meridian_patch.telemetry.counters import WRAP_UP_LEFT_OUT, LeftOut, PhaseCounters

logger = init_logger("vllm.meridian_patch")

_PROCESSORS_GROUP = "vllm.logits_processors"
# Different texts of requests that are kept as tokens.
_KEPT_TEXTS = 64


class CloseChecks:
    """Checks the closes of one engine.

    Args:
        scheduler: the phase-aware scheduler.
        sequence: tokens that a close without a wrap-up forces.
    """

    def __init__(self, scheduler: Any, sequence: TokenIds) -> None:
        config = scheduler.vllm_config
        self._manager = scheduler.structured_output_manager
        self._sequence = sequence
        self._tokens_per_step = 1 + scheduler.num_spec_tokens
        self.has_processors = _has_processors(config, is_v2=scheduler.use_v2_model_runner)
        self._is_end_known = _knows_end(
            config.reasoning_config, sequence, is_v2=scheduler.use_v2_model_runner
        )

    def obstacle(self, request: Any, think_tokens: int, wrap_up: TokenIds = ()) -> Obstacle | None:
        """The first obstacle to closing this request's thought now; None: there is none.

        Args:
            request: the request whose thought is to be closed.
            think_tokens: known tokens of its thought behind the start marker.
            wrap_up: tokens to be forced before the close sequence.
        """
        return next(self._obstacles(request, think_tokens, (*wrap_up, *self._sequence)), None)

    def _obstacles(self, request: Any, think_tokens: int, sequence: TokenIds) -> Iterator[Obstacle]:
        sampling, close = request.sampling_params, set(sequence)
        if self.has_processors:
            yield Obstacle.LOGITS_PROCESSORS
        if sampling.trace_decode_token_ids:
            yield Obstacle.TRACE_REPLAY
        if sampling.allowed_token_ids and not close <= set(sampling.allowed_token_ids):
            yield Obstacle.ALLOWED_TOKENS
        # Load-bearing: vLLM masks the last token of a bad word.
        if not close.isdisjoint(ids[-1] for ids in sampling.bad_words_token_ids or () if ids):
            yield Obstacle.BAD_WORDS
        # Load-bearing: biases are added to the masked logits.
        if not all(map(math.isfinite, (sampling.logit_bias or {}).values())):
            yield Obstacle.LOGIT_BIAS
        # Load-bearing: vLLM masks all stop tokens until the request has `min_tokens`.
        is_short = request.num_output_tokens < sampling.min_tokens
        if is_short and not close.isdisjoint(sampling.all_stop_token_ids):
            yield Obstacle.MIN_TOKENS
        if self._meets_budget(request, think_tokens, len(sequence)):
            yield Obstacle.BUDGET
        if not self.accepts(request, sequence):
            yield Obstacle.GRAMMAR

    def accepts(self, request: Any, token_ids: TokenIds) -> bool:
        """Whether the request's grammar, if one binds it now, accepts these tokens next."""
        structured = request.structured_output_request
        if structured is None or not request.use_structured_output:
            return True
        # Load-bearing: 0 if the grammar applies to the next token; greater within a thought that
        # the grammar does not constrain.
        if self._manager._get_constraint_bounds(request, ()).constraint_start:
            return True
        grammar = structured.grammar
        # Load-bearing: returns the longest prefix that the grammar accepts; its state is unchanged.
        return not grammar.is_terminated() and (
            list(grammar.validate_tokens(list(token_ids))) == list(token_ids)
        )

    def _meets_budget(self, request: Any, think_tokens: int, num_forced: int) -> bool:
        """Whether vLLM would force its own close during or after the plug-in's."""
        budget = budget_tokens(request)
        if budget is None:
            return False
        # Load-bearing: up to this many tokens may come before the first forced one. vLLM forces its
        # close at its budget, and keeps counting if it does not recognize the plug-in's close as
        # the end of the thought.
        in_flight = 1 + self._tokens_per_step
        left = budget - think_tokens
        return not self._is_end_known or left <= num_forced + in_flight


def budget_tokens(request: Any) -> int | None:
    """The request's ``thinking_token_budget``, which vLLM itself enforces; None: it has none."""
    budget = getattr(request.sampling_params, "thinking_token_budget", None)
    # Load-bearing: -1 means no budget in vLLM.
    return None if budget is None or budget < 0 else budget


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


class AnswerRoom:
    """Computes how many tokens a request may have before its thought must be closed.

    Args:
        scheduler: the phase-aware scheduler.
        sequence: tokens that a close without a wrap-up forces.
        ids_of: tokens of a wrap-up's text.
    """

    def __init__(
        self, scheduler: Any, sequence: TokenIds, ids_of: Callable[[str], TokenIds]
    ) -> None:
        self._ids_of = ids_of
        self._max_model_len = scheduler.max_model_len
        per_step = 1 + scheduler.num_spec_tokens
        # A step may take a thought past the bound by its drafts, and the steps in flight are not
        # called back.
        in_flight = lag_of(scheduler, 1).tokens_at_close(0) * per_step
        self._close_tokens = len(sequence) + in_flight + scheduler.num_spec_tokens

    def closes_by(self, request: Any, config: ExitConfig) -> int | None:
        """Known tokens, prompt included, behind which a close must begin; None: no reserve."""
        if config.answer_reserve is None:
            return None
        given = request.num_prompt_tokens
        # Load-bearing: upstream ends a request at the first of these.
        most = min(request.max_tokens, self._max_model_len - given)
        wrap_up = self._ids_of(config.wrap_up) if config.wrap_up else ()
        room = thought_room(config.answer_reserve, most, self._close_tokens + len(wrap_up))
        return int(given + room)


def pace_of(scheduler: Any) -> dict[str, int]:
    """The fields of ``Lag`` that depend on the engine, for stock's scheduler or the plug-in's."""
    config = scheduler.vllm_config
    # Load-bearing: so many steps are scheduled before the first one's output is processed.
    batches = int(config.max_concurrent_batches)
    # Load-bearing: under asynchronous scheduling a request is in every step, or in one of
    # `decode_stagger` steps with pipeline parallelism. Otherwise its token must be known before it
    # is scheduled again.
    stride = getattr(scheduler, "decode_stagger", batches)
    return {
        "batches_in_flight": batches,
        "stride_steps": int(stride),
        "block_tokens": int(scheduler.block_size),
    }


def lag_of(scheduler: Any, probe_every_steps: int) -> Lag:
    """How late a close is in this engine."""
    return Lag(**pace_of(scheduler), probe_every_steps=probe_every_steps)


def _has_processors(config: Any, *, is_v2: bool) -> bool:
    if config.model_config.logits_processors:
        return True
    # Load-bearing: with speculation, V1 does not load processors from entry points.
    is_used = is_v2 or config.speculative_config is None
    return is_used and bool(entry_points(group=_PROCESSORS_GROUP))


def _knows_end(reasoning: Any, sequence: TokenIds, *, is_v2: bool) -> bool:
    """Whether vLLM's budget recognizes the forced close as the end of the thought."""
    if reasoning is None:
        return True
    # Load-bearing: V1 searches for the tokens that it would force itself, V2 for the parser's.
    end = reasoning.natural_reasoning_end_token_ids if is_v2 else reasoning.reasoning_end_token_ids
    return not end or tuple(end) == sequence[-len(end) :]
