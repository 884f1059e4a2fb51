"""Whether the process that gets the scheduler's outputs takes our data out of them."""

from typing import Any

from vllm import envs

from meridian_patch.patching.candidate import MARK


def takes_out(cls: Any) -> bool:
    """Whether our data may travel in ``kv_transfer_params``: ``cls`` would take it out of there.

    Otherwise callers would find it there: of a class that is not patched, and of vLLM's front end
    in Rust, which has no such class.
    """
    # Load-bearing: vLLM reads these two names to start the Rust front end, from the environment,
    # which EngineCore shares with it.
    is_rust = envs.VLLM_USE_RUST_FRONTEND and envs.VLLM_RUST_FRONTEND_PATH
    return hasattr(cls, MARK) and not is_rust
