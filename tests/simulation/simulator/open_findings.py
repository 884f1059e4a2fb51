"""Failures of the simulation that are known and not mended yet.

They keep the command and its test green, and nothing else: the page lists them, a failure of
another invariant at the same seed counts, and a seed that is mended leaves the table.
"""

from simulator.run import Result

# Seed, drawn with the usual number of steps: the invariant, and what is known.
OPEN: dict[int, tuple[str, str]] = {
    12000572: ("crash", "vLLM 0.33, routed experts, one step in two computes prompts"),
    12000995: ("crash", "vLLM 0.33, routed experts, one step in two computes prompts, hybrid"),
    12001180: ("probes", "128k tokens, grammars, hooks that fail: a probe waits 121 steps"),
    12001197: ("crash", "vLLM 0.33, routed experts, one step in two computes prompts, 256 seats"),
    19100071: ("throttle", "vLLM 0.33, two stages, one step in two computes prompts, 128k tokens"),
}


def is_open(result: Result, usual_steps: int) -> bool:
    """Whether a failed case is one of the table, and fails as that says and no other way."""
    known = OPEN.get(result.case.seed)
    return bool(known and result.case.steps == usual_steps and set(result.failures) == {known[0]})
