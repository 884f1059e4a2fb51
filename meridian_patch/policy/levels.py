"""Levels of attained service: who has had most waits for whom (multi-level feedback)."""

from dataclasses import dataclass
from typing import Self

from meridian_patch.config.policy import PolicyConfig


@dataclass(frozen=True)
class Levels:
    """The level of a request; the lower goes first.

    Each level holds twice the tokens of the one before it, so that few changes of level, and few
    preemptions, separate a short thought from the longest one.

    Attributes:
        first_tokens: tokens with which level 0 ends.
        prompt_weight: think tokens that a prompt token counts as. A prompt takes its share of the
            steps and of the KV pool, and its length is known before it begins.
    """

    first_tokens: int
    prompt_weight: float

    @classmethod
    def of_config(cls, config: PolicyConfig) -> Self:
        """From the configuration."""
        return cls(config.level_tokens, config.prompt_weight)

    def of(self, think_tokens: int, prompt_tokens: int) -> int:
        """Level of a request with so many think tokens so far, and so long a prompt."""
        attained = think_tokens + int(self.prompt_weight * prompt_tokens)
        return (attained // self.first_tokens).bit_length()
