"""Counts what a reload from vLLM's KV tier saves, and measures how long reloads take."""

import time
from typing import TYPE_CHECKING, Any, Protocol

from meridian_patch.policy.reload_rate import ReloadRate, saved_share

if TYPE_CHECKING:
    from collections.abc import Callable

    from meridian_patch.policy.step_time import StepTimeModel

# Length of the prompt for which a recompute is compared to a reload.
_TYPICAL_TOKENS = 4096


class KeptTokens(Protocol):
    """How many tokens of a request a KV tier keeps.

    Attributes:
        has_thinking: generated tokens are kept too, not only prompts.
    """

    has_thinking: bool

    def __call__(self, request: Any) -> int:
        """Number of the request's computed tokens that would be loaded after a preemption."""


class Reloads:
    """Tokens of a request that a preemption would not lose, less what their reload costs.

    The cost of a reload is measured. Until a load ended a reload counts as free, and after a load
    that failed nothing counts as kept until one succeeds.

    Args:
        connector: vLLM's connector.
        kept: what it keeps of a request.

    Attributes:
        clock: seconds of a monotonic clock.
        model: predicts the time of a recompute; None: a reload counts as free.
    """

    def __init__(self, connector: Any, kept: KeptTokens) -> None:
        self.clock: Callable[[], float] = time.monotonic
        self.model: StepTimeModel | None = None
        self.has_thinking = kept.has_thinking
        self.rate = ReloadRate()
        self._kept = kept
        self._share = 1.0
        self._is_failing = False
        self._connector = connector
        self._start = connector.update_state_after_alloc
        # Load-bearing: the scheduler looks this attribute up in each call, made once per admission.
        connector.update_state_after_alloc = self._started

    def __call__(self, request: Any) -> int:
        """Tokens of ``request`` whose recompute is saved."""
        share = 0.0 if self._is_failing else self._share
        return int(self._kept(request) * share) if share else 0

    def received(self, model_output: Any) -> None:
        """Note the loads that a step's output reports as ended."""
        # Load-bearing: upstream reads these fields of the same object right after.
        report = getattr(model_output, "kv_connector_output", None)
        if report is None:
            return
        failed = set(getattr(report, "failed_recving", None) or ())
        # A request whose load failed in part is reported as received, too.
        is_invalid = bool(report.invalid_block_ids)
        for name in {*(report.finished_recving or ()), *failed}:
            is_loaded = name not in failed and not is_invalid
            if self.rate.ended(name, self.clock(), is_loaded=is_loaded):
                self._is_failing = not is_loaded
                self._compare()

    def on_removed(self, request: Any) -> None:
        """Forget a request that left the scheduler."""
        self.rate.ended(request.request_id, self.clock(), is_loaded=False)

    def stop(self) -> None:
        """Measure no more, because the ends of loads are not reported any more."""
        self._connector.update_state_after_alloc = self._start

    def _started(self, request: Any, blocks: Any, num_external_tokens: int) -> Any:
        if num_external_tokens:
            self.rate.started(request.request_id, num_external_tokens, self.clock())
        return self._start(request, blocks, num_external_tokens)

    def _compare(self) -> None:
        token_s = self.rate.seconds_per_token
        recompute_s = self.model.prefill_seconds(_TYPICAL_TOKENS) if self.model else None
        self._share = saved_share(recompute_s, token_s and token_s * _TYPICAL_TOKENS)
