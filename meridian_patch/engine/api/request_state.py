"""Puts how a request thought on the caller's outputs, and sets where its stop strings match."""

from typing import Any

from vllm.v1.engine import FinishReason

from meridian_patch.engine import wire
from meridian_patch.engine.api.answer_stops import AnswerStops, build_detokenizer
from meridian_patch.engine.api.exit_summary import detach
from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.reasoning_usage import milliseconds, responses_config
from meridian_patch.engine.api.served_model import served_by
from meridian_patch.engine.api.think_pieces import with_think_pieces
from meridian_patch.phase.progress import PhaseProgress


def build_request_state(original: type) -> type:
    """``original`` with the summary on every ``CompletionOutput`` that it makes."""
    times = _Times()

    class SummaryRequestState(_with_stop_scope(with_think_pieces(original))):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Empty until a thought has ended. All outputs of a turn share this object, because vLLM
            # merges outputs that were not read yet into the first one, without this attribute.
            self.thinking: dict[str, Any] = {}
            # Whether the next output begins another turn of a streaming session, and the object of
            # the turn before until that turn's first output.
            self.is_turn_over = False
            self.thinking_before: dict[str, Any] | None = None
            # The turn's phases and times, which the output processor keeps up to date.
            self.progress = PhaseProgress()

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
            if self.is_turn_over:
                self.is_turn_over = False
                self.thinking_before, self.thinking = self.thinking, {}
            kv_transfer_params, summary = detach(kv_transfer_params)
            if summary is not None:
                self.thinking.clear()
                self.thinking.update(summary)
            times.add_to(self.thinking, self, finish_reason)
            self.progress.is_stopped = _is_stop_token(finish_reason, stop_reason)
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
            self.is_turn_over = finish_reason is not None and self.streaming_input
            if self.is_turn_over:
                # Now, because the output processor looks at the next output first.
                self.progress = PhaseProgress()
            return output

        def _new_completion_output(self, *args: Any, **kwargs: Any) -> Any:
            output = super()._new_completion_output(*args, **kwargs)
            before, self.thinking_before = self.thinking_before, None
            if before is not None and self._is_merged_into(before):
                # The merged output tells how the last turn ended, as its other fields do.
                before.clear()
                before.update(self.thinking)
                self.thinking = before
            setattr(output, wire.SUMMARY, self.thinking)
            setattr(output, wire.PROGRESS, self.progress)
            return output

        def _is_merged_into(self, thinking: dict[str, Any]) -> bool:
            """Whether vLLM merges the next output into one with this summary."""
            # Load-bearing: the output that was not read yet; it is replaced unless it aggregates.
            # From vLLM 0.33 on the queue of a session has a backlog, and merges within turns alone.
            queue = self.queue
            if queue is None or not queue.aggregate or hasattr(queue, "_backlog"):
                return False
            completions = getattr(queue.output, "outputs", ())
            return any(getattr(each, wire.SUMMARY, None) is thinking for each in completions)

    return SummaryRequestState


def _is_stop_token(finish_reason: Any, stop_reason: Any) -> bool:
    """Whether an output's last token is one that ends the request."""
    # Load-bearing: the reason of a stop string is its text; a stop token is part of the output.
    return finish_reason == FinishReason.STOP and not isinstance(stop_reason, str)


class _Times:
    """Adds times and preemptions to the summaries of requests that thought.

    Raises:
        ConfigError: the configuration is wrong; no output of a request reads it later.
    """

    def __init__(self) -> None:
        self._is_on = responses_config().times
        self._guard = ApiGuard("the times of a request were not told")

    def add_to(self, summary: dict[str, Any], state: Any, finish_reason: Any) -> None:
        """Add those of a request that ends; there are none without vLLM's own statistics."""
        if finish_reason is None or not self._is_on or state.stats is None:
            return
        with self._guard:
            times = milliseconds(state.progress)
            if times:
                summary.update(times | {"preemptions": state.stats.num_preemptions})


def _with_stop_scope(original: type) -> type:
    """``original`` whose stop strings match where the request says."""

    class ScopedRequestState(original):
        @classmethod
        def from_new_request(cls, tokenizer: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
            state = super().from_new_request(tokenizer, request, *args, **kwargs)
            served, params = served_by(tokenizer), request.sampling_params
            if served is not None and params is not None and params.stop:
                phases = served.phases_for_stops(params, request.prompt_token_ids)
                state.detokenizer = build_detokenizer(state.detokenizer, phases)
            return state

        def apply_streaming_update(self, update: Any) -> None:
            super().apply_streaming_update(update)
            if isinstance(self.detokenizer, AnswerStops):
                self.detokenizer.continue_with(update.prompt_token_ids or ())

    return ScopedRequestState
