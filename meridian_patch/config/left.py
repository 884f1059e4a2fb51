"""Keys and values that earlier releases knew, and why they left."""

from collections.abc import Mapping
from typing import Final

_LEVELS = "levels of think tokens decide which requests wait; set policy.level_tokens or aging_s"
_ADMISSION = "it changed no figure beside levels (docs/adr/0021); leave it out"
_VICTIMS = "levels of think tokens choose now who is preempted; leave it out"
_PACING = "it lengthened the gaps of answers (docs/adr/0021); leave it out"
_CREDIT = "its bound was never met (docs/adr/0025); leave it out"
_RELOAD = "what computing again costs decides nothing any more (docs/adr/0025); leave it out"
_GATE = "holding requests back for other ranks showed no gain (docs/adr/0019); leave it out"

LEFT_KEYS: Final[Mapping[str, str]] = {
    "policy.max_preemptions": _LEVELS,
    "policy.sharing_min_tokens": _LEVELS,
    "policy.victims": _VICTIMS,
    "policy.pacing": _PACING,
    "policy.admission": _ADMISSION,
    "policy.admission_reserve_tokens": _ADMISSION,
    "policy.admission_overcommit": _ADMISSION,
    "policy.sharing_overhead": _CREDIT,
    "policy.reload": _RELOAD,
    "policy.balance_hold_steps": _GATE,
}
"""Dotted keys, each with the end of the sentence that refuses it."""

_PROFILES = "requests began to answer as late as on stock (docs/adr/0021); use latency"

LEFT_VALUES: Final[Mapping[tuple[str, str], str]] = {
    ("policy.name", "throughput"): _PROFILES,
    ("policy.name", "fair"): _PROFILES,
}
"""The same for values of keys that stayed."""
