"""Reads JSON that users give: nothing is converted, and one sentence for whatever is wrong."""

import json
import math
from typing import Any


def lines_of(content: bytes) -> list[tuple[int, str]]:
    """Number, from 1, and text of each line of JSON lines that is not blank.

    A line ends at a line feed and nowhere else: U+2028 and its like may stand in a text.

    Args:
        content: of the file.

    Raises:
        UnicodeDecodeError: it is not UTF-8.
    """
    lines = enumerate(content.decode("utf-8-sig").split("\n"), 1)
    return [(number, line) for number, line in lines if line.strip()]


def parse_json(text: str) -> Any:
    """One JSON value.

    Raises:
        ValueError: what is not JSON, or would not be kept: of two equal keys the first one, a
            number that no float holds, one half of a surrogate pair. Its text begins "not JSON: ".
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_whole,
            parse_float=_number,
            parse_constant=_constant,
        )
        json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeEncodeError:
        raise ValueError("not JSON: a text holds one half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("not JSON: lists and objects are nested too deeply") from None
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"not JSON: key {twice!r} stands twice in an object")
    return values


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        # Python reads no number of thousands of digits.
        raise ValueError(f"not JSON: a number has {len(text)} digits") from None


def _number(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"not JSON: {text[:40]} is larger than any float")
    return value


def _constant(text: str) -> float:
    raise ValueError(f"not JSON: it has no {text}")
