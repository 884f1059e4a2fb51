"""Traces: which chat request arrives when, drawn from a seed or read from JSON lines.

One line of a trace file::

    {"id": "1-0", "arrival_s": 0.12, "messages": [{"role": "user", "content": "p=7, q=p+5. q?"}],
     "expected": "2", "max_tokens": 1024}

A line may have ``extra``, an object of further fields of the chat request.
"""

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from meridian_patch.demo.problems import MAX_STEPS, make_problem
from meridian_patch.errors import BenchError

ROLES = ("system", "user", "assistant")
_OPTIONAL = ("extra",)
# What the client itself decides: a trace must not change how the stream is read or compared.
_RESERVED = ("model", "messages", "max_tokens", "stream", "return_token_ids", "n")


@dataclass(frozen=True)
class TraceRequest:
    """One chat request of a trace.

    Attributes:
        id: unique within the trace.
        arrival_s: seconds after the start of the trace.
        messages: chat messages, each ``{"role": ..., "content": ...}``.
        expected: the right answer, for grading; empty where there is nothing to grade.
        max_tokens: limit on thinking and answer together.
        extra: further fields of the chat request, such as ``thinking_token_budget``.
    """

    id: str
    arrival_s: float
    messages: tuple[dict[str, str], ...]
    expected: str
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mix:
    """What a drawn trace is made of.

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


def make_trace(mix: Mix, seed: int) -> list[TraceRequest]:
    """Draw a trace that depends on its arguments alone."""
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
            TraceRequest(
                id=f"{seed}-{number}",
                arrival_s=round(arrival_s, 6),
                messages=tuple(messages),
                expected=problem.answer,
                max_tokens=mix.max_tokens,
            )
        )
        arrival_s += rng.gammavariate(mix.burstiness, 1 / (mix.burstiness * mix.rate_per_s))
    return trace


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Write one JSON object per line."""
    path.write_text("".join(json.dumps(asdict(request)) + "\n" for request in trace))


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace file.

    Raises:
        BenchError: the file cannot be read, or a line is wrong; names line and field.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"cannot read the trace {path}: {error}; give a JSON lines file") from None
    trace = []
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        request = _parse_line(line, f"{path} line {number}")
        if request.id in seen:
            raise BenchError(f"{path} line {number}: field id {request.id!r} was used before")
        seen.add(request.id)
        trace.append(request)
    if not trace:
        raise BenchError(f"the trace {path} holds no request; expected one JSON object per line")
    return trace


def _parse_line(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise BenchError(f"{where} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BenchError(f"{where} is not a JSON object, expected {{...}}")
    wanted = TraceRequest.__annotations__
    for name in fields:
        if name not in wanted:
            raise BenchError(f"{where}: unknown field {name}; known: {', '.join(wanted)}")
    for name in wanted:
        if name not in fields and name not in _OPTIONAL:
            raise BenchError(f"{where}: field {name} is missing")
    _check(where, "id", fields["id"], isinstance(fields["id"], str), "a string")
    arrival, limit = fields["arrival_s"], fields["max_tokens"]
    is_time = isinstance(arrival, int | float) and not isinstance(arrival, bool) and arrival >= 0
    _check(where, "arrival_s", arrival, is_time, "seconds, 0 or more")
    _check(where, "expected", fields["expected"], isinstance(fields["expected"], str), "a string")
    is_limit = isinstance(limit, int) and not isinstance(limit, bool) and limit > 0
    _check(where, "max_tokens", limit, is_limit, "a whole number above 0")
    messages = fields["messages"]
    expected = "a list of {role, content}, roles " + ", ".join(ROLES)
    _check(where, "messages", messages, _are_messages(messages), expected)
    extra = fields.get("extra", {})
    is_extra = isinstance(extra, dict) and not set(extra) & set(_RESERVED)
    _check(where, "extra", extra, is_extra, "an object without " + ", ".join(_RESERVED))
    return TraceRequest(**(fields | {"messages": tuple(messages)}))


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
        raise BenchError(f"{where}: field {field} is {value!r}, expected {expected}")
