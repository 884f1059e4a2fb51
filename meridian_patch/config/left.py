"""Keys and values that earlier releases knew, and why they left."""

from collections.abc import Mapping
from typing import Final

_LEVELS = "think tokens alone decide now who waits for whom (policy.level_tokens); aging_s bounds it"
_ADMISSION = "it admitted later than stock and gained nothing beside time-sharing"

LEFT_KEYS: Final[Mapping[str, str]] = {
    "policy.max_preemptions": _LEVELS,
    "policy.sharing_min_tokens": _LEVELS,
}
"""Dotted keys, each with the end of the sentence that refuses it."""

LEFT_VALUES: Final[Mapping[tuple[str, str], str]] = {}
"""The same for values of keys that stayed."""
