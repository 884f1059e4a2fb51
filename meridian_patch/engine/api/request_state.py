"""Copies how a request's thinking ended from the engine's outputs to the caller's outputs."""

from typing import Any

from meridian_patch.engine.api.exit_summary import KEY, detach


def build_request_state(original: type) -> type:
    """``original`` with the summary on every ``CompletionOutput`` that it makes."""

    class SummaryRequestState(original):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Empty until a thought has ended. All outputs of a turn share this object, because vLLM
            # merges outputs that were not read yet into the first one, without this attribute.
            self.thinking: dict[str, Any] = {}

        def make_request_output(
            self,
            new_token_ids: Any,
            pooling_output: Any,
            finish_reason: Any,
            stop_reason: Any,
            kv_transfer_params: dict[str, Any] | None = None,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            kv_transfer_params, summary = detach(kv_transfer_params)
            if summary is not None:
                self.thinking.clear()
                self.thinking.update(summary)
            output = super().make_request_output(
                new_token_ids,
                pooling_output,
                finish_reason,
                stop_reason,
                kv_transfer_params,
                *args,
                **kwargs,
            )
            # Load-bearing: True if the client may send further chunks of a streaming session.
            if finish_reason is not None and self.streaming_input:
                self.thinking = {}
            return output

        def _new_completion_output(self, *args: Any, **kwargs: Any) -> Any:
            output = super()._new_completion_output(*args, **kwargs)
            setattr(output, KEY, self.thinking)
            return output

    return SummaryRequestState
