"""Ends requests on a think engine one token after their thought, with their KV cache kept.

The last token that an engine samples is never computed. So a request that is to be handed off
goes on for one token after its boundary; that token is discarded, and the answer engine samples
it again from the KV cache that it was sent. Drafts that were accepted behind the boundary are held
back until it is known whether the request moves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling


@dataclass(slots=True)
class Move:
    """The hand-off of a request that ends one token after its boundary."""

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


class HeldBackTokens:
    """Tokens that clients get with the next output of a request, because it does not move.

    That output may come when the request has left the scheduler already.
    """

    def __init__(self) -> None:
        self._tokens: dict[str, list[int]] = {}

    def keep(self, request_id: str, token_ids: list[int]) -> None:
        """Put these tokens in front of the request's next output."""
        self._tokens[request_id] = token_ids

    def drop(self, request_id: str) -> None:
        """Drop those of an aborted request: it has no next output, and its name is used again."""
        self._tokens.pop(request_id, None)

    def put_into(self, results: "dict[int, EngineCoreOutputs]") -> None:
        """Put them into a step's outputs."""
        if not self._tokens:
            return
        for client in results.values():
            for output in client.outputs:
                first = self._tokens.pop(output.request_id, None)
                if first:
                    output.new_token_ids = [*first, *output.new_token_ids]


class HeldBack(SchedulerPart):
    """Stands in for a ``ThinkPart`` that was switched off: clients get what it held back.

    Args:
        tokens: those that it held back.
    """

    name = counters.HANDOFF

    def __init__(self, tokens: HeldBackTokens) -> None:
        self._tokens = tokens

    def on_added(self, request: "Request", options: RequestOptions) -> None:
        self._tokens.drop(request.request_id)

    def after_update(
        self, scheduler_output: "SchedulerOutput", results: "dict[int, EngineCoreOutputs]"
    ) -> None:
        self._tokens.put_into(results)


class ThinkPart(SchedulerPart):
    """Hands requests off that ask for it, when their first thought has ended.

    Args:
        scheduler: the phase-aware scheduler, with a connector.
        tracker: phases of all requests.
        least_blocks: KV blocks below which a request answers in place.
    """

    name = counters.HANDOFF

    def __init__(
        self, scheduler: "PhaseScheduling", tracker: PhaseTracker, least_blocks: int
    ) -> None:
        self._scheduler = scheduler
        self._states = scheduler.request_states
        self._tracker = tracker
        self._least_tokens = least_blocks * scheduler.cache_config.block_size
        self._layout = layout_of(scheduler.vllm_config)
        self._binds_thoughts = binds_thoughts(scheduler.vllm_config)
        self._fabric = fabric_of(scheduler.vllm_config)
        self._adapters = AdapterWeights(scheduler.vllm_config.lora_config)
        self._reasons = Reasons("KV caches of this engine are computed again where they go")
        # Requests that were handed off in the step being updated.
        self._moved: set[str] = set()
        # Number of tokens behind the boundary that were accepted in the step being updated.
        self._surplus: dict[str, int] = {}
        self._held_back = HeldBackTokens()

    def before_added(self, request: "Request", options: RequestOptions) -> None:
        params = request.kv_transfer_params
        if not is_mapping(request) or not params:
            return
        if params.get("do_remote_decode"):
            self._fabric.offer(request)
        if isinstance(params.get(wire.RELEASE), str):
            self._fabric.release(self._scheduler, params[wire.RELEASE])
        if isinstance(params.get(wire.ANSWERED), int):
            go_on_in_answer(request, params[wire.ANSWERED])

    def on_added(self, request: "Request", options: RequestOptions) -> None:
        self._held_back.drop(request.request_id)
        adapter = self._adapters.begin(request.lora_request)
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and self._may_move(request):
            record = self._states.of(request)
            record.is_offered, record.adapter = True, adapter

    def on_phase_changed(self, request: "Request") -> None:
        record = self._states.of(request)
        if not record.is_offered:
            return
        state = self._tracker.get(request.request_id)
        if state is None or state.phase is not Phase.ANSWER or not state.is_handed_off:
            return
        record.is_offered = False
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
        record.move = Move(num_tokens, num_known, request.max_tokens, record.adapter)
        self._surplus[request.request_id] = num_known - num_tokens
        # Load-bearing: upstream compares the number of output tokens with it after each token.
        request.max_tokens = ends_at

    def after_update(
        self, scheduler_output: "SchedulerOutput", results: "dict[int, EngineCoreOutputs]"
    ) -> None:
        self._held_back.put_into(results)
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
                    record = self._states.get(output.request_id)
                    if record is not None and record.move is not None:
                        record.move.held_back = output.new_token_ids[-num_behind:]
                        del output.new_token_ids[-num_behind:]

    def stand_in(self) -> SchedulerPart:
        for record in self._states:
            if record.move is not None:
                self._held_back.keep(record.request.request_id, record.move.held_back)
        return HeldBack(self._held_back)

    def on_switched_off(self) -> None:
        for record in self._states:
            if record.move is not None:
                record.request.max_tokens = record.move.max_tokens
            record.is_offered, record.move = False, None

    @contextmanager
    def told_to_connector(self, request: "Request") -> Iterator[Facts | None]:
        """Let the connector keep the KV cache of a request that moves, and of no other.

        Args:
            request: a finished request, about to be reported to the connector.

        Yields:
            The facts of its ticket; None if it does not move.
        """
        move, record = None, self._states.get(request.request_id)
        if record is not None:
            # A probe has none.
            move, record.move = record.move, None
        status, num_computed = request.status, request.num_computed_tokens
        if move is not None and self._is_moving(request, move):
            # Load-bearing: upstream clips the blocks to these tokens, and the connector of the
            # other side reads the last blocks that it is told of.
            request.num_computed_tokens = move.num_tokens
            self._moved.add(request.request_id)
            adapter = self._weights_of(request, move)
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

    def ticket(
        self, request: "Request", facts: Facts, params: dict[str, Any] | None
    ) -> dict[str, Any]:
        """The ticket of a request that moves.

        Its last token is discarded, so it leaves even if the connector keeps nothing for it: the
        answer engine then computes all tokens again.
        """
        address = self._fabric.address(request, params) or {}
        return {**address, wire.FACTS: facts.model_dump()}

    def _weights_of(self, request: "Request", move: Move) -> str | None:
        if move.adapter is None:
            return None
        adapter = request.lora_request
        weights = self._adapters.of(adapter, move.adapter)
        if weights.why:
            name = adapter.lora_name
            self._reasons.log(f"the weights of LoRA adapter {name!r} are unknown: {weights.why}")
        return weights.digest

    def _may_move(self, request: "Request") -> bool:
        return why_it_stays(request, binds_thoughts=self._binds_thoughts) is None

    @staticmethod
    def _is_moving(request: "Request", move: Move) -> bool:
        has_one_more = request.num_tokens == move.num_known + 1
        return has_one_more and request.status == RequestStatus.FINISHED_LENGTH_CAPPED
