"""What a request asks of the policy by itself, in ``vllm_xargs``."""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from pydantic import Field, ValidationError

from meridian_patch.config.schema import StrictModel
from meridian_patch.errors import ConfigError

PREFIX = "meridian_"


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


class _Fields(StrictModel):
    meridian_itl_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    meridian_max_think_tokens: int | None = Field(default=None, ge=1)
    meridian_priority: int = 0


def read_wishes(extra_args: Mapping[str, Any] | None) -> Wishes:
    """The wishes among a request's extra arguments; those of others are left alone.

    Raises:
        ConfigError: an unknown name of ours, or a value out of its range; it names the field.
    """
    ours = {name: value for name, value in (extra_args or {}).items() if name.startswith(PREFIX)}
    if not ours:
        return NO_WISHES
    try:
        fields = _Fields(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        known = ", ".join(_Fields.model_fields)
        raise ConfigError(
            f"vllm_xargs field {first['loc'][0]} is {first['input']!r}: {first['msg']}; "
            f"known fields: {known}"
        ) from error
    itl_ms = fields.meridian_itl_ms
    return Wishes(
        None if itl_ms is None else itl_ms / 1000,
        fields.meridian_max_think_tokens,
        fields.meridian_priority,
    )
