"""What a request may ask for by itself, in ``vllm_xargs``: every field of ours, checked once."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Final, Literal, Self

from pydantic import Field, ValidationError, model_validator

from meridian_patch.config.schema import StrictModel
from meridian_patch.errors import ConfigError

PREFIX = "meridian_"

# JSON numbers up to here are whole in every client.
_MOST = 2**53


class RequestFields(StrictModel):
    """None leaves a field to the configuration."""

    meridian_itl_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    meridian_priority: int = Field(default=0, ge=-_MOST, le=_MOST)
    meridian_max_think_tokens: int | None = Field(default=None, ge=1, le=_MOST)
    meridian_min_think_tokens: int | None = Field(default=None, ge=0, le=_MOST)
    meridian_exit: Literal["off", "observe", "enforce"] | None = None
    meridian_eat_delta: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    meridian_rpdi_lambda: float | None = Field(default=None, gt=1, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        least, most = self.meridian_min_think_tokens, self.meridian_max_think_tokens
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"field meridian_min_think_tokens is {least}, expected at most "
                f"meridian_max_think_tokens, which is {most}"
            )
        return self


NO_FIELDS: Final = RequestFields()


def allowed_names(allowed: Sequence[str] | Literal["all"]) -> frozenset[str]:
    """The names of the fields that ``requests.allowed_fields`` lets through."""
    return frozenset(RequestFields.model_fields if allowed == "all" else allowed)


def check_allowed(extra_args: Mapping[str, Any] | None, allowed: AbstractSet[str]) -> None:
    """Refuse fields of ours that exist and that the operator does not allow.

    Raises:
        ConfigError: it names the first such field, and those that are allowed.
    """
    refused = refused_names(extra_args, allowed)
    if refused:
        raise ConfigError(
            f"vllm_xargs field {refused[0]} is not allowed on this server "
            f"(requests.allowed_fields), expected only: {', '.join(sorted(allowed)) or 'none'}"
        )


def refused_names(extra_args: Mapping[str, Any] | None, allowed: AbstractSet[str]) -> list[str]:
    """Our fields among a request's extra arguments that exist and are not allowed."""
    known = RequestFields.model_fields
    if len(allowed) == len(known):
        return []
    return [name for name in extra_args or () if name in known and name not in allowed]


def read_fields(extra_args: Mapping[str, Any] | None) -> RequestFields:
    """Our fields among a request's extra arguments; those of others are left alone.

    Raises:
        ConfigError: an unknown name of ours, or a value out of its range; it names the field,
            what came and what was expected.
    """
    ours = {name: value for name, value in (extra_args or {}).items() if name.startswith(PREFIX)}
    if not ours:
        return NO_FIELDS
    try:
        return RequestFields(**ours)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from error


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if not first["loc"]:
        return f"vllm_xargs {expected}"
    if first["type"] == "extra_forbidden":
        expected = "a field that exists"
    return (
        f"vllm_xargs field {first['loc'][0]} is {first['input']!r}, expected {expected}; "
        f"known fields: {', '.join(RequestFields.model_fields)}"
    )
