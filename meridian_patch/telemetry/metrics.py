"""Declares every ``meridian_*`` metric once, for the exporter and for docs/metrics.md.

A new metric needs one row in ``METRICS`` and the name of its event in ``counters``.
"""

from collections.abc import Iterable
from typing import Final, get_args

from meridian_patch.config.policy import PolicyName
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import ExitMode
from meridian_patch.exit.actions import TO_CLOSES
from meridian_patch.exit.strategies.build import REASONS
from meridian_patch.handoff import stays
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.retention import Tier
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.counters import Fallback, LeftOut
from meridian_patch.telemetry.metric import Kind, Metric


def _texts(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(str(value) for value in values)


_PHASES = _texts(Phase)
_TIERS = tuple(tier.label for tier in Tier)
# Where tokens of outputs may stand.
_SAID = _texts((Phase.THINK, Phase.ANSWER))

# 0.1, 0.25 and 1 second are gaps that a reader notices: counts above them are read from buckets.
_GAP_BUCKETS_S = (
    *(0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0),
    *(2.5, 5.0, 10.0, 30.0),
)
_WAIT_BUCKETS_S = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0, 90.0, 120.0),
    *(180.0, 300.0, 600.0, 1200.0, 2400.0),
)

METRICS: Final = (
    Metric(
        event=counters.PREEMPTION,
        name="meridian_preemptions",
        label="phase",
        values=_PHASES,
        unit="preemptions",
        help="Preemptions by the phase the request was in.",
        operator=(
            "`answer` should stay 0: it rises only when no thinking request was left to preempt. "
            "If it rises, the pool is too small for the answers alone: lower `max_num_seqs`, or "
            "give the cache more memory. vLLM's `vllm:num_preemptions_total` counts a preemption "
            "with the request's next output, so requests aborted before it are missing there"
        ),
    ),
    Metric(
        event=counters.FALLBACK,
        name="meridian_policy_fallbacks",
        label="reason",
        values=_texts(Fallback),
        unit="steps",
        help="Scheduler steps in which the plug-in failed or was too slow, by reason.",
        operator=(
            "`exception`: the plug-in's code failed, and its part of the step ran as stock; the "
            "log has the first traceback, please report it. "
            "`slow`: decisions exceeded `policy.time_budget_us`: limits still apply, an order that "
            "is not complete does not; raise it, or use a faster core. "
            "`kv_integrity`: the free KV blocks were found out of order, and the KV tiers are off "
            "until the next start; please report it"
        ),
    ),
    Metric(
        event=counters.PART_OFF,
        name="meridian_parts_off",
        label="part",
        values=counters.PARTS,
        unit="parts",
        help="Parts that are off until the next start after failures, by name.",
        operator=(
            "Should stay 0. A part that failed in 10 of 100 steps is off, and so are the KV tiers "
            "once free KV blocks were out of order; requests go on as in stock. `meridian status` "
            "lists it; the log has its first failure, please report it"
        ),
    ),
    Metric(
        event=counters.SWITCHED,
        name="meridian_switches",
        label="to",
        values=(
            *(f"policy {name}" for name in get_args(PolicyName)),
            *(f"exit {mode}" for mode in get_args(ExitMode)),
        ),
        unit="switches",
        help="Switches of policy or early exit while the engine ran, by what is in force since.",
        operator=(
            "nothing; it shows when `meridian policy set` was used. With data parallelism each "
            "rank counts its own"
        ),
    ),
    Metric(
        event=counters.PHASE_CHANGE,
        name="meridian_phase_changes",
        label="phase",
        values=_PHASES,
        unit="changes",
        help="Requests that entered a phase.",
        operator=(
            "If `think` stays 0 with a reasoning model, its boundaries are not known: "
            "`meridian boundaries MODEL_DIR` prints why"
        ),
    ),
    Metric(
        event=counters.REQUESTS,
        name="meridian_requests",
        kind=Kind.GAUGE,
        label="phase",
        values=_PHASES,
        unit="requests",
        help="Unfinished requests by phase, waiting ones included.",
        operator="nothing; it shows the load by phase",
    ),
    Metric(
        event=counters.EVICTION,
        name="meridian_kv_evictions",
        label="tier",
        values=_TIERS,
        unit="blocks",
        help="Cached KV blocks evicted, by the tier they were in.",
        operator=(
            "A rising `output_critical` means that live requests leave no room for prompts that "
            "may come back: admit less, or give the cache more memory"
        ),
    ),
    Metric(
        event=counters.HIT_TOKENS,
        name="meridian_kv_hit_tokens",
        label="tier",
        values=(*_TIERS, counters.IN_USE),
        unit="tokens",
        help="Prefix-cache hit tokens, by tier of the free block, or in use by other requests.",
        operator=(
            "Hits in `think_complete` show that prompts do contain earlier thinking: the family's "
            "history rule is wrong, see [model families](model-families.md)"
        ),
    ),
    Metric(
        event=counters.EXIT,
        name="meridian_thoughts_ended",
        label="reason",
        values=tuple(REASONS),
        unit="thoughts",
        help="Thoughts that ended, by reason.",
        operator=(
            "nothing; it shows what ended thinking. `unanswered`: the request ended in its "
            "thought. Thoughts of requests in mode `off`, of aborted ones, and those in which a "
            "session's turn ended are not counted"
        ),
    ),
    Metric(
        event=counters.UNANSWERED,
        name="meridian_unanswered_requests",
        label="finish_reason",
        values=("length", "stop", "repetition"),
        unit="requests",
        help="Requests that ended in their thought, without an answer, by vLLM's finish reason.",
        operator=(
            "Their clients got no content. `length`: the thought took all of `max_tokens`: raise "
            "it, or [keep a reserve](early-exit.md#answer-reserve). `stop`: the model ended its "
            "turn, or said a stop token. `repetition`: vLLM's own check for loops ended it. A stop "
            "string that matches in a thought is not seen here"
        ),
    ),
    Metric(
        event=counters.ANSWER_LOOP,
        name="meridian_answer_loops",
        label="mode",
        values=("observe", "enforce"),
        unit="answers",
        help="Answers that repeated themselves, of requests whose answers are looked at, by mode.",
        operator=(
            "In `enforce` their requests ended with the finish reason `repetition`. Only with "
            "`exit.loop_scope: all`, see [loops](early-exit.md#loops)"
        ),
    ),
    Metric(
        event=counters.THINK_TOKENS,
        name="meridian_think_tokens",
        label="reason",
        values=tuple(REASONS),
        unit="tokens",
        help="Tokens of the thoughts that ended, by reason.",
        operator="nothing; divided by `meridian_thoughts_ended_total` it is their mean length",
    ),
    Metric(
        event=counters.MEASURED,
        name="meridian_thoughts_measured",
        label="mode",
        values=("observe", "enforce"),
        unit="thoughts",
        help="Thoughts that ended and had been measured, by mode.",
        operator=(
            "In `observe` it is a sample: raise `exit.observed_at_a_time` to measure more of them"
        ),
    ),
    Metric(
        event=counters.VERDICT,
        name="meridian_exit_verdicts",
        label="reason",
        values=tuple(REASONS),
        unit="thoughts",
        help="Thoughts that early exit would close, closed or not, by strategy.",
        operator=(
            "In `observe`, its share of `meridian_thoughts_measured_total` is what `enforce` would "
            "close: [calibrate](calibration.md) before you switch"
        ),
    ),
    Metric(
        event=counters.EXIT_GIVEN_UP,
        name="meridian_exits_given_up",
        label="reason",
        values=_texts(TO_CLOSES),
        unit="closes",
        help="Closes not carried out, because something would undo them.",
        operator=(
            "Each reason has its remedy under "
            "[what could not be enforced](requests.md#what-could-not-be-enforced)"
        ),
    ),
    Metric(
        event=counters.WRAP_UP_LEFT_OUT,
        name="meridian_wrap_ups_left_out",
        label="reason",
        values=_texts(LeftOut),
        unit="closes",
        help="Forced closes without the wrap-up that was asked for, by reason.",
        operator=(
            "The bare marker is forced. `room`: no token of an answer would fit into `max_tokens` "
            "or the model's length behind it; shorten it, or raise `max_tokens`. `stop`: it holds "
            "a stop token or string of the request. `undone`: something would undo it, as under "
            "[what could not be enforced](requests.md#what-could-not-be-enforced). `text`: it "
            "cannot be said in tokens, and came past the API server's check. `restart`: another "
            "token was sampled than the forced one, please report it"
        ),
    ),
    Metric(
        event=counters.PROBE,
        name="meridian_probes",
        label="result",
        values=("measured", "lost", "invalid"),
        unit="probes",
        help="Probes of thoughts, by result.",
        operator=(
            "`lost`: the probe ended without a signal; check with `meridian status` that every "
            "worker is patched. `invalid`: its signal is not a finite number; look for NaN in the "
            "logits"
        ),
    ),
    Metric(
        event=counters.PROBING_STOPPED,
        name="meridian_probing_stopped",
        label="reason",
        values=("lost", "refused"),
        unit="stops",
        help="Ends of all probing until the next start, by reason.",
        operator=(
            "From then on EAT closes no thought. `lost`: 32 probes in a row came back without a "
            "signal; check that every worker is patched, then start the server again. `refused`: "
            "the workers measure nothing. `meridian status` says why, as `probes`"
        ),
    ),
    Metric(
        event=counters.INVALID,
        name="meridian_invalid_signals",
        label="phase",
        values=(str(Phase.THINK),),
        unit="signals",
        help="Signals that were not finite numbers, by phase.",
        operator="Not measured, or NaN in the logits: look at the workers' logs and the weights",
    ),
    Metric(
        event=counters.IGNORED_FIELD,
        name="meridian_ignored_fields",
        label="field",
        values=_texts(RequestOptions.model_fields),
        unit="fields",
        help="Fields of requests ignored: not in requests.allowed_fields, or beside a wrong value.",
        operator=(
            "Requests did not pass through a check that could refuse them, as with "
            "`--scheduler-cls` alone: allow the field, or correct it; the log says what is wrong"
        ),
    ),
    Metric(
        event=counters.TICKET,
        name="meridian_handoff_tickets",
        label="outcome",
        values=("accepted", "refused"),
        unit="tickets",
        help="Tickets of think engines that reached this answer engine, by outcome.",
        operator=(
            "`refused`: the KV cache of the think engine does not fit, and all tokens were "
            "computed again; the log has each reason once. Start both engines with the same "
            "model, settings and LoRA adapters"
        ),
    ),
    Metric(
        event=counters.HANDOFFS,
        name="meridian_handoffs",
        label="outcome",
        values=("moved", "answered_at_home", "aborted"),
        unit="requests",
        help="Requests that left this think engine after their thought, by outcome.",
        operator=(
            "`answered_at_home`: the answer engine was lost, refused the request or differs from "
            "this one, and the request answered where it thought; the log has each engine that "
            "rests. `aborted`: its client left while it answered elsewhere, or a stop string "
            "ended it"
        ),
    ),
    Metric(
        event=counters.STAYS,
        name="meridian_handoff_stays",
        label="reason",
        values=stays.REASONS,
        unit="requests",
        help="Requests that answer where they think, by what cannot travel.",
        operator="If most requests stay, a hand-off has little to give: count their reasons",
    ),
    Metric(
        event=counters.HANDOFF_GAP,
        name="meridian_handoff_gap_seconds",
        kind=Kind.HISTOGRAM,
        label="phase",
        values=(str(Phase.ANSWER),),
        buckets=_GAP_BUCKETS_S,
        unit="seconds",
        help="Time from the end of a thought to the first token of its answer engine.",
        operator="What a reader waits for the move: above 0.25 s look at the fabric",
    ),
    Metric(
        event=counters.STEP,
        name="meridian_steps",
        label="kind",
        values=("ran", "learnt"),
        unit="steps",
        help="Steps that ran, and steps that the step-time model learnt from.",
        operator=(
            "If `learnt` stays below nine tenths of `ran`, predictions of step times are poor and "
            "steps may take too long; please report it. Under policy `noop`, or where every step "
            "has a prompt to compute, nothing is learnt. Updated every 64 steps"
        ),
    ),
    Metric(
        event=counters.STEP_SECONDS,
        name="meridian_step_seconds",
        label="kind",
        values=("measured", "error"),
        unit="seconds",
        help="Time of the steps that the model learnt from, and by how much it had missed it.",
        operator=(
            "`error` divided by `measured` is the mean error of predicted step times, as a share; "
            "above a third, answers keep their latency poorly: look for other load on the machine. "
            "Updated every 64 steps, not under policy `noop`"
        ),
    ),
    Metric(
        event=counters.LIMITED,
        name="meridian_limited_steps",
        label="limit",
        values=("tokens", "requests"),
        unit="steps",
        help="Steps in which the policy's limit of tokens or of requests left work waiting.",
        operator=(
            "nothing; it shows how often the policy acts. Divided by "
            '`meridian_steps_total{kind="ran"}` it is the share of steps'
        ),
    ),
    Metric(
        event=counters.POLICY_SECONDS,
        name="meridian_policy_seconds",
        label="stage",
        values=("limits", "order"),
        unit="seconds",
        help="Time that the policy took before steps, by what it decided.",
        operator=(
            "Divided by the time of all steps it should stay below one hundredth: if it does not, "
            "please report it. Updated every 64 steps, not under policy `noop`"
        ),
    ),
    Metric(
        event=counters.RECOMPUTED,
        name="meridian_recomputed_tokens",
        label="phase",
        values=_PHASES,
        unit="tokens",
        help="Tokens that preempted requests computed again when they resumed, by phase.",
        operator=(
            "The price of preemptions: tokens that were still cached do not count. If it is a "
            "large share of all tokens, lower `max_num_seqs`, or give the cache more memory"
        ),
    ),
    Metric(
        event=counters.SAVED,
        name="meridian_estimated_think_tokens_saved",
        label="mode",
        values=("observe", "enforce"),
        unit="tokens",
        help="Estimate of the think tokens that early exit saves, by mode.",
        operator=(
            "`observe`: tokens between the verdict and the thought's own end, which `enforce` "
            "would have saved, of requests in mode `observe`. `enforce`: a guess, how much longer "
            "thoughts of its length went on that ended by themselves; none before 20 of those. "
            "Where none went on for longer, as behind a bound, half of the closed length is assumed"
        ),
    ),
    Metric(
        event=counters.TTFAT,
        name="meridian_time_to_first_answer_token_seconds",
        kind=Kind.HISTOGRAM,
        label="thought",
        values=("yes", "no"),
        buckets=_WAIT_BUCKETS_S,
        unit="seconds",
        help="Time from a request's arrival to its first answer token, by whether it thought.",
        operator=(
            "What a reader waits for. `no` is vLLM's time to first token; it is observed when the "
            "request ends, because until then it may still think. If `yes` rises and "
            '`meridian_request_phase_seconds{phase="think"}` does not, requests wait too long '
            "before they think: add capacity, or admit less"
        ),
    ),
    Metric(
        event=counters.GAP,
        name="meridian_inter_token_seconds",
        kind=Kind.HISTOGRAM,
        label="phase",
        values=(*_SAID, "ttot"),
        buckets=_GAP_BUCKETS_S,
        unit="seconds",
        help="Time between a request's outputs, by phase; ttot: from thought to answer.",
        operator=(
            "`answer` is what a reader sees. Stalls are read from the buckets: "
            '`..._count{phase="answer"}` minus `..._bucket{phase="answer",le="0.25"}` are the '
            "gaps above 250 ms; 0.1 and 1.0 are bounds, too. They should be rare: if not, "
            "compare `meridian_preemptions_total` and `meridian_limited_steps_total`"
        ),
    ),
    Metric(
        event=counters.PHASE_SECONDS,
        name="meridian_request_phase_seconds",
        kind=Kind.HISTOGRAM,
        label="phase",
        values=_SAID,
        buckets=_WAIT_BUCKETS_S,
        unit="seconds",
        help="Time that an ended request spent in a phase, from its first token to its last.",
        operator=(
            "nothing; it shows which phase takes the time. Preemptions are included. Requests that "
            "were aborted are not observed, as in vLLM's own times of requests"
        ),
    ),
    Metric(
        event=counters.TOKENS,
        name="meridian_output_tokens",
        label="phase",
        values=_SAID,
        unit="tokens",
        help="Tokens of outputs by phase; a marker belongs to the phase that it ends."
        " A tool call that ends a thought belongs to the answer.",
        operator="nothing; its rate is the throughput by phase",
    ),
    Metric(
        event=counters.INFO,
        name="meridian_info",
        kind=Kind.GAUGE,
        label="version",
        values=(),
        unit="is 1",
        help="The version of meridian_patch that exports these metrics.",
        operator="nothing; where it is missing, the server is not patched",
    ),
)
"""All metrics, in the order of docs/metrics.md."""
