"""Adds a field to vLLM's SchedulerStats that carries the plug-in's counts between processes."""

from dataclasses import field
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

from meridian_patch.engine import wire


def install() -> None:
    """Add the field; must run in every process before it encodes or decodes its first message.

    The field stays after patches are undone; without a phase-aware scheduler it is always None.
    """
    # Load-bearing: msgspec encodes the `__dataclass_fields__` of a dataclass and drops the rest.
    fields = SchedulerStats.__dataclass_fields__
    if wire.COUNTS in fields:
        return
    added: Any = field(default=None)
    added.name = wire.COUNTS
    added.type = dict[str, float] | None
    # Load-bearing: `dataclasses.fields()` recognises a field by this marker; it is copied from
    # another field.
    added._field_type = fields["kv_cache_usage"]._field_type
    fields[wire.COUNTS] = added
    SchedulerStats.__annotations__[wire.COUNTS] = dict[str, float] | None
    setattr(SchedulerStats, wire.COUNTS, None)
