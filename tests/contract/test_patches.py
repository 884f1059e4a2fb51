"""The real patches on the real vLLM: contracts are complete, apply takes effect, undo restores."""

import ast
import inspect
import json
import subprocess
import sys

import pytest

from meridian_patch.engine import probe_request, request_check, wire
from meridian_patch.engine.api import (
    chat,
    completion,
    input_check,
    request_state,
    responses,
    stat_logger,
    think_pieces,
    tracing,
)
from meridian_patch.engine.early_exit import binding as exit_binding
from meridian_patch.engine.early_exit import part as exit_part
from meridian_patch.engine.early_exit import probes
from meridian_patch.engine.early_exit import report as exit_report
from meridian_patch.engine.kv_cache import manager as kv_cache
from meridian_patch.engine.scheduler import (
    admission_checks,
    assembly,
    balance_part,
    displacing,
    indivisible_chunks,
    kv_units,
    metrics_part,
    parts,
    policy_part,
    preempted_sessions,
    queue_part,
    refusals,
    running_order,
    scheduler,
    step_cut,
    step_load,
)
from meridian_patch.engine.worker import worker
from meridian_patch.patches import PATCHES, REBINDINGS
from meridian_patch.patches.api_server import (
    INPUT_PROCESSOR,
    OUTPUT_PROCESSOR,
    REQUEST_STATE,
    SCHEDULER_STATS,
    SERVING,
)
from meridian_patch.patches.engine_core import (
    ASYNC_SCHEDULER,
    KV_CACHE_MANAGER,
    REQUEST_CHECK,
    SCHEDULER,
)
from meridian_patch.patches.worker import WORKER
from meridian_patch.patching.fingerprint import assigned_attributes
from meridian_patch.patching.lock import locked_methods
from meridian_patch.patching.source import SourceTree, installed_root
from meridian_patch.patching.spec import Patch, Rebinding

# Applies and undoes the patches in a process of its own and prints what it saw.
JOB = """
import copy, json
from vllm.config import SchedulerConfig
from meridian_patch.engine.upstream import installed_vllm
from meridian_patch.errors import PatchRefused
from meridian_patch.patches import PATCHES
from meridian_patch.patches.lock import load_lock
from meridian_patch.patching.registry import Registry
import vllm.v1.core.sched.async_scheduler as async_module
import vllm.v1.core.sched.scheduler as sync_module
import vllm.v1.core.kv_cache_manager as kv_module
import vllm.v1.metrics.loggers as loggers
import vllm.v1.request as requests
import vllm.v1.worker.worker_base as workers
from vllm.v1.engine import async_llm, core_client as clients, llm_engine, output_processor
from vllm.entrypoints.openai.chat_completion import serving as chat
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.openai.responses import serving as responses

def classes():
    configs = [SchedulerConfig.default_factory(async_scheduling=each) for each in (False, True)]
    schedulers = [config.get_scheduler_cls() for config in configs]
    assert async_llm.InputProcessor is llm_engine.InputProcessor
    assert async_llm.OutputProcessor is llm_engine.OutputProcessor
    return [*schedulers, sync_module.KVCacheManager, requests.StructuredOutputRequest,
            workers.WorkerBase, loggers.PrometheusStatLogger, llm_engine.InputProcessor,
            output_processor.RequestState, llm_engine.OutputProcessor,
            chat.OpenAIServingChat,
            completion.OpenAIServingCompletion, responses.OpenAIServingResponses,
            clients.AsyncMPClient, clients.DPAsyncMPClient, clients.DPLBAsyncMPClient]

def refusal():
    lock = load_lock()
    for entry in lock.values():
        entry["vllm.v1.core.sched.scheduler:Scheduler"]["parameters"]["schedule"] = "(self)"
    try:
        Registry().apply(PATCHES, installed_vllm(lock))
    except PatchRefused as error:
        return str(error)

stock = classes()
originals = [sync_module.Scheduler, async_module.AsyncScheduler]
refused = refusal()
after_refusal = classes()
registry = Registry()
upstream = installed_vllm(load_lock())
reports = registry.apply(PATCHES, upstream)
live = classes()
again = registry.apply(PATCHES, upstream)
still_live = classes()
registry.undo()
print("RESULT" + json.dumps({
    "refused": refused,
    "unchanged_by_refusal": after_refusal == stock,
    "reports": [report.as_dict() for report in reports],
    "outcomes_again": [report.outcome for report in again],
    "applied_once": still_live == live,
    "names": [cls.__name__ for cls in live],
    "bases": [cls.__mro__[2:4] == stock_cls.__mro__[:2] or cls.__mro__[1] is stock_cls
              for cls, stock_cls in zip(live, stock)],
    "async_extends_stock_async": issubclass(live[1], originals[1]),
    "async_is_built_on_stock_sync": not issubclass(live[1], live[0]),
    "marks": [vars(cls)["__meridian_patch__"] for cls in live],
    "restored": [now is before for now, before in zip(classes(), stock)],
    "restored_modules": [sync_module.Scheduler is originals[0],
                         async_module.AsyncScheduler is originals[1],
                         kv_module.KVCacheManager is stock[2]],
}))
"""


@pytest.fixture(scope="module")
def seen() -> dict:
    run = subprocess.run(
        [sys.executable, "-P", "-c", JOB], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.rpartition("RESULT")[2])


def test_vllm_builds_our_classes(seen: dict) -> None:
    """Where vLLM looks up schedulers, cache manager and stat logger, it finds ours."""
    assert seen["names"] == [
        "PhaseScheduler",
        "AsyncPhaseScheduler",
        "PhaseKVCacheManager",
        "CheckedStructuredOutputRequest",
        "TappedWorkerBase",
        "PhasePrometheusStatLogger",
        "CheckedInputProcessor",
        "SummaryRequestState",
        "TracedOutputProcessor",
        "SummaryServingChat",
        "SummaryServingCompletion",
        "SummaryServingResponses",
        *["MovingClient"] * 3,
    ]
    assert seen["marks"] == [patch.name for patch in PATCHES]
    assert all(seen["bases"])


def test_async_class_extends_stock_async_scheduler(seen: dict) -> None:
    """The asynchronous class is the stock asynchronous one with the mixin, nothing in between."""
    assert seen["async_extends_stock_async"]
    assert seen["async_is_built_on_stock_sync"]


def test_real_patches_pass_every_check(seen: dict) -> None:
    """On the installed release no check fails, hard or soft."""
    assert [report["outcome"] for report in seen["reports"]] == ["applied"] * len(PATCHES)
    failed = [check for report in seen["reports"] for check in report["checks"] if not check["ok"]]
    assert failed == []


def test_no_stale_binding_but_base_classes(seen: dict) -> None:
    """After applying, stock classes are held only where a vLLM class derives from them."""
    stale = [each for report in seen["reports"] for each in report["stale"]]
    assert {
        "module": "vllm.v1.core.sched.async_scheduler",
        "attribute": "Scheduler",
        "is_base": True,
    } in stale
    assert all(each["is_base"] for each in stale)


def test_applying_twice_is_a_no_op(seen: dict) -> None:
    """The second apply leaves the classes as they are and says so."""
    assert seen["outcomes_again"] == ["already_applied"] * len(PATCHES)
    assert seen["applied_once"]


def test_undo_restores_the_stock_classes(seen: dict) -> None:
    """After undo vLLM looks up the very classes it defined."""
    assert all(seen["restored"] + seen["restored_modules"])


def test_tampered_lock_is_refused_in_one_sentence(seen: dict) -> None:
    """A changed signature is refused with method, version and off switch; vLLM is untouched."""
    assert (
        "cannot be patched by 'scheduler': vllm.v1.core.sched.scheduler:Scheduler.schedule takes "
        "(self, throttle_prefills=False), expected (self); set MERIDIAN_PATCH=0 to switch off"
    ) in seen["refused"]
    assert seen["refused"].startswith("vLLM 0.")
    assert "\n" not in seen["refused"]
    assert seen["unchanged_by_refusal"]


def classes_in(module) -> list[ast.ClassDef]:
    tree = ast.parse(inspect.getsource(module))
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def methods_of(cls: ast.ClassDef) -> set[str]:
    return {node.name for node in cls.body if isinstance(node, ast.FunctionDef)}


def attributes_replaced(cls: ast.ClassDef) -> set[str]:
    """Properties with a setter: they stand for attributes that upstream reads and assigns."""
    return {
        decorator.value.id
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Attribute) and decorator.attr == "setter"
    }


def self_names(cls: ast.ClassDef, context: type[ast.expr_context]) -> set[str]:
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
        and isinstance(node.ctx, context)
    }


def names_on_the_scheduler(module) -> tuple[set[str], set[str]]:
    """What functions of a module call and read on the scheduler that they are given."""
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
    touched = [
        node
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "scheduler"
    ]
    calls = {node.attr for node in touched if id(node) in called}
    return calls, {node.attr for node in touched} - calls


def super_calls(cls: ast.ClassDef) -> set[str]:
    return {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Name)
        and node.value.func.id == "super"
    }


# Modules that the scheduler gives itself to.
HANDS = (
    admission_checks,
    assembly,
    balance_part,
    displacing,
    exit_binding,
    exit_part,
    exit_report,
    indivisible_chunks,
    kv_units,
    metrics_part,
    parts,
    policy_part,
    preempted_sessions,
    probe_request,
    probes,
    queue_part,
    refusals,
    running_order,
    step_cut,
    step_load,
)


@pytest.mark.parametrize(
    ("patch", "modules", "hands"),
    [
        (SCHEDULER, (scheduler,), HANDS),
        (ASYNC_SCHEDULER, (scheduler,), HANDS),
        (KV_CACHE_MANAGER, (kv_cache,), ()),
        (SCHEDULER_STATS, (stat_logger,), ()),
        (WORKER, (worker,), ()),
        (REQUEST_CHECK, (request_check,), ()),
        (INPUT_PROCESSOR, (input_check,), ()),
        (REQUEST_STATE, (request_state, think_pieces), ()),
        (OUTPUT_PROCESSOR, (tracing,), ()),
        (SERVING[0], (chat,), ()),
        (SERVING[1], (completion,), ()),
        (SERVING[2], (responses,), ()),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_contract_lists_all_that_our_class_touches(patch: Patch, modules, hands) -> None:
    """Calls are the methods passed on to super() or called on self, reads the rest of self.

    ``hands`` are modules that the class gives itself to.
    """
    touched_calls: set[str] = set()
    touched_reads: set[str] = set()
    classes = [cls for module in modules for cls in classes_in(module)]
    stored = {name for cls in classes for name in self_names(cls, ast.Store)}
    for cls in classes:
        own = methods_of(cls) | (stored - set(patch.contract.reads))
        called = {
            node.func.attr
            for node in ast.walk(cls)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "self"
        }
        touched_calls |= super_calls(cls) | (called - own)
        touched_reads |= self_names(cls, ast.Load) - own - called | attributes_replaced(cls)
    for hand in hands:
        calls, reads = names_on_the_scheduler(hand)
        touched_calls |= calls
        touched_reads |= reads
    if hands:
        touched_reads -= stored
    assert touched_calls == set(patch.contract.calls)
    # A method whose source is locked as a whole may be handed on as a value.
    touched_reads -= set(patch.contract.behaviour)
    assert touched_reads == set(patch.contract.reads)


def test_patches_are_told_apart() -> None:
    """Names and definitions are unique, and both schedulers rely on the same things."""
    assert len({patch.name for patch in PATCHES}) == len(PATCHES)
    assert len({patch.definition for patch in PATCHES}) == len(PATCHES)
    assert SCHEDULER.contract == ASYNC_SCHEDULER.contract
    assert all(len(list(locked_methods(patch))) for patch in PATCHES)


OF_VLLM = [each for each in REBINDINGS if each.owner.startswith("vllm.") and ":" in each.owner]


@pytest.mark.parametrize("rebinding", OF_VLLM, ids=lambda each: each.owner.rpartition(":")[2])
def test_what_is_rebound_is_there(rebinding: Rebinding) -> None:
    """vLLM's class has the method, or assigns the attribute, that is bound anew."""
    tree = SourceTree.from_directory(installed_root("vllm"))
    module, _, name = rebinding.owner.partition(":")
    cls = tree.find_class(module, name)
    assigned = assigned_attributes(tree, cls)
    # Every class has these; what we add ourselves is not vLLM's.
    added = {"__class__", "__annotations__", wire.COUNTS, wire.SWITCH}
    for attribute in set(rebinding.attributes) - added - assigned:
        assert tree.find_method(cls, attribute)
