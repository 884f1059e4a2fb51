"""Cost models: how long a step takes on a given machine."""

from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from meridian_patch.config.strict_model import StrictModel
from meridian_patch.config.validate import shown, validate
from meridian_patch.config.yaml_file import parse_mapping, read_text
from meridian_patch.errors import BenchError, ConfigError
from meridian_patch.replay.types import StepWork

SUFFIX = ".yaml"
DEFAULT_COST = "h100-8b-dense"
# Of a step without a captured graph, the share of its time in which its kernels are launched.
_LAUNCHED_SHARE = 0.9


class Experts(StrictModel):
    """Expert weights; the share that a step reads grows with its tokens.

    A step of ``n`` tokens reads the share ``1 - (1 - per_token / count) ** n``, because each token
    chooses independently and uniformly.
    """

    weights_s: float = Field(gt=0, allow_inf_nan=False, description="To read all experts.")
    count: int = Field(ge=1)
    per_token: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_choice(self) -> Self:
        if self.per_token > self.count:
            raise ValueError("a per_token that is at most count")
        return self

    def read_seconds(self, tokens: int) -> float:
        """Seconds to read the experts that a step of ``tokens`` tokens uses."""
        return self.weights_s * (1 - (1 - self.per_token / self.count) ** tokens)


class CostModel(StrictModel):
    """Seconds per step: ``fixed + prefill + rows + max(memory, compute)``.

    ``prefill`` is added to a step that computes prompts, because engines optimise steps that only
    decode, for example by one graph for the whole step. ``rows`` is the cost of each sequence
    outside the model: scheduling, input preparation and sampling. ``memory`` reads the weights
    once and the KV of every sequence in the step. ``compute`` is linear in the step's tokens, plus
    attention over each token's context. If memory and compute do not overlap, as on a CPU, they
    are added up.

    A step of more than ``graph_tokens`` tokens is not run by a captured graph: its kernels are
    launched one by one, which takes ``launch_s`` at least. Of a smaller one that computes prompts,
    the graph is in pieces, between which attention is launched: ``pieces_s`` at least. Within
    EngineCore's process the engine does nothing else meanwhile.
    """

    version: Literal[1]
    name: str = Field(min_length=1)
    provenance: str = Field(
        pattern=r"^(derived|measured on .+)$", description="`derived`, or `measured on MACHINE`."
    )
    derivation: str = Field(min_length=1, description="Where each number comes from.")
    fixed_s: float = Field(ge=0, allow_inf_nan=False)
    prefill_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    row_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    weights_s: float = Field(ge=0, allow_inf_nan=False)
    kv_read_s_per_token: float = Field(ge=0, allow_inf_nan=False)
    token_s: float = Field(gt=0, allow_inf_nan=False)
    attention_s_per_pair: float = Field(ge=0, allow_inf_nan=False)
    experts: Experts | None = None
    kv_tokens: int | None = Field(
        default=None, ge=1, description="Tokens that the device holds beside the weights."
    )
    overlap: bool = Field(default=True, description="Memory and compute run at the same time.")
    graph_tokens: int | None = Field(
        default=None, ge=1, description="Most tokens of a step that a captured graph runs."
    )
    launch_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a step takes at least without a captured graph.",
    )
    pieces_s: float = Field(
        default=0.0,
        ge=0,
        allow_inf_nan=False,
        description="Seconds that a step with prompts takes at least with a captured graph.",
    )

    def step_seconds(self, work: StepWork) -> float:
        """Seconds of one step; 0 for a step without tokens."""
        tokens = work.prefill_tokens + work.decode_seqs + work.draft_tokens
        if not tokens:
            return 0.0
        memory = self.weights_s + self.kv_read_s_per_token * work.context_tokens
        if self.experts:
            memory += self.experts.read_seconds(tokens)
        compute = self.token_s * tokens + self.attention_s_per_pair * work.attended_tokens
        model = max(memory, compute) if self.overlap else memory + compute
        prefill = self.prefill_s if work.prefill_tokens else 0.0
        rows = self.row_s * (work.decode_seqs + work.prefill_seqs)
        seconds = self.fixed_s + prefill + rows + model
        return max(seconds, self._least_seconds(work))

    def launch_seconds(self, work: StepWork) -> float:
        """Seconds of a step in which the engine launches its kernels one by one; mostly 0."""
        tokens = work.prefill_tokens + work.decode_seqs + work.draft_tokens
        launched_s = self.step_seconds(work) if self._is_launched(tokens) else 0.0
        return _LAUNCHED_SHARE * max(launched_s, self._least_seconds(work))

    def _least_seconds(self, work: StepWork) -> float:
        if self._is_launched(work.prefill_tokens + work.decode_seqs + work.draft_tokens):
            return self.launch_s
        return self.pieces_s if work.prefill_tokens else 0.0

    def _is_launched(self, tokens: int) -> bool:
        return self.graph_tokens is not None and tokens > self.graph_tokens


def load_cost(name_or_path: str) -> CostModel:
    """A packaged cost model by name, or one from a file.

    Raises:
        BenchError: unknown name, unreadable file, wrong value; the message names file and field.
    """
    path = cost_path(name_or_path)
    known = sorted(file.stem for file in _packaged_directory().glob(f"*{SUFFIX}"))
    if path.parent == _packaged_directory() and path.stem not in known:
        raise BenchError(
            f"unknown cost model {shown(name_or_path)}; known: {', '.join(known)}. A file of your "
            f"own is given as a path that ends in {SUFFIX}"
        )
    origin = f"cost model {path}"
    try:
        return validate(CostModel, parse_mapping(read_text(path), origin), lambda _: origin)
    except ConfigError as error:
        raise BenchError(str(error)) from error


def cost_path(name_or_path: str) -> Path:
    """The file of a packaged cost model, or a file of one's own."""
    if "/" in name_or_path or name_or_path.endswith((SUFFIX, ".yml")):
        return Path(name_or_path)
    return _packaged_directory() / f"{name_or_path}{SUFFIX}"


def _packaged_directory() -> Path:
    # Load-bearing: the package is installed as files, never imported from an archive.
    return Path(str(files("meridian_patch.configs"))) / "cost"
