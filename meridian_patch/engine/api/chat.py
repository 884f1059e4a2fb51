"""Chat completions: refuses wrong fields before a stream begins, and tells how choices thought."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from meridian_patch.config.request_options import HISTORY, kept_history
from meridian_patch.engine.api.body_fields import move_fields, restore_fields
from meridian_patch.engine.api.exit_summary import Summaries, allowed_fields, check_fields
from meridian_patch.engine.api.reasoning_usage import UsageDetails, responses_config
from meridian_patch.engine.api.served_model import served_through


def build_chat_serving(original: type) -> type:
    """``original`` with ``meridian_*`` fields checked, ``meridian`` in choices, and usage."""
    # An error in the configuration is raised here, not by a request.
    responses_config()

    class SummaryServingChat(original):
        async def create_chat_completion(self, request: Any, raw_request: Any = None) -> Any:
            await restore_fields(request, raw_request)
            return await super().create_chat_completion(request, raw_request)

        async def _check_model(self, request: Any) -> Any:
            move_fields(request)
            # Load-bearing: upstream calls this before it sends anything. The input processor would
            # refuse only after the HTTP status of a stream was sent.
            served = served_through(self.engine_client)
            fields = getattr(request, "vllm_xargs", None)
            check_fields(fields, served, _most_tokens(request))
            history = kept_history(getattr(request, "chat_template_kwargs", None))
            if history is not None and HISTORY in allowed_fields():
                # Load-bearing: upstream makes the sampling parameters from it after this.
                request.vllm_xargs = {HISTORY: history, **(fields or {})}
            return await super()._check_model(request)

        async def chat_completion_stream_generator(
            self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
        ) -> AsyncIterator[str]:
            summaries, details = Summaries(), UsageDetails()
            results = _watch(result_generator, summaries, details)
            events = super().chat_completion_stream_generator(request, results, *args, **kwargs)
            async with aclosing(events):
                async for event in events:
                    yield details.add_to_event(summaries.add_to_event(event))

        async def chat_completion_full_generator(
            self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
        ) -> Any:
            summaries, details = Summaries(), UsageDetails()
            results = _watch(result_generator, summaries, details)
            response = await super().chat_completion_full_generator(
                request, results, *args, **kwargs
            )
            # An error response has no choices.
            summaries.add_to(getattr(response, "choices", ()))
            details.add_to(response)
            return response

    return SummaryServingChat


def _most_tokens(request: Any) -> int | None:
    # Load-bearing: upstream takes the newer name, where a request has both.
    newer: int | None = request.max_completion_tokens
    older: int | None = request.max_tokens
    return older if newer is None else newer


async def _watch(results: Any, summaries: Summaries, details: UsageDetails) -> AsyncGenerator[Any]:
    async with aclosing(results):
        async for result in results:
            for output in result.outputs:
                summaries.saw(output.index, output)
                details.saw(output.index, output)
            yield result
