"""Stock order: every decision is vLLM's own."""

from meridian_patch.policy.base import RequestView


class NoopPolicy:
    """Leaves the stock order alone; phases are still tracked and counted."""

    name = "noop"
    is_noop = True

    def rank(self, view: RequestView) -> tuple[int, int]:  # noqa: ARG002 - the interface
        """Equal for all: the stock order stays."""
        return 0, 0
