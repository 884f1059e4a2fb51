"""Parses a request's ``meridian_*`` fields when the scheduler accepts the request."""

from typing import Any

from meridian_patch.config.request_options import (
    NO_OPTIONS,
    RequestOptions,
    allowed_names,
    parse_options,
    refused_names,
)
from meridian_patch.config.schema import RequestsConfig
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters


class OptionsParser:
    """Applies ``requests.allowed_fields`` in the scheduler.

    The patched API server refuses a field that is not allowed. Some requests do not pass through
    it, for example with ``--scheduler-cls`` alone; the field is then ignored and counted.

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

    def parse(self, request: Any) -> RequestOptions:
        """The options of a new request, or of a session's next chunk.

        Raises:
            ConfigError: a ``meridian_*`` field is wrong; the message names it.
        """
        extra_args = getattr(request.sampling_params, "extra_args", None)
        if not extra_args:
            return NO_OPTIONS
        refused = refused_names(extra_args, self._allowed)
        for name in refused:
            self._counters.count(counters.IGNORED_FIELD, name)
        options = parse_options({k: v for k, v in extra_args.items() if k not in refused})
        return options if self._patterns is None else self._patterns.in_options(options)
