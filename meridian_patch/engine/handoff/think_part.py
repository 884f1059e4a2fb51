"""Ends requests on a think engine one token after their thought, with their KV cache kept.

The last token that an engine samples is never computed. So a request that is to be handed off
goes on for one token after its boundary; that token is discarded, and the answer engine samples
it again from the KV cache that it was sent. Drafts that were accepted behind the boundary are held
back until it is known whether the request moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.request import RequestStatus

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine import wire
from meridian_patch.engine.handoff.fabrics import fabric_of
from meridian_patch.engine.handoff.grammars import binds_thoughts, go_on_in_answer
from meridian_patch.engine.handoff.layout import Reasons, is_mapping, layout_of
from meridian_patch.engine.handoff.lora_weights import AdapterWeights, Loaded
from meridian_patch.engine.scheduler.parts import SchedulerPart
from meridian_patch.handoff.stays import why_it_stays
from meridian_patch.handoff.ticket import NOT_KNOWN, Facts
from meridian_patch.phase.tracker import Phase, PhaseTracker
from meridian_patch.telemetry import counters


@dataclass(slots=True)
class _Move:
    request: Any
    # Tokens up to the boundary, prompt included, and those known when it was seen: drafts may have
    # been accepted behind it.
    num_tokens: int
    num_known: int
    # The request's own limit of new tokens.
    max_tokens: int
    # Its LoRA adapter's files, as the request began with them.
    adapter: Loaded | None
    # Those behind the boundary, which the client has not got.
    held_back: list[int] = field(default_factory=list)


class HeldBack(SchedulerPart):
    """Tokens that clients get with the next output of a request, because it does not move."""

    name = counters.HANDOFF

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def keep(self, request_id: str, token_ids: list[int]) -> None:
        """Put these tokens in front of the request's next output."""
        self._tokens[request_id] = token_ids

    def on_added(self, request: Any, options: RequestOptions) -> None:
        # An aborted request has no next output, and its name may be used again.
        self._tokens.pop(request.request_id, None)

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        if not self._tokens:
            return
        for client in results.values():
            for output in client.outputs:
                first = self._tokens.pop(output.request_id, None)
                if first:
                    output.new_token_ids = [*first, *output.new_token_ids]


class ThinkPart(SchedulerPart):
    """Hands requests off that ask for it, when their first thought has ended.

    Args:
        scheduler: the phase-aware scheduler, with a connector.
        tracker: phases of all requests.
        least_blocks: KV blocks below which a request answers in place.
    """

    name = counters.HANDOFF

    def __init__(self, scheduler: Any, tracker: PhaseTracker, least_blocks: int) -> None:
        self._scheduler = scheduler
        self._tracker = tracker
        self._least_tokens = least_blocks * scheduler.cache_config.block_size
        self._layout = layout_of(scheduler.vllm_config)
        self._binds_thoughts = binds_thoughts(scheduler.vllm_config)
        self._fabric = fabric_of(scheduler.vllm_config)
        self._adapters = AdapterWeights(scheduler.vllm_config.lora_config)
        self._reasons = Reasons("KV caches of this engine are computed again where they go")
        # Requests that may be handed off with their LoRA adapters, and those that end one token
        # after their boundary.
        self._offered: dict[str, Loaded | None] = {}
        self._moves: dict[str, _Move] = {}
        # Requests that were handed off in the step being updated.
        self._moved: set[str] = set()
        # Number of tokens behind the boundary that were accepted in the step being updated.
        self._surplus: dict[str, int] = {}
        self._held_back = HeldBack()

    def before_added(self, request: Any, options: RequestOptions) -> None:
        params = request.kv_transfer_params
        if not is_mapping(request) or not params:
            return
        if params.get("do_remote_decode"):
            self._fabric.offer(request)
        if isinstance(params.get(wire.RELEASE), str):
            self._fabric.release(self._scheduler, params[wire.RELEASE])
        if isinstance(params.get(wire.ANSWERED), int):
            go_on_in_answer(request, params[wire.ANSWERED])

    def on_added(self, request: Any, options: RequestOptions) -> None:
        self._held_back.on_added(request, options)
        adapter = self._adapters.begin(request.lora_request)
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and self._may_move(request):
            self._offered[request.request_id] = adapter

    def on_phase_changed(self, request: Any) -> None:
        name = request.request_id
        if name not in self._offered or name in self._moves:
            return
        state = self._tracker.get(name)
        if state is None or state.phase is not Phase.ANSWER or not state.is_handed_off:
            return
        adapter = self._offered.pop(name)
        ends_at = request.num_output_tokens + 1
        num_tokens, num_known = state.tokens_before, request.num_tokens
        if request.is_finished() or num_tokens < self._least_tokens:
            return
        if state.is_calling:
            # The answer engine's parsers would miss the tool call that the answer begins with.
            return
        if ends_at >= request.max_tokens:
            return
        if num_known > num_tokens and request.sampling_params.logprobs is not None:
            # Their log-probabilities would have to be taken back, too.
            return
        self._moves[name] = _Move(request, num_tokens, num_known, request.max_tokens, adapter)
        self._surplus[name] = num_known - num_tokens
        # Load-bearing: upstream compares the number of output tokens with it after each token.
        request.max_tokens = ends_at

    def on_freed(self, request: Any) -> None:
        self._offered.pop(request.request_id, None)

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        self._held_back.after_update(scheduler_output, results)
        if not self._surplus and not self._moved:
            return
        surplus, self._surplus = self._surplus, {}
        moved, self._moved = self._moved, set()
        for client in results.values():
            for output in client.outputs:
                if output.request_id in moved:
                    # The token after the boundary: the answer engine samples it.
                    output.new_token_ids = []
                    output.new_logprobs = None
                    output.new_sampling_mask = None
                elif num_behind := surplus.get(output.request_id):
                    # Drafts accepted behind the boundary: the answer engine samples them, too.
                    self._moves[output.request_id].held_back = output.new_token_ids[-num_behind:]
                    del output.new_token_ids[-num_behind:]

    def stand_in(self) -> SchedulerPart:
        for name, move in self._moves.items():
            self._held_back.keep(name, move.held_back)
        return self._held_back

    def on_switched_off(self) -> None:
        for move in self._moves.values():
            move.request.max_tokens = move.max_tokens
        self._moves.clear()
        self._offered.clear()

    @contextmanager
    def told_to_connector(self, request: Any) -> Iterator[Facts | None]:
        """Let the connector keep the KV cache of a request that moves, and of no other.

        Args:
            request: a finished request, about to be reported to the connector.

        Yields:
            The facts of its ticket; None if it does not move.
        """
        move = self._moves.pop(request.request_id, None)
        status, num_computed = request.status, request.num_computed_tokens
        if move is not None and self._is_moving(request, move):
            # Load-bearing: upstream clips the blocks to these tokens, and the connector of the
            # other side reads the last blocks that it is told of.
            request.num_computed_tokens = move.num_tokens
            self._moved.add(request.request_id)
            adapter = self._weights_of(move)
            if adapter == NOT_KNOWN:
                # No engine will read the blocks, as below.
                request.status = RequestStatus.FINISHED_ABORTED
            num_output_tokens = move.num_tokens - request.num_prompt_tokens
            facts = Facts(
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=num_output_tokens,
                max_tokens_left=move.max_tokens - num_output_tokens,
                layout=self._layout,
                adapter=adapter,
            )
        else:
            # Load-bearing: connectors free the blocks of an aborted request at once. Those of any
            # other they would keep for a reader.
            request.status = RequestStatus.FINISHED_ABORTED
            facts = None
            if move is not None and status != RequestStatus.FINISHED_ABORTED:
                self._held_back.keep(request.request_id, move.held_back)
        try:
            yield facts
        finally:
            request.status, request.num_computed_tokens = status, num_computed

    def ticket(self, request: Any, facts: Facts, params: dict[str, Any] | None) -> dict[str, Any]:
        """The ticket of a request that moves.

        Its last token is discarded, so it leaves even if the connector keeps nothing for it: the
        answer engine then computes all tokens again.
        """
        address = self._fabric.address(request, params) or {}
        return {**address, wire.FACTS: facts.model_dump()}

    def _weights_of(self, move: _Move) -> str | None:
        if move.adapter is None:
            return None
        adapter = move.request.lora_request
        weights = self._adapters.of(adapter, move.adapter)
        if weights.why:
            name = adapter.lora_name
            self._reasons.log(f"the weights of LoRA adapter {name!r} are unknown: {weights.why}")
        return weights.digest

    def _may_move(self, request: Any) -> bool:
        return why_it_stays(request, binds_thoughts=self._binds_thoughts) is None

    @staticmethod
    def _is_moving(request: Any, move: _Move) -> bool:
        has_one_more = request.num_tokens == move.num_known + 1
        return has_one_more and request.status == RequestStatus.FINISHED_LENGTH_CAPPED
