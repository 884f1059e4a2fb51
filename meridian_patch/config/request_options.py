"""Parses the ``meridian_*`` fields that a request sets in ``vllm_xargs``."""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from meridian_patch.config.exit_patterns import MOST_OF_A_REQUEST, Pattern, read_patterns
from meridian_patch.config.schema import (
    MAX_WRAP_UP_LENGTH,
    MOST_PATTERN_TOKENS,
    MOST_TOKENS,
    ExitConfig,
    Reserve,
)
from meridian_patch.config.strict_model import StrictModel
from meridian_patch.config.validate import cut, shown
from meridian_patch.errors import ConfigError

PREFIX = "meridian_"


def _patterns(value: Any) -> Any:
    return None if value is None else read_patterns(value, MOST_OF_A_REQUEST)


class RequestOptions(StrictModel):
    """The options of one request; None: the configuration's value.

    Attributes:
        meridian_itl_ms: target of the answer's inter-token latency, in milliseconds.
        meridian_priority: lower goes first, as in vLLM; 0 if it is not set.
        meridian_max_think_tokens: upper bound of all thoughts together, in tokens.
        meridian_min_think_tokens: think tokens before which no strategy closes the thought.
        meridian_exit: the mode of early exit.
        meridian_eat_delta: threshold of EAT, in nats squared; switches it on.
        meridian_rpdi_lambda: threshold of RPDI, a quotient; switches it on.
        meridian_loop_max_pattern_size: most tokens of a pattern that is a loop; this and the next
            two switch the loop breaker on.
        meridian_loop_min_pattern_size: least tokens of it; 0 means 1.
        meridian_loop_min_count: how often it must stand there.
        meridian_wrap_up: sentence that a forced close says before the end marker; empty: none.
        meridian_stop_scope: where stop strings match; the API server reads it.
        meridian_exit_patterns: texts, or token ids, that end a thought; in place of the
            configuration's.
        meridian_loop_scope: where loops are looked for; switches the loop breaker on.
        meridian_answer_reserve: tokens of ``max_tokens``, or a share of it below 1, that thoughts
            leave to the answer.
        meridian_history: what later prompts of its conversation hold of its thoughts.
    """

    meridian_itl_ms: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    meridian_priority: int = Field(default=0, ge=-MOST_TOKENS, le=MOST_TOKENS)
    meridian_max_think_tokens: int | None = Field(default=None, ge=1, le=MOST_TOKENS)
    meridian_min_think_tokens: int | None = Field(default=None, ge=0, le=MOST_TOKENS)
    meridian_exit: Literal["off", "observe", "enforce"] | None = None
    meridian_eat_delta: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    meridian_rpdi_lambda: float | None = Field(default=None, gt=1, allow_inf_nan=False)
    meridian_loop_max_pattern_size: int | None = Field(default=None, ge=1, le=MOST_PATTERN_TOKENS)
    meridian_loop_min_pattern_size: int | None = Field(default=None, ge=0, le=MOST_PATTERN_TOKENS)
    meridian_loop_min_count: int | None = Field(default=None, ge=2, le=MOST_TOKENS)
    meridian_wrap_up: str | None = Field(default=None, max_length=MAX_WRAP_UP_LENGTH)
    meridian_stop_scope: Literal["all", "answer"] | None = None
    meridian_exit_patterns: Annotated[tuple[Pattern, ...] | None, BeforeValidator(_patterns)] = None
    meridian_answer_reserve: Reserve = None
    meridian_loop_scope: Literal["thought", "all"] | None = None
    meridian_history: Literal["strip", "keep", "keep_in_tool_loop"] | None = None

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        least, most = self.meridian_min_think_tokens, self.meridian_max_think_tokens
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"field meridian_min_think_tokens is {least}, expected at most "
                f"meridian_max_think_tokens, which is {most}"
            )
        least, most = self.meridian_loop_min_pattern_size, self.meridian_loop_max_pattern_size
        if least is not None and most is not None and least > most:
            raise ValueError(
                f"field meridian_loop_min_pattern_size is {least}, expected at most "
                f"meridian_loop_max_pattern_size, which is {most}"
            )
        return self

    @property
    def itl_s(self) -> float | None:
        """``meridian_itl_ms`` in seconds."""
        return None if self.meridian_itl_ms is None else self.meridian_itl_ms / 1000

    @property
    def has_exit_options(self) -> bool:
        """Whether the request sets any option of early exit."""
        return bool(self._exit_settings())

    def exit_config(self, config: ExitConfig) -> ExitConfig:
        """The configuration of early exit with this request's options applied.

        If the request sets only one bound and the floor is then above the maximum, the maximum is
        used. Where it sets the greatest size of a loop's pattern alone, the least is vLLM's: with
        that of the configuration it might never find a loop.
        """
        settings = self._exit_settings()
        if not settings:
            return config
        return config.model_copy(update=settings | self._fit_sizes(config))

    def _exit_settings(self) -> dict[str, Any]:
        settings = {
            "mode": self.meridian_exit,
            "max_think_tokens": self.meridian_max_think_tokens,
            "min_think_tokens": self.meridian_min_think_tokens,
            "eat_delta": self.meridian_eat_delta,
            "eat": None if self.meridian_eat_delta is None else True,
            "rpdi_lambda": self.meridian_rpdi_lambda,
            "rpdi": None if self.meridian_rpdi_lambda is None else True,
            "loop_max_pattern_size": self.meridian_loop_max_pattern_size,
            "loop_min_pattern_size": self.meridian_loop_min_pattern_size,
            "loop_min_count": self.meridian_loop_min_count,
            "loop_scope": self.meridian_loop_scope,
            "loop": self._has_loop or None,
            "wrap_up": self.meridian_wrap_up,
            "patterns": self.meridian_exit_patterns,
            "answer_reserve": self.meridian_answer_reserve,
        }
        return {name: value for name, value in settings.items() if value is not None}

    @property
    def _has_loop(self) -> bool:
        sizes = self.meridian_loop_min_pattern_size, self.meridian_loop_max_pattern_size
        others = self.meridian_loop_min_count, self.meridian_loop_scope
        return any(value is not None for value in (*sizes, *others))

    def _fit_sizes(self, config: ExitConfig) -> dict[str, int]:
        """Both sizes of a loop's pattern, where one is the request's and the other is not."""
        least, most = self.meridian_loop_min_pattern_size, self.meridian_loop_max_pattern_size
        if least is None and most is not None:
            return {"loop_min_pattern_size": 1}
        if most is None and least is not None:
            return {"loop_max_pattern_size": max(config.loop_max_pattern_size, least)}
        return {}


NO_OPTIONS: Final = RequestOptions()

HISTORY: Final = "meridian_history"
WRAP_UP: Final = "meridian_wrap_up"

# Arguments of chat templates, and their values with which earlier thoughts stay in the prompt.
_KEEPING: Final = {
    "preserve_thinking": True,
    "clear_thinking": False,
    "truncate_history_thinking": False,
    "drop_thinking": False,
}


def kept_history(template_arguments: Mapping[str, Any] | None) -> str | None:
    """What a request's arguments of its chat template say of earlier thoughts, as ``HISTORY``.

    Templates that have such an argument drop thoughts at the next user's turn without it.

    Returns:
        ``keep`` or ``keep_in_tool_loop``; None if they say nothing.
    """
    known = [
        (template_arguments or {})[name] is value
        for name, value in _KEEPING.items()
        if isinstance((template_arguments or {}).get(name), bool)
    ]
    if not known:
        return None
    return "keep" if any(known) else "keep_in_tool_loop"


def check_reserve(options: RequestOptions, max_tokens: int | None) -> None:
    """Refuse a reserve that leaves a request nothing to think.

    Args:
        options: of the request.
        max_tokens: upper bound of its output; None: it sets none.

    Raises:
        ConfigError: the message names the field, its value and the bound.
    """
    reserve = options.meridian_answer_reserve
    # One token is what a proxy asks of an engine that computes prompts for others.
    if reserve is None or max_tokens is None or max_tokens == 1:
        return
    if reserve >= max_tokens:
        raise ConfigError(
            f"vllm_xargs field meridian_answer_reserve is {reserve}, expected less than "
            f"max_tokens, which is {max_tokens}: nothing would be left to think"
        )


def stop_scope(extra_args: Mapping[str, Any] | None, default: str) -> str:
    """Where a request's stop strings match: ``all`` or ``answer``.

    Args:
        extra_args: of the request, whose ``meridian_*`` fields have been checked.
        default: ``requests.stop_scope``.
    """
    return str((extra_args or {}).get("meridian_stop_scope") or default)


def allowed_names(allowed: Sequence[str] | Literal["all"]) -> frozenset[str]:
    """The names of the fields that ``requests.allowed_fields`` allows."""
    return frozenset(RequestOptions.model_fields if allowed == "all" else allowed)


def check_allowed(extra_args: Mapping[str, Any] | None, allowed: AbstractSet[str]) -> None:
    """Refuse known ``meridian_*`` fields that the operator does not allow.

    Raises:
        ConfigError: the message names the first such field, and those that are allowed.
    """
    refused = refused_names(extra_args, allowed)
    if refused:
        raise ConfigError(
            f"vllm_xargs field {refused[0]} is not allowed on this server "
            f"(requests.allowed_fields), expected only: {', '.join(sorted(allowed)) or 'none'}"
        )


def refused_names(extra_args: Mapping[str, Any] | None, allowed: AbstractSet[str]) -> list[str]:
    """The known ``meridian_*`` fields among a request's extra arguments that are not allowed."""
    known = RequestOptions.model_fields
    if len(allowed) == len(known):
        return []
    return [name for name in extra_args or () if name in known and name not in allowed]


def parse_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """The options among a request's extra arguments; other arguments are ignored.

    Raises:
        ConfigError: an unknown ``meridian_*`` field or a value out of range; the message names the
            field, its value and what was expected.
    """
    ours = {name: value for name, value in (extra_args or {}).items() if name.startswith(PREFIX)}
    if not ours:
        return NO_OPTIONS
    try:
        return RequestOptions(**ours)
    except ValidationError as error:
        raise ConfigError(_describe(error)) from error


def _describe(error: ValidationError) -> str:
    first = error.errors()[0]
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    if not first["loc"]:
        return f"vllm_xargs {expected}"
    if first["type"] == "extra_forbidden":
        expected = "a field that exists"
    field, value = cut(str(first["loc"][0])), shown(first["input"])
    return (
        f"vllm_xargs field {field} is {value}, expected {expected}; "
        f"known fields: {', '.join(RequestOptions.model_fields)}"
    )
