"""What can be configured. The defaults are the product's behaviour."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Literal[1] = 1


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class PolicyConfig(StrictModel):
    """How running requests are ordered."""

    name: Literal["latency", "noop"] = Field(
        default="latency",
        description="`latency` serves answers before thinking; `noop` decides as stock vLLM does.",
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
