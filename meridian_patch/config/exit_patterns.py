"""The patterns that end a thought, as they are written in files and requests."""

from collections.abc import Sequence
from typing import Any

Ids = tuple[int, ...]
Pattern = str | Ids | tuple[Ids, ...]
"""A text, a sequence of token ids, or several sequences of which any counts."""

MOST_PATTERNS = 64
MOST_OF_A_REQUEST = 8
_MOST_BYTES = 100
# More than a text has, in any tokenizer.
_MOST_IDS = 128
# In how many sequences of tokens a text may be written.
_MOST_SPELLINGS = 16


def read_patterns(value: Any, most: int) -> tuple[Pattern, ...]:
    """Patterns from a list of texts, lists of token ids, and lists of such lists.

    Args:
        value: as read from YAML or JSON.
        most: how many patterns are allowed.

    Raises:
        ValueError: the message says what was expected, and of which pattern.
    """
    if not isinstance(value, list | tuple):
        # pydantic makes one message of it; a TypeError would pass through.
        raise ValueError("a list of patterns, each a text or a list of token ids")  # noqa: TRY004
    if len(value) > most:
        raise ValueError(f"at most {most} patterns")
    return tuple(_read(pattern, number) for number, pattern in enumerate(value, 1))


def _read(pattern: Any, number: int) -> Pattern:
    where = f"pattern {number} to be"
    if isinstance(pattern, str):
        if not pattern.strip():
            raise ValueError(f"{where} text that is not blank")
        if len(pattern.encode()) > _MOST_BYTES:
            raise ValueError(f"{where} at most {_MOST_BYTES} bytes of text")
        return pattern
    if not isinstance(pattern, list | tuple) or not pattern:
        raise ValueError(f"{where} a text, or a list of token ids that is not empty")
    if not isinstance(pattern[0], list | tuple):
        return _read_ids(pattern, where)
    if len(pattern) > _MOST_SPELLINGS:
        raise ValueError(f"{where} at most {_MOST_SPELLINGS} lists of token ids")
    return tuple(_read_ids(ids, where) for ids in pattern)


def _read_ids(ids: Sequence[Any], where: str) -> Ids:
    is_right = isinstance(ids, list | tuple) and 0 < len(ids) <= _MOST_IDS
    # A bool is an int in Python.
    if not is_right or not all(type(each) is int and each >= 0 for each in ids):
        raise ValueError(f"{where} 1 to {_MOST_IDS} token ids, whole numbers from 0 on")
    return tuple(ids)
