"""Ends thoughts: forces a request to sample the tokens of the close sequence next.

Behind a close at an upper bound it also keeps the next thought from being opened.

The tokens are forced with the bit masks that vLLM applies for structured output (see
``GrammarOutput``), so the sampler, penalties, speculation and both model runners need no change.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.output import GrammarOutput

from meridian_patch.engine.early_exit.mask_rows import MaskRows
from meridian_patch.engine.upstream import is_release
from meridian_patch.exit.actions import Obstacle
from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event
from meridian_patch.telemetry.counters import LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable

# From this release on, every request has one row plus one for each draft that it may have.
_HAS_FIXED_ROWS = is_release("0.33")


@dataclass(slots=True)
class _Closing:
    request: Any
    # Output index of the first forced token; None while a token is in flight that may end the
    # thought by itself.
    begin: int | None = None
    # The tokens that are forced from `begin` on.
    sequence: TokenIds = ()
    # Tokens to say before the close sequence; empty for a close that starts again.
    wrap_up: TokenIds = ()
    # Whether the request has drafts in the last step: the number of its new tokens is unknown then.
    has_drafts: bool = False
    # Whether a token of an answer fits behind the sequence.
    has_room: bool = True
    # Whether no thought may open again behind the close.
    is_last: bool = False
    # Whether all tokens of the close are known or in flight.
    is_said: bool = False


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

    Attributes:
        sequence: the tokens that a close forces; some of them may not be needed.
        accepts: whether a request's structured output accepts the given tokens next.
        choose_wrap_up: tokens of a request's wrap-up, given its text and the thought's length.
        gave_up: called with the id of each request whose close is given up, and why.
        left_out: called with the reason for which a chosen wrap-up is not said after all.
        skips_adapter: a request with a LoRA adapter skips the next step, so that no request must be
            admitted to it. Load-bearing: upstream counts only the adapters of the requests in a
            step. A newcomer with another adapter would take the slot of the request that skips the
            step, and an assertion would fail later.
    """

    def __init__(
        self, boundaries: Boundaries, vocab_size: int, num_spec_tokens: int, max_model_len: int
    ) -> None:
        self._matcher = BoundaryMatcher(boundaries)
        self._close = boundaries.close
        self.sequence = self._up_to_end(ROOT)
        self.accepts: Callable[[Any, TokenIds], bool] = lambda _request, _token_ids: True
        self.choose_wrap_up: Callable[[Any, str, int], TokenIds] = lambda *_: ()
        self.gave_up: Callable[[str, Obstacle], None] = lambda *_: None
        self.left_out: Callable[[LeftOut], None] = lambda _reason: None
        self.skips_adapter = False
        self._words = (vocab_size + 31) // 32
        self._num_spec_tokens = num_spec_tokens
        self._max_model_len = max_model_len
        self._start_ids = [ids[0] for ids in boundaries.start if len(ids) == 1]
        self._closings: dict[str, _Closing] = {}
        self._barred: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self._closings) + len(self._barred)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._closings

    def begin(
        self, request: Any, wrap_up: str = "", think_tokens: int = 0, *, is_last: bool = False
    ) -> None:
        """Start closing the thought of a request.

        Args:
            request: the request.
            wrap_up: what to say before the end marker; empty: nothing.
            think_tokens: known tokens of the thought.
            is_last: whether no thought may open again behind the close.
        """
        ids = self.choose_wrap_up(request, wrap_up, think_tokens) if wrap_up else ()
        self._closings[request.request_id] = _Closing(request, wrap_up=ids, is_last=is_last)

    def bar(self, request: Any) -> None:
        """Keep a request, whose thought ended, from opening another one."""
        if self._start_ids:
            self._barred[request.request_id] = request

    def has_begun(self, request_id: str) -> bool:
        """Whether a token of the close sequence has been forced on a request."""
        closing = self._closings.get(request_id)
        return closing is not None and closing.begin is not None

    def forced_on(self, request_id: str) -> tuple[int, ...]:
        """Indices in a request's output of the known tokens that its close forced."""
        closing = self._closings.get(request_id)
        if closing is None or closing.begin is None:
            return ()
        end = closing.begin + len(closing.sequence)
        return tuple(range(closing.begin, min(end, closing.request.num_output_tokens)))

    def end(self, request_id: str) -> None:
        """Stop closing, because the thought ended; unknown ids are ignored."""
        self._closings.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are ignored."""
        self.end(request_id)
        self._barred.pop(request_id, None)

    def arrange(self, current_step: int) -> None:
        """Prepare the requests being closed for the next step; call before it is scheduled.

        Args:
            current_step: number of the last step, as the scheduler counts.
        """
        self.skips_adapter = False
        for closing in self._closings.values():
            request = closing.request
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
        for name, closing in list(self._closings.items()):
            if name not in output.num_scheduled_tokens:
                continue
            num_drafts = len(drafts.get(name, ()))
            closing.has_drafts = num_drafts > 0
            tokens = self._next_tokens(closing, output.num_scheduled_tokens[name], num_drafts)
            obstacle = self._obstacle(closing, tokens) if tokens else None
            if obstacle is not None:
                self.end(name)
                self.gave_up(name, obstacle)
            elif tokens:
                rows.force(name, tokens[0])
            elif closing.is_said and closing.is_last and self._start_ids:
                rows.forbid(name, self._start_ids)
        for name, request in self._barred.items():
            # Load-bearing: a request whose known tokens are computed samples no token in the step.
            samples = name in output.num_scheduled_tokens and not request.is_prefill_chunk
            # One mask is enough for a request whose thought is closed again.
            if samples and name not in self._closings:
                rows.forbid(name, self._start_ids)
        return rows.output()

    def _next_tokens(self, closing: _Closing, num_scheduled: int, num_drafts: int) -> TokenIds:
        """Return the tokens that are still to be forced, from this step's on; () for none.

        None while the prompt is being computed, or while an earlier sampled token is not back yet.
        Sets where ``closing`` begins the first time, and anew when a token differs from the forced
        one.

        Args:
            closing: of a request in the step; changed.
            num_scheduled: tokens of the request in the step.
            num_drafts: draft tokens of the request in the step. Load-bearing: a request that comes
                back with one token to compute keeps drafts that stand for no token.
        """
        request, closing.is_said = closing.request, False
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
                    self.left_out(LeftOut.RESTART)
                closing.begin, closing.wrap_up = None, ()
        if closing.begin is None:
            if on_the_way or request.num_stale_output_tokens:
                return ()
            closing.begin = request.num_output_tokens
            state = self._matcher.state_after(request.all_token_ids)
            closing.sequence = self._up_to_end(state, closing.wrap_up)
            room = self._room(request)
            if closing.wrap_up and len(closing.sequence) >= room:
                self.left_out(LeftOut.ROOM)
                closing.sequence, closing.wrap_up = self._up_to_end(state), ()
            closing.has_room = len(closing.sequence) < room
        index = request.num_output_tokens + on_the_way - closing.begin
        closing.is_said = index >= len(closing.sequence)
        return closing.sequence[index:]

    def _obstacle(self, closing: _Closing, tokens: TokenIds) -> Obstacle | None:
        """Why these tokens, which are to be forced next, must not be; None: they may be."""
        if not closing.has_room:
            return Obstacle.NO_ROOM
        # Load-bearing: with structured output all earlier tokens are known when a step's masks are
        # computed, so the grammar's state is that of the token to sample.
        return None if self.accepts(closing.request, tokens) else Obstacle.GRAMMAR

    def _up_to_end(self, state: int, wrap_up: TokenIds = ()) -> TokenIds:
        """Wrap-up and close sequence up to the end of the thought, from a state of the matcher."""
        sequence = (*wrap_up, *self._close)
        for index, token_id in enumerate(sequence):
            state, event = self._matcher.step(state, token_id)
            if event is Event.END:
                return sequence[: index + 1]
        return sequence

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


def _tokens_on_the_way(request: Any) -> int:
    # Load-bearing: the first is 0 under synchronous scheduling, and still counts the tokens of a
    # step whose KV load failed, which never arrive. The second counts all tokens in flight,
    # including those of prompts.
    return int(min(request.num_output_placeholders, request.num_in_flight_tokens))
