"""Says whether an answer is right."""

import importlib
import math
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meridian_patch.calibrate.problems import Problem
from meridian_patch.config.validate import shown
from meridian_patch.errors import CalibrationError

if TYPE_CHECKING:
    from collections.abc import Iterator

KNOWN = "exact, numeric, regex:PATTERN, or MODULE:FUNCTION"
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9

# Answer text and the right answer, to whether it is right.
Judge = Callable[[str, Any], Any]


class Grader(NamedTuple):
    """One way to grade.

    Attributes:
        spec: as given.
        judge: from an answer's text and the right answer to whether it is right.
        flaw: from a right answer to what is wrong with it; empty when it can be compared with.
    """

    spec: str
    judge: Judge
    flaw: Callable[[Any], str]

    def is_right(self, text: str, problem: Problem) -> bool:
        """Grade one answer.

        Args:
            text: what stands behind the thought, without special tokens.
            problem: that it answers.

        Raises:
            CalibrationError: the grader failed; it names grader and problem.
        """
        try:
            return bool(self.judge(text, problem.answer))
        except Exception as error:
            raise CalibrationError(
                f"grader {self.spec} failed on problem {problem.name} (line {problem.line}): "
                f"{error!r}"
            ) from error

    def check(self, path: Path, problems: Sequence[Problem]) -> None:
        """Raise CalibrationError for the first answer that nothing can be compared with."""
        for problem in problems:
            flaw = self.flaw(problem.answer)
            if flaw:
                raise CalibrationError(
                    f"data file {path}, line {problem.line}: answer is {shown(problem.answer)}, "
                    f"expected {flaw} for grader {self.spec}"
                )


def make_grader(spec: str) -> Grader:
    r"""Return the grader that a name stands for.

    1. ``exact``: the texts are equal, without white space around them.
    2. ``numeric``: the last number of the answer (in its last ``\boxed{}`` if it has one) is
       within 1e-6, relative, of the right one.
    3. ``regex:PATTERN``: the last match, or its first group, equals the right answer.
    4. ``MODULE:FUNCTION``: ``function(answer_text, answer)`` is true; the module is imported now,
       and the working directory is searched last.

    Raises:
        CalibrationError: unknown name, invalid pattern, or no such module or function.
    """
    kind, colon, rest = spec.partition(":")
    if spec == "exact":
        return Grader(spec, lambda text, right: text.strip() == str(right).strip(), _text_flaw)
    if spec == "numeric":
        return Grader(spec, _is_number, _number_flaw)
    if kind == "regex" and rest:
        return Grader(spec, _matcher(spec, rest), _text_flaw)
    if colon and kind and rest and kind != "regex":
        return Grader(spec, _import(spec, kind, rest), lambda _: "")
    raise CalibrationError(f"grader {spec!r} is unknown; known: {KNOWN}")


def _text_flaw(right: Any) -> str:
    is_text = isinstance(right, str | int | float) and not isinstance(right, bool)
    return "" if is_text else "text or a number"


def _number_flaw(right: Any) -> str:
    return "a number" if _text_flaw(right) or _number(str(right)) is None else ""


def _number(text: str) -> float | None:
    """The number that a text is."""
    match = _NUMBER.fullmatch(text.strip())
    return float(match.group().replace(",", "")) if match else None


def _is_number(text: str, right: Any) -> bool:
    boxed = _BOXED.findall(text)
    found = _NUMBER.findall(boxed[-1] if boxed else text)
    expected = _number(str(right))
    if not found or expected is None:
        return False
    value = float(found[-1].replace(",", ""))
    return math.isclose(value, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)


def _matcher(spec: str, pattern: str) -> Judge:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise CalibrationError(f"grader {spec!r}: not a regular expression: {error}") from None

    def judge(text: str, right: Any) -> bool:
        matches = list(compiled.finditer(text))
        if not matches:
            return False
        found = matches[-1].group(1 if compiled.groups else 0)
        return found is not None and found.strip() == str(right).strip()

    return judge


def _import(spec: str, module: str, name: str) -> Judge:
    try:
        with _working_directory():
            found = importlib.import_module(module)
    except Exception as error:
        raise CalibrationError(
            f"grader {spec!r}: module {module} cannot be imported: {error!r}; known: {KNOWN}"
        ) from error
    function = getattr(found, name, None)
    if not callable(function):
        raise CalibrationError(f"grader {spec!r}: module {module} has no function {name}")
    judge: Judge = function
    return judge


@contextmanager
def _working_directory() -> "Iterator[None]":
    """Modules are looked for in the working directory too, behind all others, and only here.

    vLLM would take a folder named triton_kernels there for the package it knows by that name.
    """
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        yield
    finally:
        sys.path.remove(here)
