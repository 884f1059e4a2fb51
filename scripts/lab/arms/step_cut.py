"""How much prefill fits beside the decodes of a step, from the step times."""

from typing import Any

from arms.facts import Facts
from meridian_patch.replay.types import StepWork

LEAST_PREFILL = 16
# A prompt in progress is read by every step that goes on with it. A step has at least so many times
# the time that this takes beside the decodes, or a long prompt would get the least piece for ever.
_LEAST_STRETCH = 1.05


def cut_tokens(facts: Facts, running: list[Any], factor: float) -> int:
    """Token budget of a step that takes ``factor`` times as long as its decodes alone.

    The step times are those of the cost model, where ours has to learn them: the arm's cut is the
    best that there is.

    Args:
        facts: has the step times.
        running: the running requests; the first that computes its prompt is the next to go on.
        factor: of the time without prefill, 1 or more.

    Returns:
        The decodes, and at least ``LEAST_PREFILL`` tokens.
    """
    rows, context, before = _shape(running)
    least_s = _seconds(facts, rows, context, before, 1) * _LEAST_STRETCH
    return tokens_within(
        facts, running, max(factor * decode_seconds(facts, rows, context), least_s)
    )


def tokens_within(facts: Facts, running: list[Any], target_s: float) -> int:
    """Token budget of a step that takes at most ``target_s`` seconds; otherwise as above."""
    rows, context, before = _shape(running)
    low, high = LEAST_PREFILL, facts.chunk_tokens - rows
    while low < high:
        middle = (low + high + 1) // 2
        is_in_time = _seconds(facts, rows, context, before, middle) <= target_s
        low, high = (middle, high) if is_in_time else (low, middle - 1)
    return rows + max(low, LEAST_PREFILL)


def decode_seconds(facts: Facts, rows: int, context: int) -> float:
    """Seconds of a step that only decodes."""
    return facts.step_seconds(StepWork(0, rows, context, context))


def _shape(running: list[Any]) -> tuple[int, int, int]:
    """Decodes, their context, and the computed tokens of the prompt that goes on next."""
    rows = context = before = 0
    for request in running:
        if not request.is_prefill_chunk:
            rows += 1
            context += request.num_computed_tokens
        elif not before:
            before = request.num_computed_tokens
    return rows, context, before


def _seconds(facts: Facts, rows: int, context: int, before: int, prefill: int) -> float:
    pairs = prefill * before + prefill * (prefill + 1) // 2
    read = context + before + prefill
    return facts.step_seconds(StepWork(prefill, rows, read, context + pairs, 1))
