"""Looks for what our own tables still hold of requests that are gone."""

from collections import deque
from collections.abc import Iterator
from typing import Any

from vllm.v1.request import Request

_PLAIN = (str, bytes, int, float, complex, bool, type(None), type)


def find_leaks(scheduler: Any, names: set[str]) -> list[str]:
    """Where objects of ours hold a request, or the name of one; paths such as ``exits.requests``.

    Args:
        scheduler: ours, of which everything that is not vLLM's own is walked through.
        names: of all requests that ever were; probes' names are known by their beginning.
    """
    # Its own queues are vLLM's.
    seen: set[int] = {id(scheduler)}
    found = []
    for attribute, value in vars(scheduler).items():
        if _is_ours(value) or attribute in _own_tables(scheduler):
            found += list(_walk(value, attribute, names, seen))
    manager = scheduler.kv_cache_manager
    for queue in getattr(manager, "queues", ()):
        found += list(_walk(queue.retention, "queues.retention", names, seen))
    return found


def _own_tables(scheduler: Any) -> set[str]:
    """Containers that our mixin put on the scheduler."""
    from meridian_patch.engine.scheduler.scheduler import PhaseScheduling

    code = PhaseScheduling.__init__.__code__.co_names
    return {name for name in code if name in vars(scheduler)} - {"running", "waiting", "requests"}


def _is_ours(value: Any) -> bool:
    return type(value).__module__.startswith("meridian_patch.")


def _walk(value: Any, path: str, names: set[str], seen: set[int]) -> Iterator[str]:
    if isinstance(value, Request):
        yield f"{path} holds {value.request_id}"
    elif isinstance(value, str):
        if value in names or value.startswith("meridian-probe"):
            yield f"{path} holds {value}"
    elif not isinstance(value, _PLAIN) and id(value) not in seen:
        seen.add(id(value))
        for name, each in _members(value):
            yield from _walk(each, f"{path}.{name}" if name else path, names, seen)


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object of ours or a container holds; names of attributes, or an empty one."""
    if isinstance(value, dict):
        yield from (("", each) for pair in value.items() for each in pair)
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        yield from (("", each) for each in value)
    elif _is_ours(value):
        yield from getattr(value, "__dict__", {}).items()
        for kind in type(value).__mro__:
            slots = kind.__dict__.get("__slots__", ())
            for slot in (slots,) if isinstance(slots, str) else slots:
                yield slot, getattr(value, slot, None)
