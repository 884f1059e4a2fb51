"""Reads labelled problems: JSON lines with a prompt and the right answer."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meridian_patch.config.json_text import lines_of, parse_json
from meridian_patch.config.validate import shown
from meridian_patch.errors import CalibrationError

FIELDS = "prompt (text) or messages (a list), answer, and id if you like"


class Problem(NamedTuple):
    """One labelled problem.

    Attributes:
        name: its ``id``, or the number of its line.
        messages: for the chat template.
        answer: what is right, as the grader wants it.
        line: where it stands in the file, from 1.
    """

    name: str
    messages: tuple[Mapping[str, Any], ...]
    answer: Any
    line: int


class ProblemFile(NamedTuple):
    """All problems of a file, and what file it was."""

    path: Path
    sha256: str
    problems: Sequence[Problem]


def read_problems(path: Path) -> ProblemFile:
    """All problems of a file; blank lines are skipped, unknown fields are left alone.

    Raises:
        CalibrationError: no such file, or a line that is no labelled problem; it names file, line
            and field.
    """
    try:
        content = path.read_bytes()
        lines = lines_of(content)
    except OSError as error:
        raise CalibrationError(
            f"data file {path} cannot be read: {error.strerror}; expected JSON lines with {FIELDS}"
        ) from None
    except UnicodeDecodeError as error:
        raise CalibrationError(f"data file {path} is not UTF-8 text: {error}") from None
    problems = [_read(path, number, text) for number, text in lines]
    if not problems:
        raise CalibrationError(
            f"data file {path} holds no problems; expected JSON lines with {FIELDS}"
        )
    seen: dict[str, int] = {}
    for problem in problems:
        if problem.name in seen:
            raise CalibrationError(
                f"data file {path}, line {problem.line}: id {problem.name!r} is that of line "
                f"{seen[problem.name]} too; give each problem its own"
            )
        seen[problem.name] = problem.line
    return ProblemFile(path, hashlib.sha256(content).hexdigest(), problems)


def _read(path: Path, number: int, text: str) -> Problem:
    where = f"data file {path}, line {number}"
    try:
        values = parse_json(text)
    except ValueError as error:
        raise CalibrationError(
            f"{where}: {error}; expected one object per line with {FIELDS}"
        ) from None
    if not isinstance(values, dict):
        raise CalibrationError(
            f"{where}: {type(values).__name__}, expected an object with {FIELDS}"
        )
    answer = values.get("answer")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise CalibrationError(
            f"{where}: answer is missing; without the right answer nothing says what early exit "
            "costs"
        )
    name = values.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool) or name == "":
        raise CalibrationError(f"{where}: id is {shown(name)}, expected text or a whole number")
    return Problem(str(name), _messages(values, where), answer, number)


def _messages(values: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    if ("prompt" in values) == ("messages" in values):
        raise CalibrationError(f"{where}: expected either prompt or messages")
    if "prompt" in values:
        prompt = values["prompt"]
        if not isinstance(prompt, str) or not prompt.strip():
            raise CalibrationError(f"{where}: prompt is {shown(prompt)}, expected text")
        return ({"role": "user", "content": prompt},)
    messages = values["messages"]
    if not isinstance(messages, list) or not messages:
        raise CalibrationError(
            f"{where}: messages is {shown(messages)}, expected a list of messages"
        )
    for index, message in enumerate(messages):
        is_message = isinstance(message, dict) and isinstance(message.get("role"), str)
        if not is_message or "content" not in message:
            raise CalibrationError(
                f"{where}: messages[{index}] is {shown(message)}, expected an object with role and "
                "content"
            )
    return tuple(messages)
