"""Keys and values that earlier releases knew, and why they left."""

from collections.abc import Mapping
from typing import Final

_LEVELS = "levels of think tokens decide who waits for whom; set policy.level_tokens or aging_s"
_ADMISSION = "it admitted requests later than stock and gained nothing beside time_sharing"
_VICTIMS = "it made no difference within the spread of seeds; levels choose who is preempted"
_PACING = "it lengthened the gaps of answers and served fewer tokens per second"

LEFT_KEYS: Final[Mapping[str, str]] = {
    "policy.max_preemptions": _LEVELS,
    "policy.sharing_min_tokens": _LEVELS,
    "policy.victims": _VICTIMS,
    "policy.pacing": _PACING,
    "policy.admission": _ADMISSION,
    "policy.admission_reserve_tokens": _ADMISSION,
    "policy.admission_overcommit": _ADMISSION,
}
"""Dotted keys, each with the end of the sentence that refuses it."""

_PROFILES = "latency is better in each figure of its page; use latency"

LEFT_VALUES: Final[Mapping[tuple[str, str], str]] = {
    ("policy.name", "throughput"): _PROFILES,
    ("policy.name", "fair"): _PROFILES,
}
"""The same for values of keys that stayed."""
