"""Reduces the configuration to stock decisions if several schedulers must decide alike.

With vLLM's external launcher (``torchrun``) each rank of a model runs its own scheduler, and the
ranks compute one model together: they must schedule the same tokens in every step. Step limits,
time-sharing and probes depend on the clock of each process, so the ranks would differ and wait for
each other forever. Data parallel ranks hold whole models and need not agree.
"""

from typing import Any

from vllm.logger import init_logger
from vllm.v1.executor.abstract import ExecutorWithExternalLauncher

from meridian_patch.config.policy import PolicyConfig
from meridian_patch.config.schema import Config, ExitConfig

logger = init_logger("vllm.meridian_patch")

_NOTICE = (
    "the external launcher runs a scheduler in every rank and they must decide alike, so the "
    "policy is noop, KV tiers and early exit are off"
)


def decide_alike(config: Config, vllm_config: Any) -> tuple[Config, str | None]:
    """The configuration to use, and why it differs from the given one; None: it does not."""
    if not _has_several_schedulers(vllm_config.parallel_config):
        return config, None
    logger.warning("meridian_patch: %s", _NOTICE)
    stock = {
        "policy": PolicyConfig(name="noop"),
        "kv": config.kv.model_copy(update={"tiers": False}),
        "exit": ExitConfig(mode="off"),
    }
    return config.model_copy(update=stock), _NOTICE


def _has_several_schedulers(parallel_config: Any) -> bool:
    # Load-bearing: the backend's name, or a class of the user's own.
    backend = parallel_config.distributed_executor_backend
    if isinstance(backend, type):
        return issubclass(backend, ExecutorWithExternalLauncher)
    return bool(backend == "external_launcher")
