"""A request has one record, and the scheduler's parts are flat."""

from pathlib import Path

import pytest
from house_rules import held_parts, keyed_containers, part_classes

import meridian_patch

ENGINE = Path(str(meridian_patch.__file__)).resolve().parent / "engine"

# Containers of engine/, outside of request_state.py, that are keyed by a request or its id. Each
# has a reason why the record does not do.
KEYED_BY_REQUEST = {
    # Of one step, or of one output.
    "scheduler.running_order.ArrivalOrder._arrivals": "made for a step, and restored behind it",
    "scheduler.phase_part.PhasePart._expected": "the requests of the step being updated",
    "scheduler.phase_part.PhasePart._changes": "the requests of the step being updated",
    "scheduler.phase_part.PhasePart.last_changes": "the requests of the step updated last",
    "early_exit.part.EarlyExit._ended_probes": "the probes that ended in the step being updated",
    "early_exit.report.ExitReports.outcomes": "reports that leave with the step being updated",
    "early_exit.signals.StepSignals.spans": "rows of a step's signals, which name requests",
    "handoff.think_part.ThinkPart._moved": "the requests of the step being updated",
    "handoff.think_part.ThinkPart._surplus": "the requests of the step being updated",
    # Of what has no record.
    "scheduler.running_order.RunningOrder._key_of": "probes are in the order, too",
    "scheduler.running_order.RunningOrder._changed": "some of those in the order",
    "scheduler.running_order.RunningOrder._prefilling": "some of those in the order, and probes",
    "early_exit.probes.Probes.live": "probes have no record",
    "early_exit.probes.Probes.due": "due probes in their order; they end with the thought",
    # Of requests whose record is gone.
    "kv_cache.tiers.KVTiers._finished": "a connector may keep blocks of requests that have ended",
    "scheduler.phase_part.LostPhases._lost": "clients have yet to get it; the part is off",
    "early_exit.report.NoEarlyExit.reports": "clients have yet to get it, also of ended requests",
    "early_exit.report.NoEarlyExit._ended": "requests that ended in the step being updated",
    "handoff.think_part.HeldBackTokens._tokens": "clients get it behind the end of the request",
    # Of threads and processes of their own.
    "scheduler.metrics_part.Exporter._states": "used in a thread of its own, behind the scheduler",
    # Of early exit: what it follows begins and ends with a turn, not with the request.
    "early_exit.part.EarlyExit.requests": "what is followed; new with each turn of a session",
    "early_exit.part.EarlyExit.measured": "in the order in which the worker measures",
    "early_exit.close.ForcedCloses._masked": "in the order of rows of masks",
}
# Containers whose keys are something else.
KEYED_OTHERWISE = {
    "scheduler.guard.StepGuard._failed_steps",
    "scheduler.guard.StepGuard._logged",
    "scheduler.parts.Parts._hooks",
    "scheduler.refusals.Refusals._asked",
}
# Those of the API server, of workers and of connections to other engines are no scheduler's.
CORE_ROOMS = ("scheduler", "early_exit", "kv_cache", "handoff.think_part", "handoff.answer_part")


def core_modules() -> dict[str, Path]:
    """Modules of the scheduler's process, by their names below ``engine``."""
    paths = {path.relative_to(ENGINE).with_suffix(""): path for path in ENGINE.rglob("*.py")}
    names = {".".join(relative.parts): path for relative, path in paths.items()}
    return {name: path for name, path in names.items() if name.startswith(CORE_ROOMS)}


def test_requests_have_one_record() -> None:
    """What is kept by request is in request_state.py, but for what is listed with a reason."""
    found = {
        f"{module}.{name}"
        for module, path in core_modules().items()
        for name in keyed_containers(path.read_text())
    } - KEYED_OTHERWISE
    wrong = found - KEYED_BY_REQUEST.keys()
    assert not wrong, f"put it into the record, or list it with a reason: {sorted(wrong)}"
    assert found >= KEYED_BY_REQUEST.keys(), sorted(KEYED_BY_REQUEST.keys() - found)


@pytest.mark.parametrize(
    "annotation",
    ["dict[str, int]", "dict[Request, float]", "dict['Request', None]", "set[str]", "StateSet",
     "dict[Any, int]", "OrderedDict[RequestState, None]", "defaultdict[str, int]"],
)  # fmt: skip
def test_a_planted_container_is_found(annotation: str) -> None:
    """Keyed by the request, its id or its record; in a method or as a field."""
    method = f"class Part:\n    def __init__(self):\n        self._of: {annotation} = {{}}"
    assert keyed_containers(method) == {"Part._of"}
    assert keyed_containers(f"class Part:\n    _of: {annotation}") == {"Part._of"}


def test_a_planted_container_without_a_type_is_found() -> None:
    """Its keys may be requests; those of one with a type are known."""
    for value in ("{r: 1 for r in running}", "dict.fromkeys(running)", "set(running)", "{}"):
        text = f"class Part:\n    def __init__(self, running):\n        self._of = {value}"
        assert keyed_containers(text) == {"Part._of"}, value
    assert not keyed_containers("class Part:\n    _of: dict[int, str]")


def test_parts_are_flat() -> None:
    """No part of the scheduler holds another one: they share plans of steps and records."""
    texts = {module: path.read_text() for module, path in core_modules().items()}
    parts = part_classes([*texts.values()])
    assert len(parts) > 15, "hardly any part was found: this check looks in the wrong place"
    held = {module: held_parts(text, parts) for module, text in texts.items()}
    wrong = {module: names for module, names in held.items() if names}
    assert wrong.keys() <= {"scheduler.parts"}, wrong


PART = "class Inner(SchedulerPart): ...\nclass Outer(SchedulerPart):\n    def __init__(self"


@pytest.mark.parametrize(
    "rest",
    [
        "):\n        self._inner = Inner()",
        ", inner: Inner):\n        self._inner = inner",
        ", inner: 'Inner | None'):\n        self._inner = inner",
        ", inner):\n        self._inner: Inner = inner",
    ],
)
def test_a_planted_part_of_a_part_is_found(rest: str) -> None:
    """Made by it, or given to it."""
    text = PART + rest
    assert held_parts(text, part_classes([text])) == {"Outer: self._inner"}
    assert not held_parts(PART + ", tracker: PhaseTracker):\n        self._t = tracker", {"Outer"})
