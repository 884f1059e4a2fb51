"""Writes reasoning tokens into the usage of responses, and phases' times into vLLM's metrics.

Stock counts from the output alone, with the server's reasoning parser: none without one, and none
with the parsers that look for the start marker there, where the chat template opens the thought in
the prompt. The scheduler knows the phase of every token, so its count holds for all of them.
"""

import json
from functools import cache
from typing import Any, Final

from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

from meridian_patch.config.load import process_config
from meridian_patch.config.schema import ResponsesConfig
from meridian_patch.engine import wire
from meridian_patch.phase.progress import ANSWER, THINK, PhaseProgress

_DETAILS: Final = "completion_tokens_details"
_EVENT: Final = "data: "
# A chunk without usage has null there, or nothing.
_HAS_USAGE: Final = '"usage":{'


@cache
def responses_config() -> ResponsesConfig:
    """This process's configuration of responses; read once, when the patches are built.

    Raises:
        ConfigError: the configuration is wrong.
    """
    return process_config().config.responses


def milliseconds(progress: PhaseProgress) -> dict[str, float]:
    """Times of a request that thought, in milliseconds; else empty."""
    if not progress.has_thought or progress.place is None or progress.last_s is None:
        return {}
    seconds = {"think_ms": progress.seconds_in(THINK)}
    if progress.ttfat_s is not None:
        seconds |= {"ttfat_ms": progress.ttfat_s, "answer_ms": progress.seconds_in(ANSWER)}
    return {name: round(value * 1000, 3) for name, value in seconds.items()}


class UsageDetails:
    """What usage and metrics of one response say of its choices' phases.

    Outputs may run ahead of what the response has said so far, so tokens are counted as they are
    said.
    """

    def __init__(self) -> None:
        self._config = responses_config()
        # Progress and number of tokens by choice.
        self._choices: dict[int, tuple[PhaseProgress, int]] = {}
        # The summary of the last choice that was seen; its request may still fill it.
        self._summary: dict[str, Any] = {}

    def saw(self, choice: int, output: Any) -> None:
        """Take in the next ``CompletionOutput`` of a choice: its new tokens, or all of them."""
        # Beam search makes its own outputs, whose phases are not known.
        progress = getattr(output, wire.PROGRESS, None)
        if progress is not None:
            _, said = self._choices.get(choice, (progress, 0))
            self._choices[choice] = progress, said + len(output.token_ids)
            self._summary = getattr(output, wire.SUMMARY, {})

    @property
    def reasoning_tokens(self) -> int | None:
        """Sum over the choices; None: one is not known, or not wanted, so stock's count stays."""
        said_by = {choice: said for choice, (_, said) in self._choices.items() if said}
        counts = [self.count_of(choice, said) for choice, said in said_by.items()]
        known = [count for count in counts if count is not None]
        return sum(known) if known and len(known) == len(counts) else None

    def count_of(self, choice: int, num_tokens: int) -> int | None:
        """Reasoning tokens among the first ``num_tokens`` of a choice; None: as above."""
        progress, _ = self._choices.get(choice, (None, 0))
        if progress is None or not self._config.reasoning_tokens:
            return None
        return progress.reasoning_tokens(num_tokens)

    @property
    def times(self) -> dict[str, Any]:
        """What vLLM's metrics say of the only choice, where it thought; milliseconds."""
        if not self._config.times or len(self._choices) != 1:
            return {}
        ((progress, _),) = self._choices.values()
        known = {**self._summary, **milliseconds(progress)}
        return {shown: known[name] for name, shown in wire.METRICS.items() if name in known}

    def add_to(self, response: Any) -> None:
        """Write into a response of chat or of completions; an error response has no usage."""
        usage, count = getattr(response, "usage", None), self.reasoning_tokens
        if usage is not None and count is not None:
            setattr(usage, _DETAILS, CompletionTokenUsageInfo(reasoning_tokens=count))
        self.add_to_metrics(response)

    def add_to_metrics(self, response: Any) -> None:
        """Write into vLLM's ``PerRequestMetrics``, where the server has them."""
        metrics = getattr(response, "metrics", None)
        if metrics is not None:
            for name, value in self.times.items():
                # Load-bearing: response models keep unknown fields.
                setattr(metrics, name, value)

    def add_to_event(self, event: str) -> str:
        """Write counts into a server-sent event that has usage: of its choice, or of all."""
        if not self._choices or _HAS_USAGE not in event or not event.startswith(_EVENT):
            return event
        chunk = json.loads(event.removeprefix(_EVENT))
        usage, choices = chunk.get("usage"), chunk.get("choices")
        if not usage:
            return event
        count = self.reasoning_tokens
        if choices:
            # Load-bearing: usage beside a choice is that choice's, so far.
            count = self.count_of(choices[0]["index"], usage["completion_tokens"])
        if count is not None:
            usage[_DETAILS] = {"reasoning_tokens": count}
        if chunk.get("metrics"):
            chunk["metrics"] |= self.times
        return f"{_EVENT}{json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
