"""Computes how many tokens a thought continues between a strategy's decision and the close."""

from typing import NamedTuple


class Lag(NamedTuple):
    """The properties of an engine that delay a close.

    A probe is scheduled as any request: its result arrives with the output of its step, and the
    thought continues meanwhile. A close then waits for tokens in flight. If a token of the thought
    is in step 0, and its next ones in steps ``stride_steps``, ``2 stride_steps``, ...:

    1. the token is known before step ``batches_in_flight`` is scheduled;
    2. a probe after it runs in that step, or ``wait_steps`` later;
    3. the output of step n is known before step n + ``batches_in_flight`` is scheduled.

    All counts assume one token of the thought per step; with speculation there may be more.

    Attributes:
        batches_in_flight: number of steps that are scheduled before the first one's tokens are
            known; 1 with synchronous scheduling, 2 with asynchronous scheduling.
        stride_steps: steps from one token of a request to its next; more than 1 with pipeline
            parallelism.
        block_tokens: tokens of a KV cache block.
        probe_every_steps: at most one step in so many has probes.
    """

    batches_in_flight: int = 1
    stride_steps: int = 1
    block_tokens: int = 16
    probe_every_steps: int = 1

    def wait_steps(self, prefix_tokens: int, turn: int) -> int:
        """Number of steps that a probe waits before it runs.

        Args:
            prefix_tokens: the request's tokens before the trial boundary, its prompt included. If
                they fill their last block, that block is in the cache one token later.
            turn: steps until the next one that may have probes, below ``probe_every_steps``.
        """
        is_full = prefix_tokens % self.block_tokens == 0
        return turn + (self.stride_steps if is_full else 0)

    def result_step(self, wait_steps: int) -> int:
        """Number of the step whose output has the result of a probe after the token of step 0."""
        return self.batches_in_flight + wait_steps

    def tokens_before(self, step: int) -> int:
        """Tokens after that of step 0 that are known when a step's probe results are processed."""
        return max(step - 1, 0) // self.stride_steps

    def tokens_at_close(self, step: int) -> int:
        """Tokens after that of step 0 and before a close decided by this step's output."""
        return (step + self.batches_in_flight - 1) // self.stride_steps
