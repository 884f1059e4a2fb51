"""Inputs and results of a replay; imports no vLLM."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meridian_patch.phase.tracker import Phase


@dataclass(frozen=True)
class ReplayArm:
    """One side of a replay comparison.

    Attributes:
        name: as in tables.
        is_patched: our scheduler and KV manager over vLLM's, or vLLM's own.
        settings: ``MERIDIAN_PATCH_SET_*`` names and values. The process environment is not read.
        offload_gb_per_s: 10^9 bytes per second, each way, to a host memory that keeps all KV;
            None: no such tier.
        build_scheduler: of an arm that is neither stock nor ours: makes its scheduler, a subclass
            of the class of vLLM's that it is given. Picklable.
    """

    name: str
    is_patched: bool = False
    settings: Mapping[str, str] = field(default_factory=dict)
    offload_gb_per_s: float | None = None
    build_scheduler: Callable[[type], type] | None = None


@dataclass(frozen=True)
class EngineLimits:
    """Sizes of the engine, as vLLM's options of these names set them."""

    block_size: int = 16
    max_model_len: int = 65_536
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192


@dataclass(frozen=True)
class TemplateTokens:
    """Token ids of the replayed model's chat template; ids below ``content_ids`` are plain text.

    Attributes:
        tool_call: what an answer that is a tool call begins with.
    """

    think_start: int
    think_end: int
    turn_end: int
    system: int
    user: int
    assistant: int
    tool_call: tuple[int, ...]
    content_ids: int


@dataclass(frozen=True)
class ReplayRequest:
    """One request: its prompt and the tokens that it will sample.

    Attributes:
        output: ends with the turn end token, which stops the request.
        answer_start: index in ``output`` of the first token that a user reads.
        max_tokens: the client's bound on ``output``; None: as much as the model's context holds.
    """

    request_id: str
    prompt: list[int]
    output: list[int]
    answer_start: int
    max_tokens: int | None = None


@dataclass(slots=True)
class ReplayRecord:
    """The course of one request; times in seconds of the virtual clock.

    Attributes:
        hit_tokens: prompt tokens found in the prefix cache, or in the offload tier, when it was
            first admitted.
        bound_tokens: prompt tokens that a cache which never evicts would have held at that time.
        token_s: when each output token was delivered.
        preemptions: by the phase that the request was in.
        recomputed_tokens: computed again after a preemption, by the same phase.
        scheduled_s: when the last step that the request was part of began.
        longest_pause_s: between the begins of two steps in a row that the request was part of.
    """

    request: ReplayRequest
    arrival_s: float
    hit_tokens: int = 0
    bound_tokens: int = 0
    admitted_s: float | None = None
    token_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    preemptions: Counter[Phase] = field(default_factory=Counter)
    recomputed_tokens: Counter[Phase] = field(default_factory=Counter)
    scheduled_s: float | None = None
    longest_pause_s: float = 0.0

    @property
    def phase(self) -> Phase:
        """PREFILL until a token is delivered, then THINK, then ANSWER.

        ANSWER begins once all output tokens before ``answer_start`` are delivered.
        """
        if not self.token_s:
            return Phase.PREFILL
        has_ended = len(self.token_s) >= self.request.answer_start
        return Phase.ANSWER if has_ended else Phase.THINK


@dataclass(frozen=True, slots=True)
class StepWork:
    """What the model would have to do in one step.

    Attributes:
        prefill_tokens: tokens computed for prompts and for resumes.
        decode_seqs: sequences that compute one token each, or check drafts.
        context_tokens: tokens whose KV is read, summed over all sequences of the step.
        attended_tokens: context length summed over all *tokens* of the step.
        prefill_seqs: sequences that compute more than one token.
        draft_tokens: that decoding sequences check beside the one that they compute.
    """

    prefill_tokens: int = 0
    decode_seqs: int = 0
    context_tokens: int = 0
    attended_tokens: int = 0
    prefill_seqs: int = 0
    draft_tokens: int = 0


@dataclass(slots=True)
class ReplayTotals:
    """Sums over a replay.

    Attributes:
        recomputed_tokens: tokens computed again because a preemption had freed them.
        reloaded_tokens: tokens loaded from the offload tier, lost by preemption or by eviction.
        engine_hits, engine_queries: hit and queried tokens in vLLM's own statistics.
    """

    steps: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    reloaded_tokens: int = 0
    engine_hits: int = 0
    engine_queries: int = 0
