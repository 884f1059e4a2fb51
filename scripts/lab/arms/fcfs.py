"""vLLM's own order with its options set for latency.

Source: vLLM's documentation of ``max_num_batched_tokens`` and ``long_prefill_token_threshold``.
Deviations: the two are set on the scheduler, not at start; the engine that a request's slowdown is
measured against keeps its own budget.
"""

from typing import Any

from arms.base import Arm


class FcfsTuned(Arm):
    """First come, first served.

    Attributes:
        budget: ``max_num_batched_tokens``.
        threshold: ``long_prefill_token_threshold``, tokens of one prompt per step; 0: no bound.
    """

    budget: int = 2048
    threshold: int = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Load-bearing: upstream reads it in each step.
        self.scheduler_config.long_prefill_token_threshold = self.threshold

    def token_budget(self) -> int | None:
        return self.budget


class SarathiStatic(Arm):
    """Sarathi-Serve: decodes first, and prefill in what is left of a fixed chunk.

    Source: Agrawal et al., OSDI'24 (arXiv 2403.02310). Deviations: none; vLLM's scheduler has
    descended from it, and fills a step's budget in the same order.

    Attributes:
        chunk: tokens of a step, decodes and prefill together.
    """

    chunk: int = 512

    def token_budget(self) -> int | None:
        return self.chunk
