"""How far a live thought goes on between the place that a strategy judges and the close there."""

from typing import NamedTuple


class Lag(NamedTuple):
    """An engine's steps, as far as they delay a close.

    A probe goes through the engine as any request does: its result is there when the tokens of its
    step are, and the thought goes on meanwhile. A close then waits for the tokens that are on the
    way. With a token of the thought in step 0, and its next ones in steps ``stride_steps``,
    ``2 stride_steps``, ...:

    1. its tokens are known before step ``batches_in_flight`` is scheduled;
    2. a probe of it runs in that step, or ``wait_steps`` later;
    3. the result of a step is there before ``batches_in_flight`` steps later are scheduled.

    Counted in steps, each with one token of the thought: with speculation a step may bring more.

    Attributes:
        batches_in_flight: steps that are scheduled before the first one's tokens are known; 1 with
            synchronous scheduling, 2 with asynchronous scheduling.
        stride_steps: steps from one token of a request to its next; more than 1 with pipeline
            parallelism.
        block_tokens: tokens of a block of the KV cache.
        probe_every_steps: one step in so many may have probes.
    """

    batches_in_flight: int = 1
    stride_steps: int = 1
    block_tokens: int = 16
    probe_every_steps: int = 1

    def wait_steps(self, prefix_tokens: int, turn: int) -> int:
        """Steps that a probe waits for.

        Args:
            prefix_tokens: the request's tokens up to the place, its prompt's included. Where they
                fill their last block, the block is in the cache one token later.
            turn: steps to the next one that may have probes, below ``probe_every_steps``.
        """
        is_full = prefix_tokens % self.block_tokens == 0
        return turn + (self.stride_steps if is_full else 0)

    def result_step(self, wait_steps: int) -> int:
        """Step whose output holds the result of a probe of the token of step 0."""
        return self.batches_in_flight + wait_steps

    def tokens_before(self, step: int) -> int:
        """Tokens behind that of step 0 that are known when a step's probes are taken in."""
        return max(step - 1, 0) // self.stride_steps

    def tokens_at_close(self, step: int) -> int:
        """Tokens behind that of step 0 that come before a close that this step's output decides."""
        return (step + self.batches_in_flight - 1) // self.stride_steps
