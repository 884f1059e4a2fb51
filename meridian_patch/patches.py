"""The patches of this package and the vLLM releases they were checked against. Data only."""

import json
from importlib import resources
from typing import Final, cast

from meridian_patch.patching.lock import Entry
from meridian_patch.patching.spec import Contract, Patch, Site

LOCK_FILE: Final = "upstream_lock.json"
SUPPORTED: Final = ">=0.32,<0.34"

SCHEDULER_CONTRACT: Final = Contract(
    calls=(
        "__init__",
        "add_request",
        "schedule",
        "make_stats",
        "_update_request_as_session",
        "_update_request_with_output",
        "_preempt_request",
        "_free_request",
    ),
    behaviour=(
        "add_request",
        "schedule",
        "update_from_output",
        "finish_requests",
        "reset_prefix_cache",
        "_update_request_as_session",
        "_update_request_with_output",
        "_preempt_request",
        "_free_request",
    ),
    reads=("policy", "requests", "running", "vllm_config", "waiting"),
    lookups=("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",),
)

SCHEDULER: Final = Patch(
    name="scheduler",
    sites=(Site("vllm.v1.core.sched.scheduler", "Scheduler"),),
    build="meridian_patch.engine.scheduler:build_phase_scheduler",
    versions=SUPPORTED,
    contract=SCHEDULER_CONTRACT,
    process="engine_core",
    why=(
        "Stock scheduling does not know thinking from answering: answers stall behind prefill "
        "and thinking, and are preempted like anything else. The subclass orders the running "
        "requests by phase before each step. Used with `--no-async-scheduling`, and by default "
        "on the CPU build."
    ),
    upstream="none: vLLM has a hook for one scheduler class, but not one that covers both classes",
    remove_when="vLLM lets a plug-in order running requests and choose whom to preempt",
)

ASYNC_SCHEDULER: Final = Patch(
    name="async_scheduler",
    sites=(Site("vllm.v1.core.sched.async_scheduler", "AsyncScheduler"),),
    build="meridian_patch.engine.scheduler:build_async_phase_scheduler",
    versions=SUPPORTED,
    contract=SCHEDULER_CONTRACT,
    process="engine_core",
    why=(
        "The same for asynchronous scheduling, the default on GPUs. It must be a subclass of the "
        "stock `AsyncScheduler`: under asynchronous scheduling a subclass of `Scheduler` leaves "
        "every other step empty."
    ),
    upstream="none: see patch `scheduler`",
    remove_when="patch `scheduler` is removed",
)

SCHEDULER_STATS: Final = Patch(
    name="scheduler_stats",
    sites=(Site("vllm.v1.metrics.loggers", "PrometheusStatLogger"),),
    build="meridian_patch.engine.stat_logger:build_prometheus_stat_logger",
    versions=SUPPORTED,
    contract=Contract(
        calls=("__init__", "record"),
        behaviour=("record",),
        reads=("engine_indexes",),
        lookups=("vllm.v1.metrics.loggers:StatLoggerManager.__init__",),
    ),
    process="api_server",
    why=(
        "The schedulers count in the EngineCore process, `/metrics` is served by the API server. "
        "The subclass exports the counts that arrive with vLLM's own statistics."
    ),
    upstream=(
        "none: the entry point group `vllm.stat_logger_plugins` turns statistics on for everyone "
        "who has the package installed, active or not"
    ),
    remove_when="vLLM exports plug-in statistics to `/metrics`, or loads stat loggers on request",
)

PATCHES: Final = (SCHEDULER, ASYNC_SCHEDULER, SCHEDULER_STATS)


def load_lock() -> dict[str, Entry]:
    """What the contracts met in each checked vLLM release, by release."""
    text = resources.files("meridian_patch").joinpath(LOCK_FILE).read_text(encoding="utf-8")
    return cast("dict[str, Entry]", json.loads(text))


LOCKED_VERSIONS: Final = tuple(load_lock())
