"""Refuses wrong fields of ours where every request passes, in servers and in ``vllm.LLM`` alike."""

from typing import Any

from meridian_patch.engine.api.exit_summary import check_fields


def build_input_processor(original: type) -> type:
    """``original`` with our fields checked before anything is done with a request."""

    class CheckedInputProcessor(original):
        def process_inputs(
            self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
        ) -> Any:
            # Load-bearing: `vllm_xargs` arrives as `extra_args`; pooling parameters have none.
            check_fields(getattr(params, "extra_args", None))
            return super().process_inputs(request_id, prompt, params, *args, **kwargs)

    return CheckedInputProcessor
