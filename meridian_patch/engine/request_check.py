"""Refuses wrong ``meridian_*`` fields in EngineCore, for front ends that do not check them."""

from collections.abc import Mapping
from typing import Any

from vllm.v1.engine.core import EngineCoreProc

from meridian_patch.config.request_options import stop_scope
from meridian_patch.engine import front_end
from meridian_patch.engine.api.exit_summary import RequestRefused, check_fields
from meridian_patch.errors import MeridianError


def build_request_check(original: type) -> type:
    """``original`` that checks a new request's ``meridian_*`` fields where vLLM makes its grammar.

    vLLM 0.32 answers no refusal from there: it logs a traceback, and the client gets HTTP 500. Its
    scheduler serves the request without its fields instead, see ``OptionsParser``.
    """
    # Load-bearing: the input thread of 0.33 turns a VLLMValidationError into the request's error.
    is_answered = hasattr(EngineCoreProc, "_handle_request_validation_error")

    class CheckedStructuredOutputRequest(original):
        @classmethod
        def from_sampling_params(cls, sampling_params: Any) -> Any:
            # Load-bearing: called once for each request, and each chunk of a session, while the
            # input thread builds it; probes have no extra arguments.
            if is_answered:
                check_request(getattr(sampling_params, "extra_args", None))
            return super().from_sampling_params(sampling_params)

    return CheckedStructuredOutputRequest


def check_request(extra_args: Mapping[str, Any] | None) -> None:
    """Refuse a request's extra arguments as the patched API server would, without a tokenizer.

    Raises:
        RequestRefused: the message names the field, its value and what was expected.
    """
    if not extra_args:
        return
    check_fields(extra_args)
    try:
        front_end.check_stop_scope(stop_scope(extra_args, "all"))
    except MeridianError as error:
        raise RequestRefused(str(error)) from error
