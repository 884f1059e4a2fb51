"""Patches of EngineCore beside its scheduler, and the releases that all are for. Data only."""

from typing import Final

from meridian_patch.patching.spec import Contract, Patch, Site

SUPPORTED: Final = ">=0.32,<0.34"

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
