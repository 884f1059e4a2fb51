"""Responses: refuses wrong fields before a stream begins, and tells how the response thought."""

from typing import Any

from meridian_patch.engine import wire
from meridian_patch.engine.api.body_fields import move_fields, restore_fields
from meridian_patch.engine.api.exit_summary import check_fields
from meridian_patch.engine.api.reasoning_usage import UsageDetails, responses_config
from meridian_patch.engine.api.served_model import served_through


def build_responses_serving(original: type) -> type:
    """``original`` with ``meridian_*`` fields checked and ``meridian`` in the response.

    Both are left out for OpenAI's own models ("harmony"), where one response consists of several
    requests, and which stock counts itself.
    """
    # An error in the configuration is raised here, not by a request.
    responses_config()

    class SummaryServingResponses(original):
        async def create_responses(self, request: Any, raw_request: Any = None) -> Any:
            await restore_fields(request, raw_request)
            return await super().create_responses(request, raw_request)

        async def _check_model(self, request: Any) -> Any:
            move_fields(request)
            # Load-bearing: upstream calls this before it sends anything. The input processor would
            # refuse only after the HTTP status of a stream was sent, and end it without a message.
            served = served_through(self.engine_client)
            check_fields(getattr(request, "vllm_xargs", None), served, request.max_output_tokens)
            return await super()._check_model(request)

        async def responses_full_generator(
            self,
            request: Any,
            sampling_params: Any,
            result_generator: Any,
            context: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            # Upstream calls this at the end of a stream too.
            response = await super().responses_full_generator(
                request, sampling_params, result_generator, context, *args, **kwargs
            )
            # Load-bearing: only the context of a single request has it.
            last = getattr(context, "last_output", None)
            if last and last.outputs and hasattr(response, "output"):
                summary = getattr(last.outputs[0], wire.SUMMARY, None)
                if summary:
                    setattr(response, wire.SUMMARY, summary)
                details = UsageDetails()
                details.saw(0, last.outputs[0])
                _add_details(response, details, context.num_output_tokens)
            return response

    return SummaryServingResponses


def _add_details(response: Any, details: UsageDetails, num_tokens: int) -> None:
    """Write reasoning tokens and times into the usage of a response."""
    count = details.count_of(0, num_tokens)
    if count is not None:
        response.usage.output_tokens_details.reasoning_tokens = count
    details.add_to_metrics(response)
