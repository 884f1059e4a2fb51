"""A custom logits processor of a server that forbids the tiny reasoner's boundary."""

from vllm.v1.sample.logits_processor import LogitsProcessor

THINK_END = 257


class Forbidding(LogitsProcessor):
    def __init__(self, vllm_config, device, is_pin_memory) -> None:
        """Keeps nothing."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update) -> None:
        """Treats all requests alike."""

    def apply(self, logits):
        logits[:, THINK_END] = -float("inf")
        return logits
