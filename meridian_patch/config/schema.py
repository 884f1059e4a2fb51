"""What can be configured. The defaults are the product's behaviour."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

SCHEMA_VERSION: Literal[1] = 1


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def _off(value: Any) -> Any:
    # YAML 1.1 reads a bare `off` as false.
    return "off" if value is False else value


class PolicyConfig(StrictModel):
    """How requests are ordered, admitted and preempted, and how much prefill a step takes."""

    name: Literal["latency", "throughput", "fair", "noop"] = Field(
        default="latency",
        description="`latency` serves answers before thinking and lets newcomers in; `throughput` "
        "spends what answers are ahead of their pace on prefill; `fair` makes nobody pay for "
        "having thought for long; `noop` decides as stock vLLM does.",
    )
    order: bool | None = Field(
        default=None,
        description="Rule: answers are served first and preempted last. Unset, as for all rules: "
        "as the policy named above has it.",
    )
    victims: bool | None = Field(
        default=None,
        description="Rule: among thinkers, the one that loses the least work is preempted first.",
    )
    step_cut: bool | None = Field(
        default=None,
        description="Rule: while somebody reads an answer, prefill may make a step only so much "
        "longer.",
    )
    pacing: bool | None = Field(
        default=None,
        description="Rule: what answers are ahead of their pace is time that prefill may use.",
    )
    admission: bool | None = Field(
        default=None,
        description="Rule: a request is admitted when what runs is forecast to leave room for it.",
    )
    time_sharing: bool | None = Field(
        default=None,
        description="Rule: a newcomer may take the place of a request that has thought for long.",
    )
    protected_answer_tokens: int = Field(
        default=16,
        ge=0,
        description="Answer tokens after the boundary during which a request stands before all "
        "others, so that its first words come without a stall.",
    )
    max_preemptions: int = Field(
        default=3,
        ge=1,
        description="A thinking request that was preempted this often is protected among "
        "thinking requests.",
    )
    answer_itl_ms: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Inter-token latency that answers are to keep, in milliseconds. Unset: "
        "`step_cut_factor` times what a step takes without prefill. A request sets its own with "
        "`vllm_xargs: {meridian_itl_ms: ...}`.",
    )
    step_cut_factor: float = Field(
        default=1.2,
        gt=1,
        allow_inf_nan=False,
        description="How much longer than without prefill a step may take at most while somebody "
        "reads an answer, where no inter-token latency is asked for.",
    )
    think_batch_multiplier: float = Field(
        default=2.5,
        ge=1,
        allow_inf_nan=False,
        description="The engine's token budget per step over the greatest budget while somebody "
        "answers, until enough steps were timed to predict their length.",
    )
    min_prefill_tokens: int = Field(
        default=64,
        ge=1,
        description="Prefill tokens that a step may always have, whatever answers ask for.",
    )
    drain_s: float = Field(
        default=5.0,
        gt=0,
        allow_inf_nan=False,
        description="Saturation guard: where a cut was used up in every step for this many "
        "seconds, steps may take twice as long each time as many seconds pass, until prefill has "
        "half of them.",
    )
    admission_reserve_tokens: int = Field(
        default=64,
        ge=0,
        description="Growth that admission expects of each running request until enough requests "
        "have ended to forecast it.",
    )
    admission_overcommit: float = Field(
        default=1.4,
        gt=0,
        allow_inf_nan=False,
        description="How much of the KV pool the forecast peak of all running requests may take; "
        "above 1 counts on requests ending sooner than forecast.",
    )
    sharing_min_tokens: int = Field(
        default=2000,
        ge=1,
        description="Think tokens after which a request may be made to wait for newcomers.",
    )
    sharing_overhead: float = Field(
        default=0.05,
        ge=0,
        le=1,
        description="Share of the engine's time that may go into computing again what "
        "time-sharing threw away.",
    )
    aging_s: float = Field(
        default=30.0,
        gt=0,
        allow_inf_nan=False,
        description="A request that was preempted stands before all others after waiting this "
        "long, and long thinkers make room for it; with time_sharing only.",
    )
    time_budget_us: int = Field(
        default=3000,
        ge=50,
        description="Time for one scheduling decision, in microseconds. A decision that takes "
        "longer is dropped and the step runs as stock.",
    )


class KvConfig(StrictModel):
    """Which free KV blocks are evicted first."""

    tiers: bool = Field(
        default=True,
        description="Evict finished thoughts before what can be hit again. Off, and with policy "
        "`noop`: vLLM's own order, least recently used first.",
    )
    retain_s: float = Field(
        default=300.0,
        gt=0,
        allow_inf_nan=False,
        description="Seconds after which a block that nobody hit loses its precedence over "
        "blocks of preempted thinkers.",
    )
    history: Literal["auto", "strip", "keep", "keep_in_tool_loop"] = Field(
        default="auto",
        description="What clients and chat template do with earlier turns' thinking. `auto`: as "
        "the model's family file says; where it does not know, outputs are kept as stock does.",
    )
    check_interval_s: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        description="Least seconds between two integrity checks of the free blocks. They run "
        "when no request is left.",
    )


class ExitConfig(StrictModel):
    """When thinking is ended early. Entropies are those of the raw logits, in nats."""

    mode: Annotated[Literal["off", "observe", "enforce"], BeforeValidator(_off)] = Field(
        default="observe",
        description="`observe` decides and reports when thinking would be closed, and closes "
        "nothing; `enforce` closes it; `off` measures nothing.",
    )
    observed_at_a_time: int = Field(
        default=8,
        ge=1,
        description="Mode `observe`: a request that begins while so many thoughts are being "
        "measured is not; of its thinking only end and length are known. A request that asks for "
        "anything of early exit is always measured, and so are all in mode `enforce`.",
    )
    min_think_tokens: int = Field(
        default=512,
        ge=0,
        description="Floor, in tokens: a thought is not closed before it is this long, however "
        "sure a strategy is. Thinking that is cut below about a seventh of its natural length "
        "goes on in the answer.",
    )
    max_think_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Upper bound of one thought, in tokens; unset: none. A request's "
        "`thinking_token_budget` is one too. Where a bound is lower than the floor, the bound "
        "counts.",
    )
    grace_tokens: int = Field(
        default=64,
        ge=0,
        description="Tokens that a strategy waits for the end of a line before it closes in the "
        "middle of one. Upper bounds are kept: for them the wait lies before the bound.",
    )
    eat: bool = Field(
        default=True,
        description="Strategy: close a thought whose answer no longer changes, seen by the "
        "entropy after a trial boundary (EAT, arXiv:2509.26522). Costs one probe per paragraph.",
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
        "default is 1e-3 bits squared of the authors' figures, measured there at temperature "
        "0.6. A request sets its own with `vllm_xargs: {meridian_eat_delta: ...}`.",
    )
    eat_warmup_probes: int = Field(
        default=20,
        ge=1,
        description="EAT: probes of a thought before it may close; about 4 / `eat_alpha`, or the "
        "variance has not forgotten its start.",
    )
    eat_max_entropy_nats: float | None = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        description="EAT: no close while the last probe's entropy is not below this, in nats: "
        "steadily unsure is not converged. Unset: no such gate. The default is a guess.",
    )
    probe_min_gap_tokens: int = Field(
        default=64,
        ge=1,
        description="EAT: a paragraph's end is probed when the last probe is at least this many "
        "tokens back.",
    )
    probe_max_gap_tokens: int = Field(
        default=256,
        ge=1,
        description="EAT: most tokens from one probe to the next, paragraph or not.",
    )
    probes_in_flight: int = Field(
        default=16,
        ge=1,
        description="EAT: most probes in one step.",
    )
    probe_every_steps: int = Field(
        default=8,
        ge=1,
        description="EAT: steps from one with probes to the next; those that are due meanwhile go "
        "together. A step with probes does not run in the full CUDA graph of steps that only "
        "decode: with 8, at most one step in 8 pays for that. A result comes up to this number "
        "less 1 steps later, 7 by default, and the close with it: one token each, against the 64 "
        "tokens of `probe_min_gap_tokens`. Calibration counts them as part of the lag.",
    )
    probe_context_tokens: int = Field(
        default=32_768,
        ge=1,
        description="EAT: most tokens before the trial boundaries of the probes of one step, all "
        "together; a single probe may have more. A probe's CPU time grows with its context: "
        "`meridian bench probe-micro` prints it.",
    )
    rpdi: bool = Field(
        default=True,
        description="Strategy: close a thought that has derailed, seen by its tokens' entropy "
        "against its own mean (RPDI, arXiv:2603.14251). Needs no probe.",
    )
    rpdi_window_tokens: int = Field(
        default=512,
        ge=1,
        description="RPDI: last think tokens whose mean entropy is compared with the whole "
        "thought's.",
    )
    rpdi_lambda: float = Field(
        default=2.0,
        gt=1,
        allow_inf_nan=False,
        description="RPDI: close at a sentence's end when the quotient of both means is above "
        "this. It can be no sooner than after `rpdi_lambda` windows. A request sets its own with "
        "`vllm_xargs: {meridian_rpdi_lambda: ...}`.",
    )
    end_probability: bool = Field(
        default=False,
        description="Strategy: close a thought that the model itself is about to end.",
    )
    end_probability_threshold: float = Field(
        default=0.5,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="Least probability of the end boundary's first token, at most 1.",
    )
    end_probability_patience: int = Field(
        default=3,
        ge=1,
        description="Tokens of a thought at which the boundary must have been this probable, the "
        "closing one included; they need not follow each other.",
    )
    trace: Path | None = Field(
        default=None,
        strict=False,
        description="File to which probe results, verdicts and ends of thoughts are appended, as "
        "JSON lines ([what they hold](exit-trace.md)). A relative path counts from the "
        "configuration file's directory, or from the working directory when set in the "
        "environment. Unset: none is written.",
    )

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
        return self


RequestField = Literal[
    "meridian_itl_ms",
    "meridian_priority",
    "meridian_max_think_tokens",
    "meridian_min_think_tokens",
    "meridian_exit",
    "meridian_eat_delta",
    "meridian_rpdi_lambda",
]


def _field_names(value: Any) -> Any:
    names = get_args(RequestField)
    if value == "all" or (isinstance(value, list) and all(name in names for name in value)):
        return value
    raise ValueError(f"'all' or a list of names among {', '.join(names)}")


class RequestsConfig(StrictModel):
    """What requests may ask for by themselves."""

    allowed_fields: Annotated[Literal["all"] | list[str], BeforeValidator(_field_names)] = Field(
        default="all",
        description="Fields of `vllm_xargs` that requests may set: `all`, or a list of "
        "[their names](requests.md); an empty list allows none. A request with another field of "
        "ours is refused with HTTP 400.",
    )


class Config(StrictModel):
    """The whole configuration."""

    version: Literal[1] = Field(
        default=SCHEMA_VERSION, description="Version of this format. Required in a file."
    )
    family: str | None = Field(
        default=None,
        description="Forces a model family by name. Unset: the family is found from the model.",
    )
    families_dir: Path | None = Field(
        default=None,
        strict=False,
        description="Directory of additional or replacing family files. A relative path counts "
        "from the configuration file's directory, or from the working directory when set in the "
        "environment.",
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
    requests: RequestsConfig = Field(
        default_factory=RequestsConfig, description="What requests may ask for by themselves."
    )
    provenance: dict[str, Any] | None = Field(
        default=None,
        description="Where the file's values come from: `meridian calibrate` writes model, data, "
        "date and curve here. Only its `lag` is read: an engine with another one says so in the "
        "log when it starts.",
    )
