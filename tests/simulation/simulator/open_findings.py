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
    11000488: ("displacing", "two stages, asynchronous, V2, a sliding window, aborts"),
    11000677: ("answers", "two stages, asynchronous, whole prompts, five drafts, a deep queue"),
    11000941: ("times", "four stages, three drafts, a pool for one request, thoughts closed"),
    11001219: ("displacing", "four stages, an offloading connector, hooks that fail"),
    11001309: ("displacing", "adapters for two slots, images computed whole"),
    11001434: (
        "progress",
        "128k tokens, whole prompts, five drafts: behind a close a token a step, for 17,000 steps",
    ),
    11001715: ("throttle", "128k tokens, grammars within thoughts, routed experts"),
    11002039: ("displacing", "a sliding window, a pool for one request, resets, hooks that fail"),
    11002080: ("times", "runaways in a pool for one request, five drafts, parts of 64 tokens"),
    11002179: ("times", "1,024 seats, routed experts, by priority"),
    12000572: ("crash", "vLLM 0.33, routed experts, one step in two computes prompts"),
    12000660: ("displacing", "adapters for two slots, a sliding window, hooks that fail"),
    12000995: ("crash", "vLLM 0.33, routed experts, one step in two computes prompts, hybrid"),
    12001180: ("probes", "128k tokens, grammars, hooks that fail: a probe waits 121 steps"),
    12001197: ("crash", "vLLM 0.33, routed experts, one step in two computes prompts, 256 seats"),
    13000222: ("times", "two drafts, images, a starving pool: 20.4 s, in stock 10.4 s"),
    13000317: ("displacing", "adapters for few slots, a tight pool, thoughts observed"),
}


def is_open(result: Result, usual_steps: int) -> bool:
    """Whether a failed case is one of the table, and fails as that says and no other way."""
    known = OPEN.get(result.case.seed)
    return bool(known and result.case.steps == usual_steps and set(result.failures) == {known[0]})
