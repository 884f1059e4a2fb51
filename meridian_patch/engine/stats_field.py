"""A field on vLLM's SchedulerStats that carries our counts across the process border."""

from dataclasses import field
from typing import Any

from vllm.v1.metrics.stats import SchedulerStats

FIELD = "meridian_patch"


def install() -> None:
    """Add the field; must run in every process before the first message is coded.

    It stays after patches are undone: without our scheduler it is always None.
    """
    # Load-bearing: msgspec codes a dataclass by its __dataclass_fields__ and drops all else.
    fields = SchedulerStats.__dataclass_fields__
    if FIELD in fields:
        return
    added: Any = field(default=None)
    added.name = FIELD
    added.type = dict[str, int] | None
    # Load-bearing: `dataclasses.fields()` recognises a field by this marker; borrow a real one.
    added._field_type = fields["kv_cache_usage"]._field_type
    fields[FIELD] = added
    SchedulerStats.__annotations__[FIELD] = dict[str, int] | None
    setattr(SchedulerStats, FIELD, None)
