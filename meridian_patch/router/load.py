"""Reads an engine's phase-weighted load, and whether it makes steps, from its ``/metrics``."""

import re
from typing import Final

ANSWER_WEIGHT: Final = 2.0
"""A request that answers counts as so many that think.

Engines of a hand-off have one role, so a request has one phase left on each: one that thinks leaves
at the end of its thought. What is left to tell requests apart is whom a newcomer delays: engines
step on their own, so its prefill delays the answers of its own engine alone, and they are read as
they come.
"""

_SAMPLE: Final = re.compile(
    r"^(?P<name>vllm:num_requests_running|vllm:num_requests_waiting|meridian_requests)"
    r"(?:\{(?P<labels>[^}]*)\})?\s+(?P<value>[0-9.eE+]+)",
    re.MULTILINE,
)
# Load-bearing: only outputs of an EngineCore move these. Tokens move with a step that samples; the
# use of the KV cache with each piece of a long prompt, which samples nothing; the others when a
# request is admitted, preempted or ended.
_STEPS: Final = re.compile(
    r"^(?:vllm:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc"
    r"|prompt_tokens_total|generation_tokens_total|prefix_cache_queries_total"
    r"|num_preemptions_total|iteration_tokens_total_count)"
    r"|meridian_steps_total)(?:\{.*\})? .*$",
    re.MULTILINE,
)
_ANSWERS: Final = 'phase="answer"'


def load_from(page: str) -> float | None:
    """Requests that run or wait on an engine, of all its ranks; those that answer count more.

    None if the page has no sample of them: what is not known is no reason to send more there.

    Args:
        page: the text of its ``/metrics``.

    Raises:
        ValueError: a value is no number.
    """
    load = None
    for sample in _SAMPLE.finditer(page):
        value = float(sample["value"])
        load = load or 0.0
        if sample["name"] != "meridian_requests":
            load += value
        elif _ANSWERS in (sample["labels"] or ""):
            load += value * (ANSWER_WEIGHT - 1)
    return load


def progress_from(page: str) -> tuple[str, ...]:
    """Samples that change as the engine makes steps; empty if it exports none.

    Args:
        page: the text of its ``/metrics``.
    """
    return tuple(_STEPS.findall(page))
