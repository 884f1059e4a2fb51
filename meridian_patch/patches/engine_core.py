"""What is bound in the EngineCore process: patches of its classes, and rebound instances."""

from typing import Final

from meridian_patch.patches.lock import SUPPORTED
from meridian_patch.patching.spec import Contract, Patch, Rebinding, Site

OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
SIMPLE_OFFLOAD: Final = "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler"

# Methods of the scheduler that the subclass calls and whose behaviour it relies on.
SCHEDULER_METHODS: Final = (
    "add_request",
    "schedule",
    "get_request_counts",
    "_update_request_as_session",
    "_handle_stopped_request",
    "_handle_blocked_waiting_request",
    "_enqueue_waiting_request",
    "_holds_kv_blocks",
    "_preempt_request",
    "_free_blocks",
    "_free_request",
    "update_from_output",
    "get_grammar_bitmask",
    "finish_requests",
    "reset_prefix_cache",
    "_try_schedule_encoder_inputs",
    "_is_blocked_waiting_status",
)

SCHEDULER_CONTRACT: Final = Contract(
    calls=(
        "__init__",
        "make_stats",
        "_connector_finished",
        *SCHEDULER_METHODS,
    ),
    behaviour=(
        *SCHEDULER_METHODS,
        "get_num_unfinished_requests",
        "_update_request_with_output",
        "_free_request_blocks",
        "_drain_deferred_frees",
        "_mamba_block_aligned_split",
        "_reserve_prefill_lookahead",
    ),
    reads=(
        "_pause_state",
        "adaptive_long_prefill_threshold",
        "aux_output_connector",
        "block_size",
        "cache_config",
        "connector",
        "current_step",
        "defer_block_free",
        "deferred_waiting",
        "finished_req_ids_dict",
        "kv_cache_config",
        "kv_cache_manager",
        "kv_holding_waiting",
        "log_stats",
        "lora_config",
        "max_model_len",
        "max_num_active_reqs",
        "max_num_scheduled_tokens",
        "need_mamba_block_aligned_split",
        "num_lookahead_tokens",
        "num_prefill_lookahead",
        "num_spec_tokens",
        "num_waiting_for_streaming_input",
        "parallel_config",
        "policy",
        "prev_step_scheduled_req_ids",
        "processed_step_seq",
        "requests",
        "requires_kv_delivery",
        "running",
        "sched_step_seq",
        "scheduler_config",
        "vllm_config",
        "waiting",
    ),
    lookups=("vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",),
    collaborators=(
        "vllm.config.parallel:ParallelConfig._pick_stateless_dp_port",
        "vllm.v1.engine.core:EngineCoreProc.run_engine_core",
        f"{OFFLOADING}:OffloadingConnectorScheduler._build_store_jobs",
        f"{OFFLOADING}:OffloadingConnectorScheduler._calc_num_offloadable_tokens",
        f"{SIMPLE_OFFLOAD}._prepare_eager_store_specs",
        f"{SIMPLE_OFFLOAD}._prepare_lazy_store_specs",
        f"{SIMPLE_OFFLOAD}._queue_finished_eager_store",
        f"{SIMPLE_OFFLOAD}._select_eager_blocks_to_store",
        "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager.lookup",
        "vllm.v1.request:Request.__init__",
        "vllm.v1.request:Request.update_block_hashes",
    ),
)

SCHEDULER: Final = Patch(
    name="scheduler",
    sites=(
        Site("vllm.v1.core.sched.scheduler", "Scheduler"),
        # For a cast alone; vLLM 0.32 has none.
        Site("vllm.v1.fault_tolerance.engine_core_sentinel", "Scheduler", is_optional=True),
    ),
    build="meridian_patch.engine.scheduler.scheduler:build_phase_scheduler",
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
    build="meridian_patch.engine.scheduler.scheduler:build_async_phase_scheduler",
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

CORE: Final = "vllm.v1.engine.core"

REQUEST_CHECK: Final = Patch(
    name="request_check",
    sites=(
        Site("vllm.v1.structured_output.request", "StructuredOutputRequest"),
        # Where a request looks it up.
        Site("vllm.v1.request", "StructuredOutputRequest"),
    ),
    build="meridian_patch.engine.request_check:build_request_check",
    versions=SUPPORTED,
    contract=Contract(
        calls=("from_sampling_params",),
        behaviour=("from_sampling_params",),
        reads=(),
        lookups=("vllm.v1.request:Request.__init__",),
        collaborators=(
            f"{CORE}:EngineCore.preprocess_add_request",
            f"{CORE}:EngineCoreProc.process_input_sockets",
        ),
    ),
    process="engine_core",
    why=(
        "vLLM's front end in Rust hands `vllm_xargs` on and knows none of our fields. The subclass "
        "refuses a wrong one while EngineCore builds the request, where vLLM 0.33 answers the "
        "client. It is no subclass of EngineCore: a spawned process has chosen that class before "
        "vLLM loads plug-ins."
    ),
    upstream="none: EngineCore has no hook for a request's sampling parameters",
    remove_when="vLLM lets a plug-in check a request's `vllm_xargs` in EngineCore",
)

FREE_QUEUE: Final = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"
FREE_QUEUE_METHODS: Final = (
    "__init__",
    "popleft",
    "popleft_n",
    "remove",
    "prepend_n",
    "append_n",
    "get_all_free_blocks",
    "iter_blocks_after",
)

KV_CACHE_MANAGER: Final = Patch(
    name="kv_cache_manager",
    sites=(
        Site("vllm.v1.core.kv_cache_manager", "KVCacheManager"),
        # Where the scheduler looks it up: the definition alone would do nothing.
        Site("vllm.v1.core.sched.scheduler", "KVCacheManager"),
    ),
    build="meridian_patch.engine.kv_cache.manager:build_phase_kv_cache_manager",
    versions=SUPPORTED,
    contract=Contract(
        calls=(
            "__init__",
            "allocate_slots",
            "new_step_starts",
            "pop_blocks_for_free",
            "record_prefix_cache_stats",
            "reset_prefix_cache",
        ),
        behaviour=(
            "free",
            "pop_blocks_for_free",
            "record_prefix_cache_stats",
            "reset_prefix_cache",
        ),
        reads=("coordinator", "enable_caching"),
        lookups=("vllm.v1.core.sched.scheduler:Scheduler.__init__",),
        collaborators=(
            *(f"{FREE_QUEUE}.{name}" for name in FREE_QUEUE_METHODS),
            "vllm.v1.core.block_pool:BlockPool.evict_blocks",
            "vllm.v1.core.block_pool:BlockPool.free_blocks",
            "vllm.v1.core.block_pool:BlockPool.get_new_blocks",
            "vllm.v1.core.block_pool:BlockPool.touch",
            "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.free",
        ),
    ),
    process="engine_core",
    why=(
        "Stock evicts the least recently used block, so that finished thoughts, which no later "
        "prompt holds, push out the prompts that the next turn asks for. The subclass evicts them "
        "first."
    ),
    upstream="none: the order of free blocks has no hook; vLLM issues 39806 and 41938 ask for it",
    remove_when="vLLM lets a plug-in say how long a request's blocks are worth keeping",
)

PATCHES: Final = (SCHEDULER, ASYNC_SCHEDULER, KV_CACHE_MANAGER, REQUEST_CHECK)

REBINDINGS: Final = (
    Rebinding(
        owner="vllm.v1.core.block_pool:BlockPool",
        attributes=("free_block_queue",),
        places=("meridian_patch.engine.kv_cache.manager:PhaseKVCaching.__init__",),
        process="engine_core",
        lasts="as long as the engine",
        why="The queue of free blocks gets tiers. vLLM's pool builds its queue itself.",
    ),
    Rebinding(
        owner="vllm.v1.core.kv_cache_manager:KVCacheManager",
        attributes=("allocate_slots",),
        places=("meridian_patch.engine.kv_cache.manager:PhaseKVCaching.__init__",),
        process="engine_core",
        lasts="as long as the engine",
        why=(
            "Allocation frees blocks outside an attention window. With full attention alone it "
            "frees none, and a method of the subclass would cost time for every request of a step."
        ),
    ),
    Rebinding(
        owner="vllm.v1.core.kv_cache_manager:KVCacheManager",
        attributes=("allocate_slots",),
        places=(
            "meridian_patch.engine.scheduler.refusals:Refusals.listen",
            "meridian_patch.engine.scheduler.refusals:Refusals.stop",
        ),
        process="engine_core",
        lasts="while waiting requests are admitted to a step",
        why="Records the request for which vLLM finds no KV blocks; running ones keep its own.",
    ),
    Rebinding(
        owner="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        attributes=("get_num_blocks_to_allocate",),
        places=("meridian_patch.engine.scheduler.refusals:Refusals._ask",),
        process="engine_core",
        lasts="during one call of `allocate_slots`",
        why="Records how many blocks vLLM counted for a request that it refuses.",
    ),
    Rebinding(
        owner="vllm.v1.engine.core:EngineCore",
        attributes=("meridian_switch",),
        places=("meridian_patch.engine.scheduler.live_switch:install",),
        process="engine_core",
        lasts="as long as the process",
        why=(
            "Switches policy and early exit while the engine runs. EngineCore looks the methods "
            "that its clients call up by name."
        ),
    ),
    Rebinding(
        owner="vllm.v1.metrics.stats:SchedulerStats",
        attributes=("__annotations__", "meridian_patch"),
        places=("meridian_patch.engine.stats_field:install",),
        process="any",
        lasts="as long as the process",
        why="Adds a field that carries counts. vLLM's statistics have none for a plug-in's.",
    ),
)
