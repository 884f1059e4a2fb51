"""Ends thoughts: forces a request to sample the tokens of the close sequence next.

Behind a close at an upper bound it also keeps the next thought from being opened.

The tokens are forced with the bit masks that vLLM applies for structured output (see
``GrammarOutput``), so the sampler, penalties, speculation and both model runners need no change.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import GrammarOutput

from meridian_patch.engine.early_exit.close_checks import CloseChecks, WrapUps
from meridian_patch.engine.early_exit.watched_request import Closing, WatchedRequest
from meridian_patch.engine.upstream import is_release
from meridian_patch.exit.actions import PASSING, Obstacle
from meridian_patch.exit.strategies.build import OWN_BOUNDS
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import LeftOut, PhaseCounters

# From this release on, every request has one row plus one for each draft that it may have.
_HAS_FIXED_ROWS = is_release("0.33")
# Mask word of a row that allows every token.
_FREE = -1


class ForcedCloses:
    """The requests whose thoughts are being closed.

    1. No token is forced while an earlier one is in flight, because it might be the boundary
       itself. Under asynchronous scheduling the request skips one step for that, and another one if
       it was preempted and resumed with drafts.
    2. From then on each step forces one token, without speculation.
    3. The forced token is derived from the request's known tokens and those in flight, so a
       preemption repeats no token. If a token differs from the forced one, the close starts again.
    4. No token is forced after the end of the thought. The last tokens of the thought may be the
       beginning of a boundary, so the thought may end before the end of the close sequence.
    5. A close that structured output would reject is given up, because vLLM ends a request whose
       grammar rejects a token. So is one behind which no token of an answer would fit.
    6. A wrap-up is said whole or not at all: it is left out if no answer token would fit behind it
       and the close, and when a close starts again.
    7. Behind a close at an upper bound a request is barred from opening another thought: its masks
       leave the start marker out until it ends. A marker of several tokens is not left out, because
       its first ones may be in flight when its last one is sampled; the thought that it opens is
       closed at once instead.

    Args:
        boundaries: boundaries of the served model.
        vocab_size: columns of the logits.
        num_spec_tokens: upper bound of drafts per step.
        max_model_len: upper bound of a request's tokens, prompt included.
        checks: checks whether a close would be undone.
        wrap_ups: chooses what a close says before the end marker.
        phase_counters: count the closes that are given up.

    Attributes:
        sequence: the tokens that a close forces; some of them may not be needed.
        checks: checks whether a close would be undone.
        skips_adapter: a request with a LoRA adapter skips the next step, so that no request must be
            admitted to it. Load-bearing: upstream counts only the adapters of the requests in a
            step. A newcomer with another adapter would take the slot of the request that skips the
            step, and an assertion would fail later.
    """

    def __init__(
        self,
        boundaries: Boundaries,
        vocab_size: int,
        num_spec_tokens: int,
        max_model_len: int,
        checks: CloseChecks,
        wrap_ups: WrapUps,
        phase_counters: PhaseCounters,
    ) -> None:
        self._matcher = BoundaryMatcher(boundaries)
        self._close = boundaries.close
        self.sequence = close_sequence(boundaries)
        self.checks = checks
        self._wrap_ups = wrap_ups
        self._counters = phase_counters
        self.skips_adapter = False
        self._words = (vocab_size + 31) // 32
        self._num_spec_tokens = num_spec_tokens
        self._max_model_len = max_model_len
        self._start_ids = [ids[0] for ids in boundaries.start if len(ids) == 1]
        # Requests that are being closed or are barred: the others need no mask.
        self._masked: dict[str, WatchedRequest] = {}

    def __len__(self) -> int:
        return len(self._masked)

    def begin(self, watched: WatchedRequest, reason: str) -> bool:
        """Start closing the thought of a request, unless something would undo the close.

        Args:
            watched: the request; it is not being closed.
            reason: the strategy that closes the thought.

        Returns:
            Whether the close began; if not, it was given up.
        """
        request, think_tokens = watched.request, watched.thought_tokens
        obstacle = self.checks.obstacle(request, think_tokens)
        if obstacle is not None:
            self._give_up(watched, obstacle)
            return False
        if watched.given_up is not None:
            known = watched.not_enforced
            watched.not_enforced = {each: why for each, why in known.items() if each != reason}
        text = watched.config.wrap_up
        ids = self._wrap_ups.choose(request, text, think_tokens) if text else ()
        watched.closing = Closing(wrap_up=ids, is_last=reason in OWN_BOUNDS)
        self._masked[watched.name] = watched
        return True

    def bar(self, watched: WatchedRequest) -> None:
        """Keep a request, whose thought ended, from opening another one."""
        if self._start_ids:
            watched.is_barred = True
            self._masked[watched.name] = watched

    def end(self, watched: WatchedRequest) -> None:
        """Stop closing, because the thought ended."""
        watched.closing = None
        if not watched.is_barred:
            self._masked.pop(watched.name, None)

    def forget(self, watched: WatchedRequest) -> None:
        """Forget a request that ended."""
        watched.is_barred = False
        self.end(watched)

    def arrange(self, current_step: int) -> None:
        """Prepare the requests being closed for the next step; call before it is scheduled.

        Args:
            current_step: number of the last step, as the scheduler counts.
        """
        self.skips_adapter = False
        for watched in self._masked.values():
            request, closing = watched.request, watched.closing
            if closing is None:
                continue
            # Drafts guess what the model would sample freely. Without them a step makes one token.
            request.spec_token_ids = []
            is_unsure = closing.begin is None or closing.has_drafts
            if is_unsure and _tokens_on_the_way(request):
                self.skips_adapter |= request.lora_request is not None
                # Load-bearing: upstream skips a running request whose number here is greater than
                # that of the step, and the next step's number is `current_step + 1`.
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, current_step + 2
                )

    def add_rows(self, output: Any, grammar: GrammarOutput | None) -> GrammarOutput | None:
        """The masks of a step that was just scheduled, with those of closed and barred requests.

        Args:
            output: vLLM's ``SchedulerOutput``.
            grammar: the masks of structured output; None: there are none.
        """
        drafts = output.scheduled_spec_decode_tokens
        rows = MaskRows(grammar, self._words, lambda name: self.rows_of(name, drafts))
        for name, watched in list(self._masked.items()):
            closing = watched.closing
            if closing is None or name not in output.num_scheduled_tokens:
                continue
            request, num_drafts = watched.request, len(drafts.get(name, ()))
            closing.has_drafts = num_drafts > 0
            scheduled = output.num_scheduled_tokens[name]
            tokens = self._next_tokens(request, closing, scheduled, num_drafts)
            obstacle = self._obstacle(request, closing, tokens) if tokens else None
            if obstacle is not None:
                self.end(watched)
                watched.was_refused()
                self._give_up(watched, obstacle)
            elif tokens:
                rows.force(name, tokens[0])
            elif closing.is_said and closing.is_last and self._start_ids:
                rows.forbid(name, self._start_ids)
        for name, watched in self._masked.items():
            # One mask is enough for a request whose thought is closed again.
            is_alone = watched.is_barred and watched.closing is None
            if not is_alone or name not in output.num_scheduled_tokens:
                continue
            # Load-bearing: a request whose known tokens are computed samples no token in the step.
            if not watched.request.is_prefill_chunk:
                rows.forbid(name, self._start_ids)
        return rows.output()

    def _give_up(self, watched: WatchedRequest, obstacle: Obstacle) -> None:
        """Record why a close cannot be carried out; each is counted once, however often tried."""
        if watched.given_up is None:
            self._counters.count(counters.EXIT_GIVEN_UP, obstacle)
        thought = watched.controller.thought
        verdict = None if thought is None else thought.verdict
        watched.given_up = verdict if obstacle in PASSING else None
        if verdict is not None:
            watched.cannot({verdict.reason: obstacle})

    def _next_tokens(
        self, request: Any, closing: Closing, num_scheduled: int, num_drafts: int
    ) -> TokenIds:
        """Return the tokens that are still to be forced, from this step's on; () for none.

        () also while the prompt is being computed, or an earlier sampled token is not back yet.
        Sets where ``closing`` begins the first time, and anew when a token differs from the forced
        one.

        Args:
            request: a request in the step.
            closing: its close; changed.
            num_scheduled: tokens of the request in the step.
            num_drafts: draft tokens of the request in the step. Load-bearing: a request that comes
                back with one token to compute keeps drafts that stand for no token.
        """
        closing.is_said = False
        # Load-bearing: True if known tokens remain uncomputed after the step, so it samples none.
        if request.is_prefill_chunk:
            return ()
        # Load-bearing: under asynchronous scheduling the placeholders include the step's own token
        # and its drafts.
        counted = request.num_output_placeholders - 1 - num_drafts
        on_the_way = max(min(counted, request.num_in_flight_tokens - num_scheduled), 0)
        if closing.begin is not None:
            came = tuple(request._output_token_ids[closing.begin :])
            if came != closing.sequence[: len(came)]:
                if came[: len(closing.wrap_up)] != closing.wrap_up:
                    self._wrap_ups.left_out(LeftOut.RESTART)
                closing.begin, closing.wrap_up = None, ()
        if closing.begin is None:
            if on_the_way or request.num_stale_output_tokens:
                return ()
            closing.begin = request.num_output_tokens
            state = self._matcher.state_after(request.all_token_ids)
            sequence = (*closing.wrap_up, *self._close)
            closing.sequence = _up_to_end(self._matcher, sequence, state)
            room = self._room(request)
            if closing.wrap_up and len(closing.sequence) >= room:
                self._wrap_ups.left_out(LeftOut.ROOM)
                closing.sequence = _up_to_end(self._matcher, self._close, state)
                closing.wrap_up = ()
            closing.has_room = len(closing.sequence) < room
        index = request.num_output_tokens + on_the_way - closing.begin
        closing.is_said = index >= len(closing.sequence)
        return closing.sequence[index:]

    def _obstacle(self, request: Any, closing: Closing, tokens: TokenIds) -> Obstacle | None:
        """Why these tokens, which are to be forced next, must not be; None: they may be."""
        if not closing.has_room:
            return Obstacle.NO_ROOM
        # Load-bearing: with structured output all earlier tokens are known when a step's masks are
        # computed, so the grammar's state is that of the token to sample.
        return None if self.checks.accepts(request, tokens) else Obstacle.GRAMMAR

    def _room(self, request: Any) -> int:
        """Number of tokens that a request may still sample, if none is on the way."""
        left = self._max_model_len - request.num_tokens
        return int(min(left, request.max_tokens - request.num_output_tokens))

    def rows_of(self, name: str, drafts: dict[str, list[int]]) -> int:
        """Number of mask rows that a request has in a step with these drafts, by request."""
        # Load-bearing: a row for the step's token, and one for each draft.
        if _HAS_FIXED_ROWS:
            return 1 + self._num_spec_tokens
        return 1 + len(drafts.get(name, ()))


def close_sequence(boundaries: Boundaries) -> TokenIds:
    """The tokens that a close without a wrap-up forces; some of them may not be needed."""
    return _up_to_end(BoundaryMatcher(boundaries), boundaries.close, ROOT)


def _up_to_end(matcher: BoundaryMatcher, sequence: TokenIds, state: int) -> TokenIds:
    """The tokens of a sequence up to the end of the thought, from a state of the matcher."""
    for index, token_id in enumerate(sequence):
        state, event = matcher.step(state, token_id)
        if event is Event.END:
            return sequence[: index + 1]
    return sequence


def _tokens_on_the_way(request: Any) -> int:
    # Load-bearing: the first is 0 under synchronous scheduling, and still counts the tokens of a
    # step whose KV load failed, which never arrive. The second counts all tokens in flight,
    # including those of prompts.
    return int(min(request.num_output_placeholders, request.num_in_flight_tokens))


class MaskRows:
    """Adds rows to the ``GrammarOutput`` of a step.

    Args:
        grammar: the masks of structured output, which stay as they are; None: there are none.
        words: mask words of a row, 32 tokens each, where there are none yet.
        rows_of: number of rows that a request has in the step, by its id.
    """

    def __init__(
        self, grammar: GrammarOutput | None, words: int, rows_of: Callable[[str], int]
    ) -> None:
        self._grammar = grammar
        self._rows_of = rows_of
        # Load-bearing: masks are as wide as the grammar's vocabulary, which may be wider than the
        # logits: Guidance uses the tokenizer's size if that is greater.
        self._words = words if grammar is None else grammar.grammar_bitmask.shape[1]
        self._names, self._acceptable = _parts(grammar)
        self._rows = None if grammar is None else grammar.grammar_bitmask.copy()
        self._added: list[NDArray[np.int32]] = []

    def force(self, name: str, token_id: int) -> None:
        """Leave a request one token to sample, without drafts."""
        mask = mask_of(token_id, self._words)
        place = self._place_of(name)
        if place is not None and self._rows is not None:
            # The row of structured output allows every token, or its grammar accepts this one.
            self._rows[place.start] = mask
            self._acceptable[self._names.index(name)] = 0
            return
        free = np.full((self._rows_of(name) - 1, self._words), _FREE, np.int32)
        self._add(name, np.concatenate((mask[None], free)), 0)

    def forbid(self, name: str, token_ids: Sequence[int]) -> None:
        """Take tokens out of what a request may sample, in all of its rows."""
        allowed = mask_without(token_ids, self._words)
        place = self._place_of(name)
        if place is not None and self._rows is not None:
            left = self._rows[place] & allowed
            # A grammar that accepts nothing else keeps its row.
            self._rows[place] = np.where(left.any(axis=1, keepdims=True), left, self._rows[place])
            return
        number = self._rows_of(name)
        self._add(name, np.tile(allowed, (number, 1)), number - 1)

    def output(self) -> GrammarOutput | None:
        """All masks of the step; None: there are none."""
        parts = self._added if self._rows is None else [self._rows, *self._added]
        if not parts:
            return None
        return GrammarOutput(self._names, np.concatenate(parts), self._acceptable)

    def _add(self, name: str, rows: NDArray[np.int32], acceptable: int) -> None:
        self._names.append(name)
        self._added.append(rows)
        # Load-bearing: number of drafts of a request that its rows were computed for.
        self._acceptable.append(acceptable)

    def _place_of(self, name: str) -> slice | None:
        """Rows of a request that structured output has; None: it has none."""
        given = () if self._grammar is None else self._grammar.structured_output_request_ids
        if name not in given:
            return None
        first = sum(self._rows_of(each) for each in given[: given.index(name)])
        return slice(first, first + self._rows_of(name))


def mask_of(token_id: int, words: int) -> NDArray[np.int32]:
    """Bit mask that allows one token, [words] of 32 tokens each, the first in the lowest bit."""
    mask = np.zeros(words, np.uint32)
    mask[token_id // 32] = 1 << (token_id % 32)
    return mask.view(np.int32)


def mask_without(token_ids: Sequence[int], words: int) -> NDArray[np.int32]:
    """Bit mask that allows all tokens but these, [words]."""
    mask = np.full(words, _FREE, np.int32)
    for token_id in token_ids:
        mask &= ~mask_of(token_id, words)
    return mask


def _parts(grammar: Any) -> tuple[list[str], list[int]]:
    if grammar is None:
        return [], []
    names = list(grammar.structured_output_request_ids)
    acceptable = grammar.num_acceptable_drafts
    return names, [0] * len(names) if acceptable is None else list(acceptable)
