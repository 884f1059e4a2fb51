"""Checks tickets on an answer engine: one that does not fit is computed here instead."""

from typing import Any

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine import wire
from meridian_patch.engine.handoff.layout import Reasons, is_mapping, layout_of
from meridian_patch.engine.handoff.lora_weights import AdapterWeights, Loaded
from meridian_patch.engine.scheduler.parts import SchedulerPart
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.ticket import facts_in
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters


class AnswerPart(SchedulerPart):
    """Removes the connector's fields from a request whose KV cache cannot be read here.

    Args:
        vllm_config: of this engine.
        phase_counters: count tickets.
    """

    name = counters.HANDOFF

    def __init__(self, vllm_config: Any, phase_counters: PhaseCounters) -> None:
        self._counters = phase_counters
        self._layout = layout_of(vllm_config)
        self._adapters = AdapterWeights(vllm_config.lora_config)
        self._reasons = Reasons("requests are not handed off to this engine")

    def before_added(self, request: Any, options: RequestOptions) -> None:
        loaded = self._adapters.begin(request.lora_request)
        params = request.kv_transfer_params
        if not is_mapping(request) or not params:
            return
        if params.get("do_remote_decode"):
            # No other engine would read what this one keeps.
            request.kv_transfer_params = None
            return
        if wire.FACTS not in params:
            return
        try:
            why = self._reason_against(params, request.lora_request, loaded)
        except Exception:
            # It was not checked, so it is not read.
            request.kv_transfer_params = None
            self._counters.count(counters.TICKET, "refused")
            raise
        self._counters.count(counters.TICKET, "refused" if why else "accepted")
        if why:
            # The prompt has all tokens: they are computed again.
            request.kv_transfer_params = None
            self._reasons.log(why)

    def stand_in(self) -> SchedulerPart:
        # It goes on: without it, every KV cache would be read unchecked.
        return self

    def _reason_against(self, params: dict[str, Any], adapter: Any, loaded: Loaded | None) -> str:
        try:
            facts = facts_in(params)
        except ConfigError as error:
            return str(error)
        if facts is None:
            return ""
        why = self._layout.difference(facts.layout)
        return why or self._adapters.difference(adapter, loaded, facts.adapter)
