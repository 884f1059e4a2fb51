"""The figures of a replay, in the order shown."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from meridian_patch.bench.figure_table import FIGURES, GOODPUT, HARM, Kind


@dataclass(frozen=True)
class Row:
    """How a figure is shown.

    Attributes:
        kind: the figure.
        is_ratio: arms are shown over stock; otherwise in the figure's unit, as stock is.
        is_brief: the table on the terminal has it too.
    """

    kind: Kind
    is_ratio: bool
    is_brief: bool


_SHOWN = (
    *("ttft_mean_s", "ttft_p99_s", "ttfat_mean_s", "ttfat_p50_s", "ttfat_p95_s", "ttfat_p99_s"),
    *("slowdown_mean", "slowdown_p99", HARM, "ttot_p99_s", "ttot_max_s"),
    *("think_tpot_mean_s", "think_tpot_p99_s"),
    *("answer_itl_p50_s", "answer_itl_p99_s", "answer_itl_p999_s", "answer_gap_max_s"),
    *("answer_itl_p99_over_decode_only", "answer_gap_max_over_decode_only"),
    *("decode_only_step_p99_s", "answer_stalls", "qoe_mean", "qoe_low_share"),
    *("e2e_mean_s", "e2e_p99_s", "tokens_per_s", "steady_tokens_per_s", "window_tokens_per_s"),
    *(GOODPUT, "hit_share", "hit_bound_share", "missed_tokens"),
    *("preemptions", "preemptions_prefill", "preemptions_think", "preemptions_answer"),
    *("preempted_answers", "preemptions_max"),
    *("recomputed_tokens", "recomputed_tokens_think", "recomputed_tokens_answer"),
    *("first_wait_max_s", "longest_pause_s"),
)
# In the figure's unit on every arm: relative by itself, or so often 0 that no ratio exists.
_NO_RATIOS = frozenset(
    (
        *(HARM, "answer_itl_p99_over_decode_only", "answer_gap_max_over_decode_only"),
        *("answer_stalls", "qoe_mean", "qoe_low_share", "hit_share", "hit_bound_share"),
        *("preemptions_prefill", "preemptions_think", "preemptions_answer"),
        *("preempted_answers", "preemptions_max"),
        *("recomputed_tokens_think", "recomputed_tokens_answer"),
    )
)
_BRIEF = frozenset(
    (
        *("ttfat_mean_s", "ttfat_p99_s", "slowdown_p99", HARM, "answer_itl_p99_s"),
        *("answer_gap_max_s", "answer_itl_p99_over_decode_only", "answer_stalls"),
        *("qoe_low_share", "tokens_per_s", GOODPUT, "hit_share", "hit_bound_share"),
        *("missed_tokens", "preemptions", "preempted_answers", "recomputed_tokens"),
        *("first_wait_max_s", "longest_pause_s"),
    )
)
# Where requests wait for seconds, and stock counts no more than preemptions.
_NAMED: Mapping[str, Kind] = {
    "ttft_p99_s": replace(FIGURES["ttft_p99_s"], unit="s"),
    "answer_gap_max_s": replace(FIGURES["answer_gap_max_s"], label="answer gap max"),
    "answer_stalls": replace(FIGURES["answer_stalls"], label="answer stalls"),
    "preemptions": replace(FIGURES["preemptions"], label="preemptions"),
}
ROWS = tuple(
    Row(_NAMED.get(name, FIGURES[name]), name not in _NO_RATIOS, name in _BRIEF) for name in _SHOWN
)
# What a label does not say.
DEFINITIONS: Mapping[str, str] = {row.kind.name: row.kind.words for row in ROWS if row.kind.words}
