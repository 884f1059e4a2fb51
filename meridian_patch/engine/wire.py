"""Everything of ours that travels on vLLM's own objects. Data only; imports nothing of ours.

Names stand here alone: a field that one process sets and another reads has one constant.
"""

from dataclasses import dataclass
from typing import Final

COUNTS: Final = "meridian_patch"
PLAN: Final = "meridian_plan"
SIGNALS: Final = "meridian_signals"
PHASE: Final = "meridian_phase"
SUMMARY: Final = "meridian"
PROGRESS: Final = "meridian_progress"
TIMES: Final = "meridian_times"
FACTS: Final = "meridian_handoff"
RELEASE: Final = "meridian_release"
ANSWERED: Final = "meridian_answered"
GRAPH_TOKENS: Final = "meridian_graph_tokens"
SWITCH: Final = "meridian_switch"
AT_HOME: Final = "meridian-home"
PROBE: Final = "meridian-probe"

METRICS: Final = {
    "ttfat_ms": "time_to_first_answer_token_ms",
    "think_ms": "think_time_ms",
    "answer_ms": "answer_time_ms",
    "preemptions": "preemptions",
    "exit_reason": "exit_reason",
}
"""Names in a summary, and in vLLM's metrics of a request."""


@dataclass(frozen=True, kw_only=True)
class Rider:
    """One thing that travels on an object of vLLM's.

    Attributes:
        name: of the attribute, of the key, or of the mark in an id.
        carrier: vLLM's class, and its field where the rider is a key of that field.
        type: what it is.
        writers: modules of this package that set it.
        readers: modules of this package that read it, or take it out.
        way: the processes that it goes through.
        what: its meaning.
    """

    name: str
    carrier: str
    type: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    way: str
    what: str


_TO_CORE: Final = "API server to engine core"
_FROM_CORE: Final = "engine core to API server"
_WITHIN_API: Final = "within the API server"

RIDERS: Final = (
    Rider(
        name=PLAN,
        carrier="SchedulerOutput",
        type="MeasurePlan",
        writers=("engine.early_exit.part", "calibrate.sampled_entropies"),
        readers=("engine.worker.logits_tap", "replay.engine"),
        way="engine core to worker",
        what="which requests' logits the step measures",
    ),
    Rider(
        name=SIGNALS,
        carrier="ModelRunnerOutput",
        type="MeasuredSignals",
        writers=("engine.worker.logits_tap", "replay.engine"),
        readers=("engine.early_exit.part", "calibrate.sampled_entropies"),
        way="worker to engine core",
        what="what was measured, or why nothing is",
    ),
    Rider(
        name=SWITCH,
        carrier="EngineCore",
        type="method",
        writers=("engine.scheduler.live_switch",),
        readers=("engine.api.live_switch",),
        way=_TO_CORE,
        what="which policy and which mode of early exit are in force from the next step on",
    ),
    Rider(
        name="rows",
        carrier="GrammarOutput.grammar_bitmask",
        type="int32 [rows, words]",
        writers=("engine.early_exit.close",),
        readers=(),
        way="engine core to worker, where vLLM's sampler applies them",
        what="the one token that a thought being closed may have next, and starts that are barred",
    ),
    Rider(
        name=PROBE,
        carrier="Request.request_id",
        type="prefix of the id",
        writers=("engine.early_exit.probes",),
        readers=(),
        way="engine core to worker",
        what="the request is a probe; EngineCore knows it by its class",
    ),
    Rider(
        name=PHASE,
        carrier="EngineCoreOutput.kv_transfer_params",
        type="PhaseChange, as a list on the way",
        writers=("engine.api.phase_changes",),
        readers=("engine.api.phase_changes", "engine.handoff.second_legs"),
        way=_FROM_CORE,
        what="the phase after this output, in outputs that change it",
    ),
    Rider(
        name=SUMMARY,
        carrier="EngineCoreOutput.kv_transfer_params",
        type="Summary",
        writers=("engine.api.exit_summary",),
        readers=("engine.api.exit_summary", "engine.handoff.second_legs"),
        way=_FROM_CORE,
        what="how the request's thinking ended",
    ),
    Rider(
        name=FACTS,
        carrier="EngineCoreOutput.kv_transfer_params, Request.kv_transfer_params",
        type="Facts, as a dict",
        writers=("engine.handoff.think_part",),
        readers=(
            "engine.handoff.second_legs",
            "engine.handoff.answer_part",
            "handoff.ticket",
            "handoff.requests",
        ),
        way="engine core to API server to the engine core of an answer engine",
        what="what the answer engine checks before it reads the KV cache",
    ),
    Rider(
        name=RELEASE,
        carrier="Request.kv_transfer_params",
        type="str",
        writers=("engine.handoff.second_legs",),
        readers=("engine.handoff.think_part",),
        way=_TO_CORE,
        what="the request whose blocks no engine will read",
    ),
    Rider(
        name=ANSWERED,
        carrier="Request.kv_transfer_params",
        type="int",
        writers=("engine.handoff.second_legs",),
        readers=("engine.handoff.think_part",),
        way=_TO_CORE,
        what="how many of the prompt's last tokens an answer has",
    ),
    Rider(
        name=AT_HOME,
        carrier="EngineCoreRequest.request_id",
        type="suffix of the id",
        writers=("engine.handoff.second_legs",),
        readers=("engine.handoff.second_legs",),
        way="API server to engine core and back",
        what="the request came back from an answer engine",
    ),
    Rider(
        name="meridian_*",
        carrier="SamplingParams.extra_args",
        type="fields of a request",
        writers=("engine.api.body_fields", "engine.api.input_check"),
        readers=("config.request_options",),
        way=_TO_CORE,
        what="what the client asks for; patterns that end a thought as tokens",
    ),
    Rider(
        name=COUNTS,
        carrier="SchedulerStats",
        type="dict[str, float] or None",
        writers=("engine.scheduler.scheduler", "engine.stats_field"),
        readers=("engine.api.stat_logger",),
        way=_FROM_CORE,
        what="counts of the scheduler since the last statistics",
    ),
    Rider(
        name=TIMES,
        carrier="IterationStats",
        type="PhaseTimes",
        writers=("engine.api.phase_times",),
        readers=("engine.api.phase_times", "engine.api.stat_logger"),
        way=_WITHIN_API,
        what="gaps, times and tokens by phase of the step's outputs",
    ),
    Rider(
        name=SUMMARY,
        carrier="CompletionOutput",
        type="Summary, empty before a thought has ended",
        writers=("engine.api.request_state",),
        readers=(
            "engine.api.exit_summary",
            "engine.api.reasoning_usage",
            "engine.api.request_state",
            "engine.api.responses",
        ),
        way=_WITHIN_API,
        what="how the request's thinking ended, with times",
    ),
    Rider(
        name=PROGRESS,
        carrier="CompletionOutput",
        type="PhaseProgress",
        writers=("engine.api.request_state",),
        readers=("engine.api.reasoning_usage",),
        way=_WITHIN_API,
        what="phases and times of the request so far",
    ),
    Rider(
        name=SUMMARY,
        carrier=(
            "ChatCompletionResponseChoice, CompletionResponseChoice, their chunks, "
            "ResponsesResponse"
        ),
        type="Summary",
        writers=("engine.api.exit_summary", "engine.api.responses"),
        readers=(),
        way="API server to client",
        what="how thinking ended, in the choice or the response",
    ),
    Rider(
        name=", ".join(METRICS.values()),
        carrier="PerRequestMetrics",
        type="float, int, str",
        writers=("engine.api.reasoning_usage",),
        readers=(),
        way="API server to client",
        what="times and preemptions of the request, beside vLLM's own",
    ),
    Rider(
        name=GRAPH_TOKENS,
        carrier="VllmConfig.additional_config",
        type="int",
        writers=("emulation.server",),
        readers=("engine.scheduler.step_timer",),
        way=_TO_CORE,
        what="most tokens of a step that an emulated graph runs",
    ),
)
