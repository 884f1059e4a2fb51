"""Checks tickets on an answer engine: one that does not fit is computed here instead."""

from typing import Any, Final

from vllm.logger import init_logger

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.engine.handoff.layout import is_mapping, layout_of
from meridian_patch.engine.scheduler.parts import SchedulerPart
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.ticket import FACTS, facts_in
from meridian_patch.telemetry import counters

logger = init_logger("vllm.meridian_patch")

# Reasons hold values of requests, so there may be any number of them.
_MOST_LOGGED: Final = 16


class AnswerPart(SchedulerPart):
    """Removes the connector's fields from a request whose KV cache cannot be read here.

    Args:
        vllm_config: of this engine.
    """

    name = counters.HANDOFF

    def __init__(self, vllm_config: Any) -> None:
        self._layout = layout_of(vllm_config)
        self._refused: set[str] = set()

    def before_added(self, request: Any, options: RequestOptions) -> None:
        params = request.kv_transfer_params
        if not is_mapping(request) or not params:
            return
        if params.get("do_remote_decode"):
            # No other engine would read what this one keeps.
            request.kv_transfer_params = None
            return
        why = self._reason_against(params) if FACTS in params else ""
        if not why:
            return
        # The prompt has all tokens: they are computed again.
        request.kv_transfer_params = None
        if why not in self._refused and len(self._refused) < _MOST_LOGGED:
            self._refused.add(why)
            logger.error("meridian_patch: requests are not handed off to this engine: %s", why)

    def _reason_against(self, params: dict[str, Any]) -> str:
        try:
            facts = facts_in(params)
        except ConfigError as error:
            return str(error)
        return self._layout.difference(facts.layout) if facts else ""
