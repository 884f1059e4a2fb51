"""Converts pydantic's errors to one ConfigError that names origin, value and expectation."""

import difflib
from collections.abc import Callable, Mapping
from reprlib import Repr
from typing import Any, Final, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from meridian_patch.config.left import LEFT_KEYS, LEFT_VALUES
from meridian_patch.errors import ConfigError

KeyPath = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

# Wrong fields that one message names.
_MOST_ERRORS: Final = 20
# Characters of a wrong value in a message. Nothing longer is written out: a value may be large.
_MOST_SHOWN: Final = 1000
_MOST_CUT: Final = 100
# Bits of a number that is written out; Python refuses to write thousands of digits.
_MOST_BITS: Final = 4096
# In place of pydantic's words, which name types of Python.
_EXPECTED: Final[Mapping[str, str]] = {
    "bool_type": "true or false",
    "model_type": "a mapping of keys to values",
    "dict_type": "a mapping of keys to values",
}


class _Short(Repr):
    """Writes the beginnings of long values."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = 200
        self.maxstring = self.maxother = self.maxlong = 600

    def repr_int(self, x: int, level: int) -> str:
        """See ``reprlib``; a number that Python does not write is described."""
        if x.bit_length() > _MOST_BITS:
            return f"a whole number of {x.bit_length()} bits"
        return super().repr_int(x, level)


_SHORT: Final = _Short()


def validate(
    model: type[Model], data: Mapping[str, Any], origin_of: Callable[[KeyPath], str]
) -> Model:
    """Build ``model`` from ``data``.

    Args:
        model: a pydantic model.
        data: keys and values, as read.
        origin_of: returns the name of the file or variable of a key path.

    Raises:
        ConfigError: names every wrong field, its origin, its value and what was expected.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        details = _innermost(error.errors())
        lines = [_describe(model, detail, origin_of) for detail in details[:_MOST_ERRORS]]
        if len(details) > _MOST_ERRORS:
            lines.append(f"and {len(details) - _MOST_ERRORS} more")
        raise ConfigError("\n".join(lines)) from None


def field_names(model: type[BaseModel], path: KeyPath) -> tuple[str, ...]:
    """Names of the fields below a key path; empty if it leads to a value or does not exist."""
    section: type[BaseModel] | None = model
    for key in path:
        if section is None:
            return ()
        if isinstance(key, int):
            continue
        field = section.model_fields.get(key)
        section = None if field is None else _model_in(field.annotation)
    return () if section is None else tuple(section.model_fields)


def unknown_key(path: KeyPath, known: tuple[str, ...], origin: str) -> ConfigError:
    """The error for a key that does not exist, or no longer."""
    if dotted(path) in LEFT_KEYS:
        return ConfigError(f"{origin}: {dotted(path)} left: {LEFT_KEYS[dotted(path)]}")
    close = difflib.get_close_matches(str(path[-1]), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return ConfigError(
        f"{origin}: unknown key {dotted(path)}; {hint}known here: {', '.join(known)}"
    )


def dotted(path: KeyPath) -> str:
    """``policy.name``; list positions as numbers."""
    return ".".join(str(key) for key in path)


def shown(value: Any) -> str:
    """A wrong value in a message, in one line; of one that is long, the beginning."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def cut(text: str) -> str:
    """A text in a message, in one line; of one that is long, the beginning."""
    line = text if text.isprintable() else repr(text)
    return line if len(line) <= _MOST_CUT else f"{line[:_MOST_CUT]}..."


def _innermost(details: list[ErrorDetails]) -> list[ErrorDetails]:
    """Without errors of a list or section of which a part is wrong: pydantic leaves it out."""
    around = {each["loc"][:length] for each in details for length in range(len(each["loc"]))}
    return [each for each in details if each["loc"] not in around]


def _describe(
    model: type[BaseModel], detail: ErrorDetails, origin_of: Callable[[KeyPath], str]
) -> str:
    path = detail["loc"]
    origin = origin_of(path)
    expected = _EXPECTED.get(detail["type"]) or detail["msg"].removeprefix("Input should be ")
    expected = expected.removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        return str(unknown_key(path, field_names(model, path[:-1]), origin))
    if detail["type"] == "missing":
        return f"{origin}: {dotted(path)} is missing; it has no default"
    if not path:
        return f"{origin}: {expected}"
    value = detail["input"]
    why = LEFT_VALUES.get((dotted(path), value)) if isinstance(value, str) else None
    if why is not None:
        return f"{origin}: {dotted(path)}={value} left: {why}"
    return f"{origin}: {dotted(path)} is {shown(value)}, expected {expected}"


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model that an annotation holds, directly or inside a tuple or a union."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_model_in, get_args(annotation))), None)
