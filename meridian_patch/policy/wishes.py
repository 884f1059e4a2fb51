"""What a request asks of the policy by itself, in ``vllm_xargs``."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from meridian_patch.config.request_fields import NO_FIELDS, read_fields


class Wishes(NamedTuple):
    """None leaves a wish to the configuration.

    Attributes:
        itl_s: inter-token latency that the answer is to keep, in seconds.
        max_think_tokens: an upper bound on this request's thinking.
        priority: as vLLM's own, lower goes first; 0 where nothing is asked for.
    """

    itl_s: float | None = None
    max_think_tokens: int | None = None
    priority: int = 0


NO_WISHES: Final = Wishes()


def read_wishes(extra_args: Mapping[str, Any] | None) -> Wishes:
    """The policy's wishes among a request's extra arguments.

    Raises:
        ConfigError: one of our fields is wrong, the policy's or another; it names the field.
    """
    fields = read_fields(extra_args)
    if fields is NO_FIELDS:
        return NO_WISHES
    itl_ms = fields.meridian_itl_ms
    return Wishes(
        None if itl_ms is None else itl_ms / 1000,
        fields.meridian_max_think_tokens,
        fields.meridian_priority,
    )
