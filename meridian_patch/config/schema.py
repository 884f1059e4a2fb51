"""The schema of the configuration, with all defaults."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from meridian_patch.config.exit_patterns import MOST_PATTERNS, Pattern, read_patterns
from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.config.policy import PolicyConfig
from meridian_patch.config.strict_model import StrictModel, not_empty_path

SCHEMA_VERSION: Literal[1] = 1
# Largest pattern of the loop breaker, in tokens: it bounds what a token costs at worst.
MOST_PATTERN_TOKENS = 1024

MAX_WRAP_UP_LENGTH = 500
"""Upper bound of a wrap-up's length, in characters."""

# Up to this number, integers in JSON are exact in every client.
MOST_TOKENS = 2**53


def _version(value: Any) -> Any:
    if type(value) is not int:
        # For Python, 1, 1.0 and True are equal.
        raise ValueError("the whole number 1")
    return value


def _patterns(value: Any) -> Any:
    return read_patterns(value, MOST_PATTERNS)


def _reserve(value: Any) -> Any:
    is_tokens = type(value) is int and 1 <= value <= MOST_TOKENS
    is_share = type(value) is float and 0 < value < 1
    if value is None or is_tokens or is_share:
        return value
    raise ValueError("a whole number of tokens, at least 1, or a share of max_tokens below 1")


Reserve = Annotated[int | float | None, BeforeValidator(_reserve)]
"""Tokens that are kept for an answer: a number of them, or a share of ``max_tokens``."""


class KvConfig(StrictModel):
    """Which free KV blocks are evicted first."""

    tiers: bool = Field(
        default=True,
        description="Evict blocks of finished thoughts before blocks that can be hit again. If "
        "off, with policy `noop`, or where vLLM 0.32 returns routed experts: vLLM's own order, "
        "least recently used first.",
    )
    retain_s: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds without a hit after which a block loses its precedence over blocks of "
        "preempted thinkers.",
    )
    history: Literal["auto", "strip", "keep", "keep_in_tool_loop"] = Field(
        default="auto",
        description="What clients and chat template do with the thinking of earlier turns. `auto`: "
        "as in the model's family file; if it is unknown there, outputs are kept as in stock.",
    )
    check_interval_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Least seconds between two integrity checks of the free blocks. A check runs "
        "when no request is left.",
    )


ExitMode = Literal["off", "observe", "enforce"]
"""What early exit does with a thought that it would close."""


class ExitConfig(StrictModel):
    """When thinking is ended early. Entropies are those of the raw logits, in nats.

    ``examples`` of a strategy's setting are values with which it fires within a few dozen tokens;
    tests and the simulation set the first one.
    """

    mode: ExitMode = Field(
        default="observe",
        description="`observe` decides and reports when thinking would be closed, and closes "
        "nothing; `enforce` closes it; `off` measures nothing.",
    )
    observed_at_a_time: int = Field(
        default=8,
        ge=1,
        description="Mode `observe`: upper bound of requests measured at a time. For a request "
        "that begins beyond it, only end and length of its thinking are known. A request that sets "
        "options of early exit is always measured, and so are all in mode `enforce`.",
    )
    min_think_tokens: int = Field(
        default=512,
        ge=0,
        description="Floor, in tokens: a shorter thought is not closed by any strategy. Thinking "
        "that is closed below about a seventh of its natural length continues in the answer.",
    )
    max_think_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Upper bound of all thoughts of a request together, in tokens; unset: none. "
        "vLLM's `thinking_token_budget` is one of each thought. A bound takes precedence over a "
        "higher floor.",
    )
    answer_reserve: Reserve = Field(
        default=None,
        description="[Answer reserve](early-exit.md#answer-reserve): tokens of a request's "
        "`max_tokens` that its thoughts leave to its answer; a value below 1 is a share, such as "
        "0.25. Unset: none. A request sets its own with `vllm_xargs: "
        "{meridian_answer_reserve: ...}`.",
    )
    grace_tokens: int = Field(
        default=64,
        ge=0,
        description="Tokens to wait for the end of a line before a thought is closed in the middle "
        "of one. Upper bounds still hold: for them the wait begins before the bound.",
    )
    wrap_up: str = Field(
        default="",
        max_length=MAX_WRAP_UP_LENGTH,
        description="[Wrap-up](early-exit.md#wrap-up): text that a forced close says before the "
        "end marker, at most 64 tokens. A family may have its own; empty: none. A request sets its "
        "own with `vllm_xargs: {meridian_wrap_up: ...}`.",
    )
    eat: bool = Field(
        default=True,
        description="Strategy: close a thought when the entropy after a trial boundary no longer "
        "changes (EAT, arXiv:2509.26522). Takes one probe per paragraph.",
    )
    eat_alpha: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="EAT: weight of the newest probe in the moving mean and variance, below 1.",
    )
    eat_delta: float = Field(
        default=4.8e-4,
        gt=0,
        allow_inf_nan=False,
        description="EAT: close when the moving variance is below this, in nats squared. The "
        "default is the authors' 1e-3 bits squared, which they measured at temperature 0.6. A "
        "request sets its own with `vllm_xargs: {meridian_eat_delta: ...}`.",
    )
    eat_warmup_probes: int = Field(
        default=20,
        examples=[2],
        ge=1,
        description="EAT: probes of a thought before it may be closed. Use about 4 / `eat_alpha`: "
        "with fewer, the variance still depends on its initial value.",
    )
    eat_max_entropy_nats: float | None = Field(
        default=1.0,
        examples=[None],
        gt=0,
        allow_inf_nan=False,
        description="EAT: a thought is closed only if the last probe's entropy is below this, in "
        "nats, because a steady high entropy is not convergence. Unset: no such condition. The "
        "default is a guess.",
    )
    probe_min_gap_tokens: int = Field(
        default=64,
        ge=1,
        description="EAT: the end of a paragraph is probed if the last probe is at least this many "
        "tokens back.",
    )
    probe_max_gap_tokens: int = Field(
        default=256,
        ge=1,
        description="EAT: upper bound of tokens between two probes, also within a paragraph.",
    )
    probes_in_flight: int = Field(
        default=16,
        ge=1,
        description="EAT: most probes in one step; others that are due wait for the next step with "
        "probes.",
    )
    probe_every_steps: int = Field(
        default=8,
        ge=1,
        description="EAT: at most one step in so many has probes; those that become due in between "
        "run together, and those that it has no tokens or seats left for in the next steps. A step "
        "with probes cannot use the full CUDA graph of decode steps, so this bounds how many steps "
        "are slower. It delays a result, and a close, by up to this number minus 1 steps of one "
        "token each (7 by default, compared with the 64 tokens of `probe_min_gap_tokens`). "
        "Calibration includes this in the lag. Where graphs run decodes, probes that only observe "
        "wait up to 32 steps for one with prompts.",
    )
    probe_context_tokens: int = Field(
        default=32_768,
        ge=1,
        description="EAT: upper bound of the tokens before the trial boundaries, summed over the "
        "probes of one step; a single probe may have more. A probe's CPU time grows with its "
        "context; `scripts/lab/benches.py probe-micro` prints it.",
    )
    rpdi: bool = Field(
        default=True,
        description="Strategy: close a thought that has derailed, which shows as a high entropy of "
        "its last tokens relative to its mean (RPDI, arXiv:2603.14251). Needs no probe.",
    )
    rpdi_window_tokens: int = Field(
        default=512,
        examples=[16],
        ge=1,
        description="RPDI: number of last think tokens whose mean entropy is compared with that of "
        "the whole thought.",
    )
    rpdi_lambda: float = Field(
        default=2.0,
        examples=[1.2],
        gt=1,
        allow_inf_nan=False,
        description="RPDI: close at the end of a sentence when the quotient of both means is above "
        "this, at the earliest after `rpdi_lambda` windows. A request sets its own with "
        "`vllm_xargs: {meridian_rpdi_lambda: ...}`.",
    )
    end_probability: bool = Field(
        default=False,
        description="Strategy: close a thought when the model gives its end boundary a high "
        "probability.",
    )
    end_probability_threshold: float = Field(
        default=0.5,
        examples=[0.3],
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Least probability of the end boundary's first token, at most 1.",
    )
    end_probability_patience: int = Field(
        default=3,
        examples=[1],
        ge=1,
        description="Number of tokens of a thought, not necessarily adjacent, at which the "
        "boundary must have at least this probability; the thought is closed at the last of them.",
    )
    loop: bool = Field(
        default=False,
        description="Strategy: close a thought whose last tokens are one pattern, several times in "
        "a row. The settings mean what they mean in vLLM's `repetition_detection`, which aborts "
        "such a request.",
    )
    loop_max_pattern_size: int = Field(
        default=256,
        examples=[12],
        ge=1,
        le=MOST_PATTERN_TOKENS,
        description="Loop: most tokens of the pattern. A request sets its own with `vllm_xargs: "
        "{meridian_loop_max_pattern_size: ...}`.",
    )
    loop_min_pattern_size: int = Field(
        default=8,
        examples=[4],
        ge=0,
        description="Loop: least tokens of the pattern; 0 means 1. A shorter pattern is found as "
        "several of its kind. The default is a guess: short rows of one token are usual in code, "
        "tables and numbers. Where `loop_max_pattern_size` is set and this is not, it is 1, as in "
        "vLLM.",
    )
    loop_min_count: int = Field(
        default=4,
        examples=[3],
        ge=2,
        description="Loop: how often the pattern must stand there. The default is a guess.",
    )
    loop_scope: Literal["thought", "all"] = Field(
        default="thought",
        description="Loop: where loops are looked for. `all`: in answers, too; a request whose "
        "answer loops ends with the finish reason `repetition`, in mode `enforce`. A request sets "
        "its own with `vllm_xargs: {meridian_loop_scope: ...}`.",
    )
    patterns: Annotated[tuple[Pattern, ...], BeforeValidator(_patterns)] = Field(
        default=(),
        description="Strategy: close a thought that holds one of these patterns, at most 64: texts "
        "of up to 100 bytes, or lists of token ids. A text that the tokenizer cannot write as "
        "tokens of its own is refused at the start. A request sets its own with `vllm_xargs: "
        "{meridian_exit_patterns: [...]}`.",
    )
    trace: Annotated[Path | None, BeforeValidator(not_empty_path)] = Field(
        default=None,
        strict=False,
        description="File to which probe results, verdicts and ends of thoughts are appended, as "
        "JSON lines ([format](exit-trace.md)). A relative path is relative to the configuration "
        "file's directory, or to the working directory if set in the environment. Unset: no trace "
        "is written.",
    )

    @model_validator(mode="after")
    def _fit_sizes(self) -> Self:
        is_set = self.model_fields_set & {"loop_max_pattern_size", "loop_min_pattern_size"}
        if is_set == {"loop_max_pattern_size"}:
            # The model is frozen from here on. The field stays unset, so that a value of the
            # family's file is not overruled.
            object.__setattr__(self, "loop_min_pattern_size", 1)
        return self

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        most, is_set = self.max_think_tokens, "min_think_tokens" in self.model_fields_set
        if is_set and most is not None and self.min_think_tokens > most:
            raise ValueError(
                f"min_think_tokens ({self.min_think_tokens}) to be at most max_think_tokens "
                f"({most})"
            )
        if self.probe_min_gap_tokens > self.probe_max_gap_tokens:
            raise ValueError(
                f"probe_min_gap_tokens ({self.probe_min_gap_tokens}) to be at most "
                f"probe_max_gap_tokens ({self.probe_max_gap_tokens})"
            )
        if self.loop_min_pattern_size > self.loop_max_pattern_size:
            raise ValueError(
                f"loop_min_pattern_size ({self.loop_min_pattern_size}) to be at most "
                f"loop_max_pattern_size ({self.loop_max_pattern_size})"
            )
        return self


RequestField = Literal[
    "meridian_itl_ms",
    "meridian_priority",
    "meridian_max_think_tokens",
    "meridian_min_think_tokens",
    "meridian_exit",
    "meridian_eat_delta",
    "meridian_rpdi_lambda",
    "meridian_loop_max_pattern_size",
    "meridian_loop_min_pattern_size",
    "meridian_loop_min_count",
    "meridian_wrap_up",
    "meridian_stop_scope",
    "meridian_exit_patterns",
    "meridian_answer_reserve",
    "meridian_loop_scope",
    "meridian_history",
]


# What these may take from other requests is bounded by the configuration, whatever their values.
_HARMLESS_FIELDS: list[RequestField] = [
    "meridian_max_think_tokens",
    "meridian_min_think_tokens",
    "meridian_exit",
    "meridian_eat_delta",
    "meridian_rpdi_lambda",
    "meridian_wrap_up",
    "meridian_stop_scope",
    "meridian_answer_reserve",
    "meridian_history",
]


def _field_names(value: Any) -> Any:
    names = get_args(RequestField)
    if value == "all" or (isinstance(value, list) and all(name in names for name in value)):
        return value
    raise ValueError(f"'all' or a list of names among {', '.join(names)}")


class RequestsConfig(StrictModel):
    """Which options requests may set, and their defaults."""

    allowed_fields: Annotated[Literal["all"] | list[str], BeforeValidator(_field_names)] = Field(
        default=[*_HARMLESS_FIELDS],
        description="Fields of `vllm_xargs` that requests may set: `all`, or a list of "
        "[their names](requests.md); an empty list allows none. A request with another "
        "`meridian_*` field is refused with HTTP 400. The default leaves out those that may "
        "[take from other requests](security.md#what-a-request-may-set) without a bound.",
    )
    stop_scope: Literal["all", "answer"] = Field(
        default="all",
        description="Where [stop strings](requests.md#stop-strings) match: `all`, as in stock "
        "vLLM, or `answer`, not in thoughts. A request sets its own with "
        "`vllm_xargs: {meridian_stop_scope: ...}`.",
    )


class ResponsesConfig(StrictModel):
    """What responses say besides their texts."""

    reasoning_tokens: bool = Field(
        default=True,
        description="Whether `usage` counts the [tokens of thoughts](requests.md#reasoning-tokens) "
        "as `reasoning_tokens`. False leaves stock's count, which some parsers do not give.",
    )
    times: bool = Field(
        default=True,
        description="Whether the field `meridian` of a choice that thought has its "
        "[times](requests.md#how-thinking-ended).",
    )
    think_stream_interval: int | None = Field(
        default=None,
        ge=1,
        description="Think tokens in one piece of a stream, as vLLM's `--stream-interval` for all "
        "tokens: fewer pieces take less processor time from the API server and the client. Answers "
        "come as ever. Unset: 8 on an engine with the [role](handoff.md) `think`, else 1.",
    )


class MetricsConfig(StrictModel):
    """Metrics that EngineCore exports itself."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65_535,
        description="Port on which EngineCore serves the [metrics](metrics.md) of this package; "
        "a data-parallel rank adds its index. 0: none. Unset: 18000 behind vLLM's [front end in "
        "Rust](rust-front-end.md), else none, because the API server exports them.",
    )
    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="Address on which it listens; `0.0.0.0` for a Prometheus on another machine.",
    )


class Config(StrictModel):
    """The whole configuration."""

    version: Annotated[Literal[1], BeforeValidator(_version)] = Field(
        default=SCHEMA_VERSION, description="Version of this format. Required in a file."
    )
    family: str | None = Field(
        default=None,
        description="Forces a model family by name. Unset: the family is found from the model.",
    )
    families_dir: Annotated[Path | None, BeforeValidator(not_empty_path)] = Field(
        default=None,
        strict=False,
        description="Directory of family files that are added or replace packaged ones. A relative "
        "path is relative to the configuration file's directory, or to the working directory if "
        "set in the environment.",
    )
    policy: PolicyConfig = Field(
        default_factory=PolicyConfig, description="How running requests are ordered."
    )
    kv: KvConfig = Field(
        default_factory=KvConfig, description="Which free KV blocks are evicted first."
    )
    exit: ExitConfig = Field(
        default_factory=ExitConfig, description="When thinking is ended early."
    )
    handoff: HandoffConfig = Field(default_factory=HandoffConfig, description="Engines with roles.")
    requests: RequestsConfig = Field(
        default_factory=RequestsConfig,
        description="Which options requests may set, and their defaults.",
    )
    responses: ResponsesConfig = Field(
        default_factory=ResponsesConfig, description="What responses say besides their texts."
    )
    metrics: MetricsConfig = Field(
        default_factory=MetricsConfig, description="Metrics that EngineCore exports itself."
    )
    provenance: dict[str, Any] | None = Field(
        default=None,
        description="Where the file's values come from: `meridian calibrate` writes model, data, "
        "date and curve here. Only its `lag` is read: an engine with a different lag logs a "
        "warning when it starts.",
    )
