"""Completions: refuses wrong fields before a stream begins, and tells how choices thought."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from meridian_patch.engine.api.body_fields import move_fields, restore_fields
from meridian_patch.engine.api.exit_summary import Summaries, check_fields
from meridian_patch.engine.api.reasoning_usage import UsageDetails, responses_config
from meridian_patch.engine.api.served_model import served_through


def build_completion_serving(original: type) -> type:
    """Return a subclass of vLLM's completion server.

    It refuses a request with a wrong ``meridian_*`` field before it sends anything, and adds
    ``meridian`` to each choice that has a summary; in a stream, to the last chunk of the choice.
    Usage counts reasoning tokens.
    """
    # An error in the configuration is raised here, not by a request.
    responses_config()

    class SummaryServingCompletion(original):
        async def create_completion(self, request: Any, raw_request: Any = None) -> Any:
            await restore_fields(request, raw_request)
            return await super().create_completion(request, raw_request)

        async def _check_model(self, request: Any) -> Any:
            move_fields(request)
            # Load-bearing: upstream calls this before it sends anything. The input processor would
            # refuse only after the HTTP status of a stream was sent.
            served = served_through(self.engine_client)
            check_fields(getattr(request, "vllm_xargs", None), served, request.max_tokens)
            return await super()._check_model(request)

        async def completion_stream_generator(
            self,
            request: Any,
            engine_inputs: Any,
            result_generator: Any,
            *args: Any,
            **kwargs: Any,
        ) -> AsyncIterator[str]:
            summaries, details = Summaries(), UsageDetails()
            results = _watch(result_generator, summaries, details, request.n or 1)
            events = super().completion_stream_generator(
                request, engine_inputs, results, *args, **kwargs
            )
            async with aclosing(events):
                async for event in events:
                    yield details.add_to_event(summaries.add_to_event(event))

        def request_output_to_completion_response(
            self, final_res_batch: Any, *args: Any, **kwargs: Any
        ) -> Any:
            response = super().request_output_to_completion_response(
                final_res_batch, *args, **kwargs
            )
            summaries, details = Summaries(), UsageDetails()
            # Load-bearing: upstream numbers choices consecutively over all prompts.
            outputs = (output for result in final_res_batch for output in result.outputs)
            for choice, output in enumerate(outputs):
                summaries.saw(choice, output)
                details.saw(choice, output)
            summaries.add_to(response.choices)
            details.add_to(response)
            return response

    return SummaryServingCompletion


async def _watch(
    results: Any, summaries: Summaries, details: UsageDetails, per_prompt: int
) -> AsyncGenerator[Any]:
    async with aclosing(results):
        async for prompt, result in results:
            for output in result.outputs:
                # Load-bearing: upstream computes the choice's index in the same way.
                choice = prompt * per_prompt + output.index
                summaries.saw(choice, output)
                details.saw(choice, output)
            yield prompt, result
