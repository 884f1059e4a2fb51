"""Parses a request's ``meridian_*`` fields when the scheduler accepts the request."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from vllm.logger import init_logger

from meridian_patch.config.request_options import (
    NO_OPTIONS,
    RequestOptions,
    allowed_names,
    parse_options,
    refused_names,
)
from meridian_patch.config.schema import RequestsConfig
from meridian_patch.engine import front_end
from meridian_patch.errors import MeridianError
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = init_logger("vllm.meridian_patch")

# A client may send wrong fields with each of its requests.
WARN_EVERY_S: Final = 60.0


class OptionsParser:
    """Applies ``requests.allowed_fields`` in the scheduler.

    Fields that are wrong or not allowed are refused before the scheduler, by the patched API server
    and, from vLLM 0.33 on, by EngineCore. Some requests do not pass through either, for example
    with ``--scheduler-cls`` alone; what is wrong is then ignored and counted.

    Args:
        config: section ``requests``.
        phase_counters: count ignored fields.
        patterns: turns patterns into tokens, which the patched API server has done already; None
            where no thought is closed.
    """

    def __init__(
        self,
        config: RequestsConfig,
        phase_counters: PhaseCounters,
        patterns: PatternTokens | None = None,
    ) -> None:
        self._allowed = allowed_names(config.allowed_fields)
        self._counters = phase_counters
        self._patterns = patterns
        self._warned_s = -math.inf

    def options_of(self, request: "Request") -> RequestOptions:
        """The options of a new request, or of a session's next chunk; none if one is wrong."""
        extra_args = getattr(request.sampling_params, "extra_args", None)
        if not extra_args:
            return NO_OPTIONS
        ignored: Iterable[str] = refused_names(extra_args, self._allowed)
        try:
            options = self._parse({k: v for k, v in extra_args.items() if k not in ignored})
        except MeridianError as error:
            options, ignored = NO_OPTIONS, RequestOptions.model_fields.keys() & extra_args.keys()
            self._warn(request.request_id, error)
        for name in ignored:
            self._counters.count(counters.IGNORED_FIELD, name)
        return options

    def _parse(self, extra_args: Mapping[str, Any]) -> RequestOptions:
        options = parse_options(extra_args)
        front_end.check_stop_scope(options.meridian_stop_scope or "all")
        return options if self._patterns is None else self._patterns.in_options(options)

    def _warn(self, request_id: str, error: MeridianError) -> None:
        now_s = time.monotonic()
        if now_s - self._warned_s >= WARN_EVERY_S:
            self._warned_s = now_s
            logger.warning(
                "meridian_patch: request %s is served without its meridian_* fields: %s; what "
                "follows within a minute is only counted",
                request_id,
                error,
            )
