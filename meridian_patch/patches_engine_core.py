"""The patch of what EngineCore takes in, and the releases that all patches are for. Data only."""

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
