"""Refuses wrong ``meridian_*`` fields of every request, in servers and in ``vllm.LLM``."""

from typing import Any

from meridian_patch.engine.api.exit_summary import check_fields


def build_input_processor(original: type) -> type:
    """``original`` with ``meridian_*`` fields checked before a request is processed."""

    class CheckedInputProcessor(original):
        def process_inputs(
            self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # Load-bearing: upstream passes `vllm_xargs` as `extra_args`; pooling parameters have
            # none.
            check_fields(getattr(params, "extra_args", None))
            return super().process_inputs(request_id, prompt, params, *args, **kwargs)

    return CheckedInputProcessor
