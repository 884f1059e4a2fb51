"""Ends thoughts: makes the next sampled tokens of a request those of the close sequence.

The tokens are forced by the bit masks that vLLM applies for structured output, so that sampler,
penalties, speculation and both model runners need not know. See ``GrammarOutput``.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import vllm
from numpy.typing import NDArray
from packaging.version import Version
from vllm.v1.core.sched.output import GrammarOutput

from meridian_patch.phase.boundaries import Boundaries, TokenIds
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event

if TYPE_CHECKING:
    from collections.abc import Callable

# Of a row that leaves every token free.
_FREE = -1
# From this release on, every request has as many rows as it may have drafts.
_HAS_FIXED_ROWS = Version(vllm.__version__).release >= (0, 33)


@dataclass(slots=True)
class _Closing:
    request: Any
    # Output index of the first forced token; None while a token is on the way that may end the
    # thought by itself.
    begin: int | None = None
    # What is forced from there on.
    sequence: TokenIds = ()
    # Whether the last step has drafts of the request: how many tokens it brings is not known then.
    has_drafts: bool = False


class ForcedCloses:
    """The requests whose thoughts are being closed.

    1. No token is forced while an earlier one is not known yet: it might be the boundary itself.
       Under asynchronous scheduling the request sits out one step for that, and another one when
       it was preempted and came back with drafts.
    2. From then on each step forces one token, and nothing is speculated.
    3. Which token is forced follows from the request's known tokens and those on the way, so that
       a preemption starts over exactly where it has to. Where another token came than the forced
       one, the close begins anew.
    4. Nothing is forced behind the end of the thought. What the thought says last may be the
       beginning of a boundary, which then ends within the close sequence.
    5. A close that structured output would reject is given up: vLLM ends a request whose grammar
       rejects a token.

    Args:
        boundaries: of the served model.
        vocab_size: columns of the logits.
        num_spec_tokens: drafts per step, at most.

    Attributes:
        sequence: tokens that a close forces, at most.
        accepts: whether a request's structured output accepts tokens next.
        gave_up: called with the id of each request whose close is given up.
    """

    def __init__(self, boundaries: Boundaries, vocab_size: int, num_spec_tokens: int) -> None:
        self._matcher = BoundaryMatcher(boundaries)
        self._close = boundaries.close
        self.sequence = self._up_to_end(ROOT)
        self.accepts: Callable[[Any, TokenIds], bool] = lambda _request, _token_ids: True
        self.gave_up: Callable[[str], None] = lambda _request_id: None
        self._words = (vocab_size + 31) // 32
        self._num_spec_tokens = num_spec_tokens
        self._closings: dict[str, _Closing] = {}

    def __len__(self) -> int:
        return len(self._closings)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._closings

    def begin(self, request: Any) -> None:
        """Close the thought that a request is in."""
        self._closings[request.request_id] = _Closing(request)

    def has_begun(self, request_id: str) -> bool:
        """Whether a token of the close sequence has been forced on a request."""
        closing = self._closings.get(request_id)
        return closing is not None and closing.begin is not None

    def end(self, request_id: str) -> None:
        """The thought has ended, or its request; unknown ids are fine."""
        self._closings.pop(request_id, None)

    def arrange(self, current_step: int) -> bool:
        """Before a step is scheduled.

        Args:
            current_step: number of the last step, as the scheduler counts.

        Returns:
            Whether a request with a LoRA adapter sits out the step. Then no request must be
            admitted to it. Load-bearing: upstream counts the adapters of the requests in a step,
            and fails by an assertion when they are more than it has slots for: a newcomer would
            take the slot of the one that sits out.
        """
        has_adapter = False
        for closing in self._closings.values():
            request = closing.request
            # Drafts are for what the model would say. Without them a step brings one token.
            request.spec_token_ids = []
            is_unsure = closing.begin is None or closing.has_drafts
            if is_unsure and _tokens_on_the_way(request):
                # Load-bearing: a running request with a greater number than the step's is left
                # out of the step; the step's number is one more than now.
                request.next_decode_eligible_step = max(
                    request.next_decode_eligible_step, current_step + 2
                )
                has_adapter |= request.lora_request is not None
        return has_adapter

    def add_rows(self, output: Any, grammar: GrammarOutput | None) -> GrammarOutput | None:
        """The masks of a step that was just scheduled, with those of the closings.

        Args:
            output: vLLM's ``SchedulerOutput``.
            grammar: the masks of structured output; None: there are none.
        """
        forced, drafts = {}, output.scheduled_spec_decode_tokens
        for name, closing in list(self._closings.items()):
            if name not in output.num_scheduled_tokens:
                continue
            num_drafts = len(drafts.get(name, ()))
            closing.has_drafts = num_drafts > 0
            tokens = self._next_tokens(closing, output.num_scheduled_tokens[name], num_drafts)
            # Load-bearing: with structured output all tokens are known when a step's masks are
            # asked for, so that the grammar stands where this step samples.
            if tokens and not self.accepts(closing.request, tokens):
                self.end(name)
                self.gave_up(name)
            elif tokens:
                forced[name] = tokens[0]
        if not forced:
            return grammar
        names, rows, acceptable = _parts(grammar, self._words)
        # Load-bearing: masks are as wide as the grammar's vocabulary, which may be wider than the
        # logits: Guidance counts the tokenizer's tokens where these are more.
        words = rows.shape[1]
        for name, token_id in forced.items():
            mask = mask_of(token_id, words)
            if name in names:
                # Structured output leaves its row free, or accepts the token.
                index = names.index(name)
                first = sum(self._rows_of(each, drafts) for each in names[:index])
                rows[first] = mask
                acceptable[index] = 0
                continue
            free = np.full((self._rows_of(name, drafts) - 1, words), _FREE, np.int32)
            names.append(name)
            rows = np.concatenate((rows, mask[None], free))
            acceptable.append(0)
        return GrammarOutput(names, rows, acceptable)

    def _next_tokens(self, closing: _Closing, num_scheduled: int, num_drafts: int) -> TokenIds:
        """What this step and the next ones must sample; nothing when this one samples freely.

        Args:
            closing: of a request in the step.
            num_scheduled: tokens of the request in the step.
            num_drafts: of the request in the step. Load-bearing: a request that comes back with
                one token to compute has drafts that stand for none.
        """
        request = closing.request
        # Load-bearing: True when the step leaves known tokens uncomputed, and samples none.
        if request.is_prefill_chunk:
            return ()
        # Load-bearing: under asynchronous scheduling the step's own token is counted already, and
        # its drafts.
        counted = request.num_output_placeholders - 1 - num_drafts
        on_the_way = max(min(counted, request.num_in_flight_tokens - num_scheduled), 0)
        if closing.begin is not None:
            came = tuple(request._output_token_ids[closing.begin :])
            if came != closing.sequence[: len(came)]:
                closing.begin = None
        if closing.begin is None:
            if on_the_way or request.num_stale_output_tokens:
                return ()
            closing.begin = request.num_output_tokens
            closing.sequence = self._up_to_end(self._matcher.state_after(request.all_token_ids))
        index = request.num_output_tokens + on_the_way - closing.begin
        return closing.sequence[index:]

    def _up_to_end(self, state: int) -> TokenIds:
        """The close sequence until it ends a thought; no token behind that is ours to choose."""
        for index, token_id in enumerate(self._close):
            state, event = self._matcher.step(state, token_id)
            if event is Event.END:
                return self._close[: index + 1]
        return self._close

    def _rows_of(self, name: str, drafts: dict[str, list[int]]) -> int:
        # Load-bearing: a row for the step's token, and one for each draft.
        if _HAS_FIXED_ROWS:
            return 1 + self._num_spec_tokens
        return 1 + len(drafts.get(name, ()))


def mask_of(token_id: int, words: int) -> NDArray[np.int32]:
    """Bit mask that allows one token, [words] of 32 tokens each, the first in the lowest bit."""
    mask = np.zeros(words, np.uint32)
    mask[token_id // 32] = 1 << (token_id % 32)
    return mask.view(np.int32)


def _tokens_on_the_way(request: Any) -> int:
    # Load-bearing: the first is 0 under synchronous scheduling, and keeps the tokens of a step
    # whose KV load failed, which never come. The second is all that is not back, prompts included.
    return int(min(request.num_output_placeholders, request.num_in_flight_tokens))


def _parts(
    grammar: GrammarOutput | None, words: int
) -> tuple[list[str], NDArray[np.int32], list[int]]:
    if grammar is None:
        return [], np.empty((0, words), np.int32), []
    names = list(grammar.structured_output_request_ids)
    acceptable = grammar.num_acceptable_drafts
    return (
        names,
        grammar.grammar_bitmask.copy(),
        [0] * len(names) if acceptable is None else list(acceptable),
    )
