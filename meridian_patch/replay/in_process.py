"""What measuring code needs of a ``vllm.LLM`` that runs in this process."""

from typing import Any

from vllm import LLM


def core_of(llm: LLM) -> Any:
    """The ``EngineCore`` of vLLM, with its scheduler and executor."""
    # Load-bearing: with VLLM_ENABLE_V1_MULTIPROCESSING=0 it is an attribute of its client.
    client: Any = llm.llm_engine.engine_core
    return client.engine_core


def caller_id(request_id: str) -> str:
    """The id that the caller gave to a request, from the engine's id."""
    # Load-bearing: vLLM appends a random suffix to the caller's id.
    return request_id.rsplit("-", 1)[0]
