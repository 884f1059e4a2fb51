"""Takes fields out of requests that the operator does not allow."""

from typing import Any

from meridian_patch.config.request_fields import allowed_names, refused_names
from meridian_patch.config.schema import RequestsConfig
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import PhaseCounters


class AllowedFields:
    """The scheduler's side of ``requests.allowed_fields``.

    The API server refuses such requests. Some come past it, for example where only the scheduler
    is ours (``--scheduler-cls``): they are served as if the field were not there.
    """

    def __init__(self, config: RequestsConfig, phase_counters: PhaseCounters) -> None:
        self._allowed = allowed_names(config.allowed_fields)
        self._counters = phase_counters

    def apply(self, request: Any) -> None:
        """Take the fields that are not allowed out of a new request, or a session's next chunk."""
        extra_args = getattr(request.sampling_params, "extra_args", None)
        if not extra_args:
            return
        refused = refused_names(extra_args, self._allowed)
        for name in refused:
            self._counters.count(counters.IGNORED_FIELD, name)
        if refused:
            # The dict may be the caller's own.
            rest = {name: value for name, value in extra_args.items() if name not in refused}
            request.sampling_params.extra_args = rest
