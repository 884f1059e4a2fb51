"""Failures of the simulation that are known and not mended yet.

They keep the command and its test green, and nothing else: the page lists them, a failure of
another invariant at the same seed counts, and a seed that is mended leaves the table.
"""

from simulator.run import Result

# Seed, drawn with the usual number of steps: the invariant, and what is known.
OPEN: dict[int, tuple[str, str]] = {
    4001471: (
        "times",
        "where one step in eight computes prompts, step times are known after 150 steps only",
    ),
    4001501: (
        "times",
        "nine conversations in a pool for one request begin after 6.9 s, in stock after 3.7 s",
    ),
    5000625: ("displacing", "vLLM 0.33, four stages, an offloading connector, hooks that fail"),
    5000657: (
        "answers",
        "vLLM 0.33, two stages, one step in eight computes prompts, grammars within thoughts",
    ),
}


def is_open(result: Result, usual_steps: int) -> bool:
    """Whether a failed case is one of the table, and fails as that says and no other way."""
    known = OPEN.get(result.case.seed)
    return bool(known and result.case.steps == usual_steps and set(result.failures) == {known[0]})
