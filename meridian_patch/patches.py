"""The patches of this package and the vLLM releases they were checked against. Data only."""

import json
from importlib import resources
from typing import Final, cast

from meridian_patch.patches_engine_core import KV_CACHE_MANAGER, REQUEST_CHECK, SUPPORTED
from meridian_patch.patching.lock import Entry
from meridian_patch.patching.spec import Contract, Patch, Site

LOCK_FILE: Final = "upstream_lock.json"

OFFLOADING: Final = "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler"
SIMPLE_OFFLOAD: Final = "vllm.v1.simple_kv_offload.manager:SimpleCPUOffloadScheduler"

SCHEDULER_CONTRACT: Final = Contract(
    calls=(
        "__init__",
        "add_request",
        "schedule",
        "make_stats",
        "get_request_counts",
        "_update_request_as_session",
        "_handle_stopped_request",
        "_handle_blocked_waiting_request",
        "_enqueue_waiting_request",
        "_holds_kv_blocks",
        "_preempt_request",
        "_free_blocks",
        "_connector_finished",
        "_free_request",
        "update_from_output",
        "get_grammar_bitmask",
        "finish_requests",
        "reset_prefix_cache",
        "_try_schedule_encoder_inputs",
        "_is_blocked_waiting_status",
    ),
    behaviour=(
        "add_request",
        "schedule",
        "update_from_output",
        "get_grammar_bitmask",
        "finish_requests",
        "get_request_counts",
        "get_num_unfinished_requests",
        "reset_prefix_cache",
        "_update_request_as_session",
        "_handle_stopped_request",
        "_handle_blocked_waiting_request",
        "_enqueue_waiting_request",
        "_holds_kv_blocks",
        "_update_request_with_output",
        "_preempt_request",
        "_free_blocks",
        "_free_request",
        "_free_request_blocks",
        "_drain_deferred_frees",
        "_try_schedule_encoder_inputs",
        "_is_blocked_waiting_status",
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

SCHEDULER_STATS: Final = Patch(
    name="scheduler_stats",
    sites=(Site("vllm.v1.metrics.loggers", "PrometheusStatLogger"),),
    build="meridian_patch.engine.api.stat_logger:build_prometheus_stat_logger",
    versions=SUPPORTED,
    contract=Contract(
        calls=("__init__", "record"),
        behaviour=("record",),
        reads=("engine_indexes",),
        lookups=("vllm.v1.metrics.loggers:StatLoggerManager.__init__",),
        collaborators=(),
    ),
    process="api_server",
    why=(
        "The schedulers count in the EngineCore process, `/metrics` is served by the API server. "
        "The subclass exports the counts that arrive with vLLM's own statistics."
    ),
    upstream=(
        "none: the entry point group `vllm.stat_logger_plugins` turns statistics on wherever the "
        "package is installed, active or not"
    ),
    remove_when="vLLM exports plug-in statistics to `/metrics`, or loads stat loggers on request",
)

RUNNER_V1: Final = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
RUNNER_V2: Final = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

NIXL_WORKER: Final = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_worker"

WORKER: Final = Patch(
    name="worker",
    sites=(
        Site("vllm.v1.worker.worker_base", "WorkerBase"),
        # For annotations alone, but a name that still holds the original is reported as stale.
        Site("vllm.v1.executor.abstract", "WorkerBase"),
        Site("vllm.v1.engine.llm_engine", "WorkerBase"),
    ),
    build="meridian_patch.engine.worker.worker:build_tapped_worker",
    versions=SUPPORTED,
    contract=Contract(
        calls=(),
        behaviour=("__init__",),
        reads=("model_config", "model_runner", "parallel_config", "rank", "vllm_config"),
        # It loads the plug-ins, then imports the worker's class, which derives from the site's.
        lookups=("vllm.v1.worker.worker_base:WorkerWrapperBase.init_worker",),
        collaborators=(
            f"{NIXL_WORKER}:NixlBaseConnectorWorker.__init__",
            "vllm.v1.worker.gpu_worker:Worker.init_device",
            "vllm.v1.executor.multiproc_executor:MultiprocExecutor._get_output_rank",
            f"{RUNNER_V1}._sample",
            f"{RUNNER_V1}.sample_tokens",
            "vllm.v1.worker.gpu_model_runner:AsyncGPUModelRunnerOutput.get_output",
            "vllm.v1.sample.rejection_sampler:RejectionSampler.forward",
            f"{RUNNER_V2}.sample",
            f"{RUNNER_V2}.sample_tokens",
            "vllm.v1.worker.gpu.async_utils:AsyncOutput.get_output",
            "vllm.v1.worker.gpu.sample.sampler:Sampler.__call__",
            "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
        ),
    ),
    process="worker",
    why=(
        "Early exit needs the entropy of what the model says next. The subclass puts a tap on the "
        "model runner, which measures the rows that the scheduler asks for, from the logits that "
        "are sampled from, and sends the numbers with the step's output. Before the KV connector "
        "is built, it lets NIXL's thread wait for events (`handoff.nixl_wait_ms`)."
    ),
    upstream="none: a logits processor returns nothing, and log-probabilities hold no entropy",
    remove_when="vLLM lets a plug-in send values of its own from the sampler to the scheduler",
)

INPUT_PROCESSOR: Final = Patch(
    name="input_processor",
    sites=(
        Site("vllm.v1.engine.input_processor", "InputProcessor"),
        # Where the engines of servers and of `vllm.LLM` look it up.
        Site("vllm.v1.engine.async_llm", "InputProcessor"),
        Site("vllm.v1.engine.llm_engine", "InputProcessor"),
        # Only for its annotations.
        Site("vllm.engine.protocol", "InputProcessor"),
    ),
    build="meridian_patch.engine.api.input_check:build_input_processor",
    versions=SUPPORTED,
    contract=Contract(
        calls=("__init__", "process_inputs"),
        behaviour=("__init__",),
        reads=("renderer", "vllm_config"),
        lookups=(
            "vllm.v1.engine.async_llm:AsyncLLM.__init__",
            "vllm.v1.engine.llm_engine:LLMEngine.__init__",
        ),
        collaborators=(
            "vllm.v1.engine.async_llm:AsyncLLM.add_request",
            "vllm.v1.engine.llm_engine:LLMEngine.add_request",
        ),
    ),
    process="api_server",
    why=(
        "Stock hands a request's `vllm_xargs` on without knowing what they mean. The subclass "
        "refuses a wrong `meridian_*` field before the request reaches the engine, and turns the "
        "patterns that end a thought into tokens."
    ),
    upstream="none: vLLM lets a logits processor check `vllm_xargs`, and would run it in each step",
    remove_when="vLLM lets a plug-in check a request's `vllm_xargs`",
)

DETOKENIZER: Final = "vllm.v1.engine.detokenizer:BaseIncrementalDetokenizer"

REQUEST_STATE: Final = Patch(
    name="request_state",
    sites=(Site("vllm.v1.engine.output_processor", "RequestState"),),
    build="meridian_patch.engine.api.request_state:build_request_state",
    versions=SUPPORTED,
    contract=Contract(
        calls=(
            "__init__",
            "from_new_request",
            "apply_streaming_update",
            "make_request_output",
            "_new_completion_output",
        ),
        behaviour=(
            "from_new_request",
            "apply_streaming_update",
            "make_request_output",
            "_new_completion_output",
        ),
        reads=("detokenizer", "queue", "sent_tokens_offset", "stream_interval", "streaming_input"),
        lookups=("vllm.v1.engine.output_processor:OutputProcessor.add_request",),
        collaborators=(
            "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
            "vllm.outputs:RequestOutput.add",
            f"{DETOKENIZER}.__init__",
            f"{DETOKENIZER}.update",
            f"{DETOKENIZER}.get_next_output_text",
            "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.__init__",
            "vllm.v1.engine.detokenizer:FastIncrementalDetokenizer.decode_next",
            "vllm.v1.engine.detokenizer:check_stop_strings",
        ),
    ),
    process="api_server",
    why=(
        "How a request's thinking ended is known in the EngineCore process, whose outputs have no "
        "field for it. It is sent in `kv_transfer_params`; the subclass removes it from there, so "
        "that callers do not see it, and puts it on every `CompletionOutput` as `meridian`. Stop "
        "strings match in thoughts too; where a request or the configuration wants them in answers "
        "only, the subclass wraps the request's detokenizer."
    ),
    upstream="none: engine outputs have no field for a scheduler's own data",
    remove_when="vLLM carries a scheduler's data per request to `CompletionOutput`",
)

OUTPUT_PROCESSOR: Final = Patch(
    name="output_processor",
    sites=(
        Site("vllm.v1.engine.output_processor", "OutputProcessor"),
        # Where the engines of servers and of `vllm.LLM` look it up.
        Site("vllm.v1.engine.async_llm", "OutputProcessor"),
        Site("vllm.v1.engine.llm_engine", "OutputProcessor"),
    ),
    build="meridian_patch.engine.api.tracing:build_output_processor",
    versions=SUPPORTED,
    contract=Contract(
        calls=("do_tracing", "process_outputs", "_update_stats_from_finished"),
        behaviour=("do_tracing", "process_outputs", "_update_stats_from_finished"),
        reads=("request_states", "tracing_enabled"),
        lookups=(
            "vllm.v1.engine.async_llm:AsyncLLM.__init__",
            "vllm.v1.engine.llm_engine:LLMEngine.__init__",
        ),
        collaborators=(),
    ),
    process="api_server",
    why=(
        "Stock's times and counts of outputs do not know thinking from answering. The subclass "
        "takes the changes of phases out of the engine's outputs, and times each phase. It also "
        "adds how a request thought to the span that stock exports for it, and child spans of its "
        "thoughts and answers."
    ),
    upstream="none: vLLM's statistics have no phases, and spans no attribute for a plug-in's data",
    remove_when="vLLM lets a plug-in see the outputs of requests, and add to their spans",
)


def _serving(
    name: str, endpoint: str, cls: str, create: str, calls: tuple[str, ...], relied: tuple[str, ...]
) -> Patch:
    """A patch of the class that serves one of the OpenAI endpoints, by its method ``create``."""
    return Patch(
        name=name,
        sites=(
            Site(f"vllm.entrypoints.openai.{endpoint}.serving", cls),
            # Only for its annotations.
            Site(f"vllm.entrypoints.openai.{endpoint}.api_router", cls),
        ),
        build=f"meridian_patch.engine.api.{name.partition('_')[0]}:build_{name}",
        versions=SUPPORTED,
        contract=Contract(
            calls=("_check_model", create, *calls),
            behaviour=(f"_{create}", *relied, *calls),
            reads=("engine_client",),
            lookups=("vllm.entrypoints.generate.api_router:init_generate_state",),
            collaborators=(),
        ),
        process="api_server",
        why=(
            "What the input processor refuses comes too late for a streamed response: its status "
            "is sent. The subclass finds `meridian_*` fields in the body, also at its top level, "
            "refuses a wrong one first, and adds how thinking ended to the response."
        ),
        upstream="none: responses have no field for a plug-in's data",
        remove_when="vLLM checks sampling parameters before a stream begins, and lets a plug-in "
        "add a field to a response",
    )


SERVING: Final = (
    _serving(
        "chat_serving",
        "chat_completion",
        "OpenAIServingChat",
        create="create_chat_completion",
        calls=("chat_completion_stream_generator", "chat_completion_full_generator"),
        relied=("render_chat_request",),
    ),
    _serving(
        "completion_serving",
        "completion",
        "OpenAIServingCompletion",
        create="create_completion",
        calls=("completion_stream_generator", "request_output_to_completion_response"),
        relied=("render_completion_request",),
    ),
    _serving(
        "responses_serving",
        "responses",
        "OpenAIServingResponses",
        create="create_responses",
        calls=("responses_full_generator",),
        relied=("responses_stream_generator",),
    ),
)

CORE_CLIENT: Final = "vllm.v1.engine.core_client"
GRAMMAR_REQUEST: Final = "vllm.v1.structured_output.request:StructuredOutputRequest"


def _client(name: str, cls: str) -> Patch:
    """A patch of a client of EngineCore: one engine, one rank of several, or all ranks."""
    return Patch(
        name=name,
        sites=(Site(CORE_CLIENT, cls),),
        build="meridian_patch.engine.handoff.engine_client:build_engine_client",
        versions=SUPPORTED,
        contract=Contract(
            calls=("__init__", "add_request_async", "abort_requests_async", "shutdown"),
            behaviour=("add_request_async", "abort_requests_async", "_ensure_output_queue_task"),
            reads=("client_index", "engine_ranks_managed", "outputs_queue", "vllm_config"),
            lookups=(f"{CORE_CLIENT}:EngineCoreClient.make_async_mp_client",),
            collaborators=(
                f"{CORE_CLIENT}:DPLBAsyncMPClient.get_core_engine_for_request",
                "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
                "vllm.v1.structured_output:StructuredOutputManager.grammar_init",
                f"{GRAMMAR_REQUEST}._check_grammar_completion",
            ),
        ),
        process="api_server",
        why=(
            "A request whose thought has ended goes on at an answer engine. The subclass takes the "
            "ticket out of EngineCore's outputs, sends the rest of the request to the answer "
            "engine's token endpoint, and puts what comes back among EngineCore's outputs, so that "
            "every endpoint, parser and gateway sees one request of one server."
        ),
        upstream="none: vLLM leaves the second leg of a transfer to a proxy before its servers",
        remove_when="vLLM's server goes on with a request at another engine by itself",
    )


ENGINE_CLIENTS: Final = (
    _client("engine_client", "AsyncMPClient"),
    _client("engine_client_of_rank", "DPAsyncMPClient"),
    _client("engine_client_of_ranks", "DPLBAsyncMPClient"),
)

PATCHES: Final = (
    SCHEDULER,
    ASYNC_SCHEDULER,
    KV_CACHE_MANAGER,
    SCHEDULER_STATS,
    WORKER,
    REQUEST_CHECK,
    INPUT_PROCESSOR,
    REQUEST_STATE,
    OUTPUT_PROCESSOR,
    *SERVING,
    *ENGINE_CLIENTS,
)


def load_lock() -> dict[str, Entry]:
    """What the contracts met in each checked vLLM release, by release."""
    text = resources.files("meridian_patch").joinpath(LOCK_FILE).read_text(encoding="utf-8")
    return cast("dict[str, Entry]", json.loads(text))


LOCKED_VERSIONS: Final = tuple(load_lock())
