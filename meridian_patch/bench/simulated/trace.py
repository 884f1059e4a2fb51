"""Trace files: lengths and times of requests, without texts, as JSON lines.

One line of a trace file::

    {"id": "3-0", "arrival_s": 0.1, "prompt_tokens": 208, "think_tokens": 478, "answer_tokens": 206}
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from meridian_patch.config.json_text import lines_of, parse_json
from meridian_patch.config.validate import shown
from meridian_patch.errors import BenchError

LONGEST = 1_000_000
# Upper bound of what a chat template adds to one request, the marker of a tool call included.
TEMPLATE_TOKENS = 32
_LATEST_S = 1e7
Seconds = Annotated[float, Field(ge=0, le=_LATEST_S, allow_inf_nan=False)]
Tokens = Annotated[int, Field(ge=0, le=LONGEST)]
SomeTokens = Annotated[int, Field(ge=1, le=LONGEST)]
Name = Annotated[str, Field(min_length=1)]


class History(StrEnum):
    """Which earlier thoughts a later prompt of the same session contains."""

    STRIPPED = "stripped"  # none
    KEPT = "kept"  # all
    TOOL_LOOP = "tool-loop"  # those since the last user message
    PLAIN = "plain"  # the model does not think


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace. The chat template adds its markers to the tokens counted here.

    Attributes:
        id: unique within the trace.
        arrival_s: seconds after the start of the trace; None for a later turn of a session,
            which arrives ``pause_s`` after the turn before.
        prompt_tokens: system prompt and user message; of a later turn, only what is new.
        think_tokens: 0 if the request does not think.
        session: the requests of one session follow each other.
        turn: index within the session, from 0, without gaps.
        pause_s: of a later turn, seconds from the last token of the turn before to this request.
        shared_tokens: tokens of the system prompt, part of ``prompt_tokens`` of the first turn.
        system: name of the system prompt; requests that give the same name share its tokens.
        is_tool_result: the new tokens are the result of a tool that the turn before called.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    id: Name
    arrival_s: Seconds | None
    prompt_tokens: SomeTokens
    think_tokens: Tokens
    answer_tokens: SomeTokens
    session: Name | None = None
    turn: Annotated[int, Field(ge=0)] = 0
    pause_s: Seconds = 0.0
    shared_tokens: Tokens = 0
    system: Name | None = None
    is_tool_result: bool = False


_LINE = TypeAdapter(TraceRequest)


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Write one JSON object per line; fields at their defaults are left out."""
    path.write_bytes(b"".join(_LINE.dump_json(r, exclude_defaults=True) + b"\n" for r in trace))


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a trace file; requests in the order of its lines.

    Raises:
        BenchError: the file cannot be read, or a line is wrong; names file, line and field.
    """
    try:
        lines = lines_of(path.read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BenchError(f"cannot read the trace {path}: {why}; give a JSON lines file") from None
    checked = _Checks()
    for number, line in lines:
        where = f"{path} line {number}"
        checked.add(_parse(line, where), where)
    if not checked.trace:
        raise BenchError(f"the trace {path} holds no request; expected one JSON object per line")
    return checked.trace


def _parse(line: str, where: str) -> TraceRequest:
    try:
        request = _LINE.validate_json(line)
        parse_json(line)
        return request
    except ValidationError as error:
        detail = error.errors()[0]
    except ValueError as error:
        raise BenchError(f"{where}: {error}; expected one JSON object per line") from None
    expected = detail["msg"].removeprefix("Input should be ")
    if not detail["loc"]:
        raise BenchError(f"{where}: {expected}; expected one JSON object per line") from None
    name = detail["loc"][0]
    if detail["type"] in {"missing", "missing_argument"}:
        raise BenchError(f"{where}: field {name} is missing") from None
    known = [field.name for field in fields(TraceRequest)]
    if name not in known:
        raise BenchError(f"{where}: unknown field {name}; known: {', '.join(known)}") from None
    raise _wrong(where, str(name), detail["input"], expected)


def _wrong(where: str, field: str, value: object, expected: str) -> BenchError:
    return BenchError(f"{where}: field {field} is {shown(value)}, expected {expected}")


class _Checks:
    """Checks of a request against the requests before it."""

    def __init__(self) -> None:
        self.trace: list[TraceRequest] = []
        self._ids: set[str] = set()
        self._turns: dict[str, int] = {}
        self._systems: dict[str, int] = {}

    def add(self, request: TraceRequest, where: str) -> None:
        if request.id in self._ids:
            raise _wrong(where, "id", request.id, "an id that was not used before")
        self._ids.add(request.id)
        self._check_turn(request, where)
        self._check_system(request, where)
        self.trace.append(request)

    def _check_turn(self, request: TraceRequest, where: str) -> None:
        if request.session is None:
            following = 0
        else:
            following = self._turns.get(request.session, 0)
            self._turns[request.session] = following + 1
        if request.turn != following:
            expected = f"{following}, the next turn of session {request.session!r} in this file"
            if request.session is None:
                expected = "0 where no session is named"
            raise _wrong(where, "turn", request.turn, expected)
        if request.turn == 0 and request.arrival_s is None:
            raise _wrong(where, "arrival_s", None, "seconds, 0 or more")
        if request.turn > 0 and request.arrival_s is not None:
            expected = "null: a later turn comes pause_s after the turn before"
            raise _wrong(where, "arrival_s", request.arrival_s, expected)
        if request.turn == 0 and request.pause_s:
            raise _wrong(where, "pause_s", request.pause_s, "0 at a session's first turn")
        if request.turn == 0 and request.is_tool_result:
            raise _wrong(where, "is_tool_result", True, "false at a session's first turn")

    def _check_system(self, request: TraceRequest, where: str) -> None:
        shared = request.shared_tokens
        if request.system is None or request.turn > 0:
            if shared:
                expected = "0 where no system prompt is named, and at later turns"
                raise _wrong(where, "shared_tokens", shared, expected)
            return
        if shared > request.prompt_tokens:
            expected = f"at most prompt_tokens, which is {request.prompt_tokens}"
            raise _wrong(where, "shared_tokens", shared, expected)
        before = self._systems.setdefault(request.system, shared)
        if shared != before:
            expected = f"{before}, as before for system {request.system!r}"
            raise _wrong(where, "shared_tokens", shared, expected)
