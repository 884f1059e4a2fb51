"""Workloads of a served comparison: which chat request is sent when.

A trace is drawn from a seed, as single problems, as conversations or as both mixed, or read from
JSON lines::

    {"id": "1-0", "arrival_s": 0.12, "messages": [{"role": "user", "content": "p=7, q=p+5. q?"}],
     "expected": "2", "max_tokens": 1024}

A line may have ``extra``, an object of further fields of the chat request, and ``follows``, the id
of an earlier line: the request is then the next turn of that request's conversation.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from meridian_patch.config.json_text import lines_of, parse_json
from meridian_patch.config.validate import shown
from meridian_patch.demo.problems import MAX_STEPS, make_problem
from meridian_patch.errors import BenchError

ROLES = ("system", "user", "assistant")
TURNS = (2, 6)
_OPTIONAL = ("extra", "follows")
_LATEST_S = 10_000_000
# What the client itself decides: a trace must not change how the stream is read or compared.
_RESERVED = ("model", "messages", "max_tokens", "stream", "return_token_ids", "n")
# The words of the tiny reasoner's training: it has seen system prompts made of them.
_WORDS = (  # noqa: SIM905 - prose reads better than 30 quoted words
    "you are a careful helper that works modulo ten and shows every step of the chain answer with "
    "one digit first then say why keep the order of the names do not guess"
).split()


@dataclass(frozen=True)
class ServedRequest:
    """One chat request of a trace.

    Attributes:
        id: unique within the trace.
        arrival_s: seconds after the start of the trace; of a later turn, after the end of the
            answer before it.
        messages: chat messages, each ``{"role": ..., "content": ...}``; of a later turn, those that
            are added to its conversation.
        expected: the right answer, for grading; empty where there is nothing to grade.
        max_tokens: limit on thinking and answer together.
        extra: further fields of the chat request, such as ``thinking_token_budget``.
        follows: id of the request before it in its conversation; empty for a first turn.
    """

    id: str
    arrival_s: float
    messages: tuple[dict[str, str], ...]
    expected: str
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    follows: str = ""


@dataclass(frozen=True)
class Mix:
    """What a drawn trace of single problems is made of.

    Attributes:
        requests: how many.
        rate_per_s: mean arrivals per second.
        burstiness: shape of the Gamma arrivals; 1 is Poisson, below 1 comes in bursts.
        history_share: share of requests that carry earlier turns, 0 to 1.
        history_turns: most earlier turns of one request.
        hard_share: share of problems drawn with the most steps, whose thoughts are the longest.
        max_tokens: limit of every request.
    """

    requests: int
    rate_per_s: float
    burstiness: float = 0.25
    history_share: float = 0.25
    history_turns: int = 3
    hard_share: float = 0.3
    max_tokens: int = 1024

    def __str__(self) -> str:
        return (
            f"{self.requests} arithmetic problems per seed, {self.rate_per_s:g} per second in "
            f"bursts (Gamma, shape {self.burstiness:g}), {self.hard_share:.0%} of them hard, "
            f"{self.history_share:.0%} with earlier turns."
        )


@dataclass(frozen=True)
class Pause:
    """How long a reader takes from an answer to the next question.

    Attributes:
        mean: in the unit.
        unit: seconds, or the time that a request alone takes for so many tokens.
    """

    mean: float
    unit: Literal["s", "tokens"] = "s"

    def __str__(self) -> str:
        return f"{self.mean:g} {self.unit}"


@dataclass(frozen=True)
class Turns:
    """What a drawn trace of conversations is made of.

    Each begins with one of a few long system prompts; each turn asks one problem.

    Attributes:
        requests: how many, over all conversations.
        rate_per_s: conversations that start per second, Poisson.
        pause: from the end of an answer to the next question, exponential.
        turns: fewest and most of one conversation; the last conversation may have fewer.
        system_prompts: how many there are.
        system_tokens: length of each, in characters, which are tokens of the tiny reasoner.
        hard_share: share of problems drawn with the most steps.
        max_tokens: limit of every request.
    """

    requests: int
    rate_per_s: float
    pause: Pause = Pause(4.0)
    turns: tuple[int, int] = TURNS
    system_prompts: int = 6
    system_tokens: int = 400
    hard_share: float = 0.7
    max_tokens: int = 800

    def __str__(self) -> str:
        return (
            f"{self.requests} requests per seed in conversations of {self.turns[0]} to "
            f"{self.turns[1]} turns, {self.rate_per_s:g} conversations per second (Poisson), "
            f"pauses of {self.pause} on average, {self.system_prompts} "
            f"system prompts of {self.system_tokens} characters, {self.hard_share:.0%} of the "
            "problems hard."
        )


def make_trace(mix: Mix, seed: int) -> list[ServedRequest]:
    """Draw a trace of single problems that depends on its arguments alone."""
    rng = random.Random(seed)
    trace = []
    arrival_s = 0.0
    for number in range(mix.requests):
        messages: list[dict[str, str]] = []
        if rng.random() < mix.history_share:
            for _ in range(rng.randint(1, mix.history_turns)):
                earlier = make_problem(rng)
                messages.append({"role": "user", "content": earlier.question})
                messages.append({"role": "assistant", "content": earlier.answer_text})
        problem = make_problem(rng, MAX_STEPS if rng.random() < mix.hard_share else None)
        messages.append({"role": "user", "content": problem.question})
        trace.append(
            ServedRequest(
                id=f"{seed}-{number}",
                arrival_s=round(arrival_s, 6),
                messages=tuple(messages),
                expected=problem.answer,
                max_tokens=mix.max_tokens,
            )
        )
        arrival_s += rng.gammavariate(mix.burstiness, 1 / (mix.burstiness * mix.rate_per_s))
    return trace


def make_conversations(turns: Turns, seed: int) -> list[ServedRequest]:
    """Draw a trace of conversations, one after the other, that depends on its arguments alone."""
    rng = random.Random(seed)
    systems = [_system_prompt(rng, turns.system_tokens) for _ in range(turns.system_prompts)]
    trace: list[ServedRequest] = []
    start_s = 0.0
    conversation = 0
    while len(trace) < turns.requests:
        start_s += rng.expovariate(turns.rate_per_s)
        opening = [{"role": "system", "content": rng.choice(systems)}]
        follows = ""
        for turn in range(rng.randint(*turns.turns)):
            problem = make_problem(rng, MAX_STEPS if rng.random() < turns.hard_share else None)
            pause = rng.expovariate(1 / turns.pause.mean)
            request = ServedRequest(
                id=f"{seed}-{conversation}-{turn}",
                arrival_s=round(pause if turn else start_s, 6),
                messages=(*opening, {"role": "user", "content": problem.question}),
                expected=problem.answer,
                max_tokens=turns.max_tokens,
                follows=follows,
            )
            trace.append(request)
            opening, follows = [], request.id
        conversation += 1
    return trace[: turns.requests]


def make_mixed(mix: Mix, turns: Turns, seed: int) -> list[ServedRequest]:
    """Draw single problems and conversations that come beside each other."""
    return [*make_conversations(turns, seed), *make_trace(mix, seed)]


def conversations(trace: Iterable[ServedRequest]) -> list[list[ServedRequest]]:
    """The requests of each conversation in order, conversations as they first appear.

    Raises:
        KeyError: a request follows one that does not stand before it, or that another follows.
    """
    found: list[list[ServedRequest]] = []
    by_last: dict[str, list[ServedRequest]] = {}
    for request in trace:
        if request.follows:
            turns = by_last.pop(request.follows)
        else:
            turns = []
            found.append(turns)
        turns.append(request)
        by_last[request.id] = turns
    return found


def _system_prompt(rng: random.Random, num_tokens: int) -> str:
    text = ""
    while len(text) < num_tokens:
        text += rng.choice(_WORDS) + " "
    return text[:num_tokens].strip().capitalize() + "."


def write_trace(path: Path, trace: Iterable[ServedRequest]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace))


def read_trace(path: Path) -> list[ServedRequest]:
    """Read a trace file.

    Raises:
        BenchError: the file cannot be read, or a line is wrong; names line and field.
    """
    try:
        lines = lines_of(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the trace {path}: {error}; give a JSON lines file") from None
    trace: list[ServedRequest] = []
    seen: set[str] = set()
    followed: set[str] = set()
    for number, line in lines:
        request = _parse_line(line, f"{path} line {number}")
        if request.id in seen:
            raise BenchError(f"{path} line {number}: field id {request.id!r} was used before")
        if request.follows and (request.follows not in seen or request.follows in followed):
            raise BenchError(
                f"{path} line {number}: field follows is {request.follows!r}, expected the id of "
                "an earlier request that no other request follows"
            )
        seen.add(request.id)
        followed.add(request.follows)
        trace.append(request)
    if not trace:
        raise BenchError(f"the trace {path} holds no request; expected one JSON object per line")
    return trace


def _parse_line(line: str, where: str) -> ServedRequest:
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise BenchError(f"{where} is {error}") from None
    if not isinstance(fields, dict):
        raise BenchError(f"{where} is not a JSON object, expected {{...}}")
    wanted = ServedRequest.__annotations__
    for name in fields:
        if name not in wanted:
            raise BenchError(f"{where}: unknown field {name}; known: {', '.join(wanted)}")
    for name in wanted:
        if name not in fields and name not in _OPTIONAL:
            raise BenchError(f"{where}: field {name} is missing")
    _check(where, "id", fields["id"], isinstance(fields["id"], str), "a string")
    arrival, limit = fields["arrival_s"], fields["max_tokens"]
    # The type itself: a bool is an int in Python.
    is_time = type(arrival) in (int, float) and 0 <= arrival <= _LATEST_S
    _check(where, "arrival_s", arrival, is_time, f"seconds, 0 to {_LATEST_S}")
    _check(where, "expected", fields["expected"], isinstance(fields["expected"], str), "a string")
    is_limit = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    _check(where, "max_tokens", limit, is_limit, "a whole number above 0")
    messages = fields["messages"]
    expected = "a list of {role, content}, roles " + ", ".join(ROLES)
    _check(where, "messages", messages, _are_messages(messages), expected)
    follows = fields.get("follows", "")
    _check(where, "follows", follows, isinstance(follows, str), "a string")
    extra = fields.get("extra", {})
    is_extra = isinstance(extra, dict) and not set(extra) & set(_RESERVED)
    _check(where, "extra", extra, is_extra, "an object without " + ", ".join(_RESERVED))
    return ServedRequest(**(fields | {"messages": tuple(messages)}))


def _are_messages(messages: Any) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and set(message) == {"role", "content"}
            and message["role"] in ROLES
            and isinstance(message["content"], str)
            for message in messages
        )
    )


def _check(where: str, field: str, value: object, is_right: bool, expected: str) -> None:
    if not is_right:
        raise BenchError(f"{where}: field {field} is {shown(value)}, expected {expected}")
