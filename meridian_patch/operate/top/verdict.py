"""Names the phase that is the bottleneck, the numbers it rests on, and what to change. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

FULL: Final = 0.9
"""Share of the KV pool from which on memory, not seats, holds requests back."""
_HALF = 0.5
_MOST = 0.8
_THINK, _ANSWER, _PREFILL = "think", "answer", "prefill"


@dataclass(frozen=True, kw_only=True)
class Load:
    """What the verdict rests on. None, or an empty dict: the server does not tell it.

    Attributes:
        window_s: length of the window that preemptions and fallbacks were counted in.
        is_patched: the server tells phases.
        requests: unfinished requests by phase; ``prefill`` has the waiting ones.
        running: requests in the batch.
        waiting: requests in the queue.
        kv_usage: share of the KV pool in use, 0 to 1; of several engines the fullest one's.
        preemptions: by the phase the request was in.
        preempted: all of them; without phases as vLLM counts them.
        prompt_share: share of the window's computed tokens that are of prompts, 0 to 1.
        fallbacks: steps in which the plug-in failed or was too slow, by reason.
        parts_off: parts that are switched off, by name.
    """

    window_s: float
    is_patched: bool
    requests: Mapping[str, float]
    running: float | None
    waiting: float | None
    kv_usage: float | None
    preemptions: Mapping[str, float]
    preempted: float | None
    prompt_share: float | None
    fallbacks: Mapping[str, float]
    parts_off: Mapping[str, float]

    @property
    def computing_prompts(self) -> float:
        """Requests in the batch whose prompts are computed."""
        return max(0.0, self.requests.get(_PREFILL, 0.0) - (self.waiting or 0.0))


@dataclass(frozen=True)
class Verdict:
    """Where a server is held back.

    Attributes:
        bottleneck: a phase (``prefill``, ``think``, ``answer``), ``seats``, ``plug-in``,
            ``unknown`` or ``none``.
        numbers: what it rests on.
        change: what to change; empty: nothing.
    """

    bottleneck: str
    numbers: str
    change: str = ""


def judge(load: Load) -> Verdict:
    """The bottleneck of a server; the first rule that applies."""
    rules = (_broken, _idle, _answers_preempted, _memory, _prompts, _seats)
    found = (rule(load) for rule in rules)
    none = Verdict("none", f"none waits, {_memory_text(load)}; {_phases(load)}")
    return next((verdict for verdict in found if verdict is not None), none)


def _broken(load: Load) -> Verdict | None:
    off = [name for name, count in load.parts_off.items() if count > 0]
    if off:
        return Verdict(
            "plug-in",
            f"off after failures: {', '.join(off)}",
            "read its first error in the server's log, report it, restart",
        )
    failed = load.fallbacks.get("exception", 0) + load.fallbacks.get("kv_integrity", 0)
    if failed:
        return Verdict(
            "plug-in",
            f"{_number(failed, 'step', 'steps')} failed and ran as stock in {load.window_s:.0f} s",
            "read the first traceback in the server's log and report it",
        )
    return None


def _idle(load: Load) -> Verdict | None:
    if load.running is None:
        return Verdict(
            "unknown",
            "the server does not say how many requests run",
            "start it without --disable-log-stats",
        )
    if load.running + (load.waiting or 0) == 0:
        return Verdict("none", f"no request, {_memory_text(load)}")
    return None


def _answers_preempted(load: Load) -> Verdict | None:
    preempted = load.preemptions.get(_ANSWER, 0)
    if not preempted:
        return None
    return Verdict(
        _ANSWER,
        f"{_number(preempted, 'answer was', 'answers were')} preempted in {load.window_s:.0f} s, "
        f"{_memory_text(load)}: the answers alone outgrow it",
        "lower --max-num-seqs, or give the KV cache more memory",
    )


def _memory(load: Load) -> Verdict | None:
    # Load-bearing: vLLM preempts, and so does time-sharing, where a request finds no KV block; the
    # use that a scrape sees may be low, just after that.
    preempted = load.preempted or 0
    is_full = (load.kv_usage or 0) >= FULL and (load.waiting or 0) > 0
    if not (is_full or preempted):
        return None
    numbers = f"{_memory_text(load)} and {_wait(load)}; {_phases(load)}"
    if preempted:
        numbers = f"{preempted:.0f} preempted in {load.window_s:.0f} s; {numbers}"
    if not load.is_patched:
        return Verdict("unknown", numbers, "serve it patched to see which phase holds the memory")
    phase = max(
        (_THINK, load.requests.get(_THINK, 0)),
        (_ANSWER, load.requests.get(_ANSWER, 0)),
        (_PREFILL, load.computing_prompts),
        key=lambda each: each[1],
    )[0]
    changes = {
        _THINK: "bound thoughts (exit.max_think_tokens, exit.mode=enforce; exit.eat and exit.rpdi "
        "off unless calibrated), or give the KV cache more memory",
        _ANSWER: "give the KV cache more memory, or lower max_tokens of requests",
        _PREFILL: "give the KV cache more memory, or shorten prompts",
    }
    return Verdict(phase, numbers, changes[phase])


def _prompts(load: Load) -> Verdict | None:
    computing, running, waiting = load.computing_prompts, load.running or 0, load.waiting or 0
    if load.prompt_share is not None and load.prompt_share >= _MOST and waiting:
        why = f"{load.prompt_share:.0%} of the tokens computed are of prompts"
    elif load.is_patched and computing > 1 and computing >= _HALF * running:
        why = f"{computing:.0f} of {running:.0f} running requests compute their prompts"
    else:
        return None
    return Verdict(
        _PREFILL,
        f"{why}, {_memory_text(load)}, {_wait(load)}",
        "raise --max-num-batched-tokens; with requests that answer, policy.answer_itl_ms too",
    )


def _seats(load: Load) -> Verdict | None:
    if not load.waiting:
        return None
    return Verdict(
        "seats",
        f"{_wait(load)} though the {_memory_text(load)}; "
        f"{_number(load.running or 0, 'runs', 'run')}: {_phases(load)}",
        "raise --max-num-seqs while the KV cache has room",
    )


def _number(count: float, one: str, more: str) -> str:
    return f"{count:.0f} {one if count == 1 else more}"


def _wait(load: Load) -> str:
    return _number(load.waiting or 0, "waits", "wait")


def _memory_text(load: Load) -> str:
    return "KV use unknown" if load.kv_usage is None else f"KV cache is {load.kv_usage:.0%} full"


def _phases(load: Load) -> str:
    if not load.is_patched:
        return "phases unknown, the server runs stock"
    named = {
        "think": load.requests.get(_THINK, 0),
        "answer": load.requests.get(_ANSWER, 0),
        "have no token yet": load.requests.get(_PREFILL, 0),
    }
    counts = ", ".join(f"{count:.0f} {name}" for name, count in named.items())
    return f"of all {sum(named.values()):.0f} requests {counts}"
