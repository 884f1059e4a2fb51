"""Responses: wrong fields refused before a stream begins, and the summary in the response."""

from typing import Any

from meridian_patch.engine.api.exit_summary import KEY, check_fields


def build_responses_serving(original: type) -> type:
    """``original`` with our fields checked and ``meridian`` in the response.

    Not with OpenAI's own models ("harmony"): there one response is several requests.
    """

    class SummaryServingResponses(original):
        async def _check_model(self, request: Any) -> Any:
            # Load-bearing: it comes before anything is sent. The input processor's refusal would
            # come after the status of a stream, and end it without a word.
            check_fields(getattr(request, "vllm_xargs", None))
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
            # A stream ends with this too.
            response = await super().responses_full_generator(
                request, sampling_params, result_generator, context, *args, **kwargs
            )
            last = getattr(context, "last_output", None)
            summary = getattr(last.outputs[0], KEY, None) if last and last.outputs else None
            if summary and hasattr(response, "output"):
                setattr(response, KEY, summary)
            return response

    return SummaryServingResponses
