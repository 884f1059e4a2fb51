"""Carries a request's fields to the scheduler, and how thinking ended back to the caller.

::

    vllm_xargs ──▶ serving class, input processor ──▶ scheduler: attach_all()
                   refuse what is wrong                       │ kv_transfer_params
    choice["meridian"] ◀── serving class ◀── request state ◀──┘
    CompletionOutput.meridian ◀───────────── takes it out again

Everything but the scheduler runs in the API server, or in the process of ``vllm.LLM``.
"""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, Final

from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import output_processor

from meridian_patch.config.load import process_config
from meridian_patch.config.request_options import (
    NO_OPTIONS,
    allowed_names,
    check_allowed,
    check_reserve,
    parse_options,
)
from meridian_patch.engine import wire
from meridian_patch.engine.api.recipients import takes_out
from meridian_patch.engine.api.served_model import ServedModel
from meridian_patch.errors import MeridianError
from meridian_patch.exit.actions import ExitReport, Summary, summarize

_EVENT: Final = "data: {"


class RequestRefused(VLLMValidationError, ValueError):  # noqa: N818 - the name is what happened
    """A request has a wrong ``meridian_*`` field, or one that is not allowed.

    vLLM turns the first base class into HTTP 400; the second is for callers of ``vllm.LLM``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.parameter = "vllm_xargs"


@cache
def allowed_fields() -> frozenset[str]:
    """The fields that this process's configuration allows; read once."""
    return allowed_names(process_config().config.requests.allowed_fields)


def check_fields(
    extra_args: Mapping[str, Any] | None,
    served: ServedModel | None = None,
    max_tokens: int | None = None,
) -> Mapping[str, Any] | None:
    """Refuse a request with a ``meridian_*`` field that is wrong, or not allowed here.

    Args:
        extra_args: of the request.
        served: the served model; None if it is not known.
        max_tokens: upper bound of the request's output; None if it sets none.

    Returns:
        The arguments, in which patterns that end a thought are tokens; the same object if it has
        none.

    Raises:
        RequestRefused: the message names the field, its value and what was expected.
    """
    try:
        options = parse_options(extra_args)
        if options is not NO_OPTIONS:
            check_allowed(extra_args, allowed_fields())
            check_reserve(options, max_tokens)
        if options.meridian_wrap_up and served is not None:
            served.check_wrap_up(options.meridian_wrap_up)
        if options.meridian_exit_patterns and extra_args and served is not None:
            return served.with_patterns(extra_args, options)
        return extra_args
    except MeridianError as error:
        raise RequestRefused(str(error)) from error


def attach_all(outputs: Mapping[int, Any], outcomes: Mapping[str, ExitReport]) -> None:
    """Attach reports on requests' thinking to their outputs.

    To be called in every step with new reports, not only in the last one: the API server ends a
    request at a stop string, so the scheduler may not see its last step.

    Args:
        outputs: the result of ``update_from_output``: ``EngineCoreOutputs`` by client.
        outcomes: new reports by request id.
    """
    # Without the patched request state, the summary would stay in the caller's
    # `kv_transfer_params`.
    if not outcomes or not takes_out(output_processor.RequestState):
        return
    for client in outputs.values():
        for output in client.outputs:
            if output.request_id in outcomes:
                summary = summarize(outcomes[output.request_id])
                # Load-bearing: the only dict with free keys there; it reaches the API server
                # unchanged.
                others = output.kv_transfer_params or {}
                output.kv_transfer_params = {**others, wire.SUMMARY: summary}


def detach(params: dict[str, Any] | None) -> tuple[dict[str, Any] | None, Summary | None]:
    """``kv_transfer_params`` without the summary, and the summary; each may be None."""
    if not params or wire.SUMMARY not in params:
        return params, None
    rest = {name: value for name, value in params.items() if name != wire.SUMMARY}
    return rest or None, params[wire.SUMMARY]


class Summaries:
    """The summaries of one response's choices, kept until their choices are sent."""

    def __init__(self) -> None:
        self._by_choice: dict[int, Summary] = {}

    def saw(self, choice: int, output: Any) -> None:
        """Keep the summary of a ``CompletionOutput`` that ends the choice with this index."""
        if output.finish_reason is not None:
            # Beam search makes its own outputs, without a summary.
            summary = getattr(output, wire.SUMMARY, None)
            if summary:
                self._by_choice[choice] = summary

    def add_to(self, choices: Iterable[Any]) -> None:
        """Add the summaries to the choices of a whole response."""
        for choice in choices:
            if choice.index in self._by_choice:
                # Load-bearing: response models keep unknown fields.
                setattr(choice, wire.SUMMARY, self._by_choice[choice.index])

    def add_to_event(self, event: str) -> str:
        """Add summaries to the last chunk of each choice in a stream of server-sent events."""
        if not self._by_choice or not event.startswith(_EVENT):
            return event
        chunk = json.loads(event.removeprefix("data: "))
        ended = [each for each in chunk.get("choices", ()) if each.get("finish_reason")]
        known = [each for each in ended if each["index"] in self._by_choice]
        if not known:
            return event
        for choice in known:
            choice[wire.SUMMARY] = self._by_choice.pop(choice["index"])
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
