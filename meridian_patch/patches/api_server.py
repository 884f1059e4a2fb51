"""What is bound in the API server process: patches of its classes, and rebound instances."""

from typing import Final

from meridian_patch.patches.lock import SUPPORTED
from meridian_patch.patching.spec import Contract, Patch, Rebinding, Site

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
    SCHEDULER_STATS,
    INPUT_PROCESSOR,
    REQUEST_STATE,
    OUTPUT_PROCESSOR,
    *SERVING,
    *ENGINE_CLIENTS,
)

REBINDINGS: Final = (
    Rebinding(
        owner="vllm.v1.engine.output_processor:RequestState",
        attributes=("detokenizer",),
        places=(
            "meridian_patch.engine.api.request_state:_with_stop_scope.ScopedRequestState.from_new_request",
        ),
        process="api_server",
        lasts="as long as the request",
        why=(
            "Stop strings of this request match in its answers only. The detokenizer has one of "
            "two classes, and vLLM chooses it for each request."
        ),
    ),
)
