"""Builds vLLM's real scheduler and KV manager for a replay: no model, no worker."""

import copy
import functools
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.structured_output import StructuredOutputManager

from meridian_patch import envs
from meridian_patch.engine.kv_cache.manager import build_phase_kv_cache_manager
from meridian_patch.engine.scheduler.scheduler import (
    build_async_phase_scheduler,
    build_phase_scheduler,
)
from meridian_patch.errors import BenchError
from meridian_patch.replay.lean import lean_manager, lean_scheduler
from meridian_patch.replay.offload import transfer_config
from meridian_patch.replay.signals import measuring_workers
from meridian_patch.replay.types import EngineLimits, ReplayArm, TemplateTokens

_DEFAULT_LIMITS = EngineLimits()
BLOCK_SIZE = _DEFAULT_LIMITS.block_size
MAX_MODEL_LEN = _DEFAULT_LIMITS.max_model_len
MAX_NUM_SEQS = _DEFAULT_LIMITS.max_num_seqs
MAX_BATCHED_TOKENS = _DEFAULT_LIMITS.max_num_batched_tokens
TOOL_CALL = "<tool_call>"
_MARKERS = {
    "think_start": "<think>",
    "think_end": "</think>",
    "turn_end": "<|end|>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
}
# The tiny reasoner calls no tools; this family file makes the scheduler see tool calls.
_FAMILY = f"""\
version: 1
family: tiny_reasoner
replaces: true
match:
  names: ["*tiny-reasoner*"]
start: {json.dumps(_MARKERS["think_start"])}
end: {json.dumps(_MARKERS["think_end"])}
documented_ids: {{provenance: unverified, source: the replay}}
prompt_start: think
history: unverified
tool_call: {json.dumps([TOOL_CALL])}
"""
_STATUS_DIR = "MERIDIAN_PATCH_STATUS_DIR"
_FAMILIES_DIR = "MERIDIAN_PATCH_SET_FAMILIES_DIR"
# An arm may switch early exit on; its signals are then made up.
_NO_EXIT = {"MERIDIAN_PATCH_SET_EXIT__MODE": "off"}


def replay_model() -> Path:
    """The model directory whose tokenizer gives the marker ids; no weights are read."""
    return Path(str(files("meridian_patch.demo").joinpath("tiny-reasoner")))


@functools.cache
def read_template_tokens() -> TemplateTokens:
    """Marker ids of the replayed model, from its tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(replay_model(), local_files_only=True)
    ids = {name: tokenizer.convert_tokens_to_ids(text) for name, text in _MARKERS.items()}
    tool_call = tuple(tokenizer.encode(TOOL_CALL, add_special_tokens=False))
    return TemplateTokens(**ids, tool_call=tool_call, content_ids=min(ids.values()))


def build_scheduler(arm: ReplayArm, blocks: int, *, is_async: bool, limits: EngineLimits) -> Any:
    """The scheduler of an arm.

    Args:
        arm: stock or patched, and the patch's settings.
        blocks: KV blocks that requests can use.
        is_async: vLLM's asynchronous scheduling, its default.
        limits: sizes of the engine.

    Raises:
        ConfigError: a setting of the arm is unknown or wrong.
        BenchError: vLLM is patched in this process already.
    """
    config = copy.copy(_vllm_config(is_async, limits))
    # Load-bearing: one block is the null block, which holds no tokens.
    config.cache_config.num_gpu_blocks = blocks + 1
    spec = FullAttentionSpec(
        block_size=limits.block_size, num_kv_heads=2, head_size=32, dtype=torch.float32
    )
    config.kv_transfer_config = transfer_config(arm, spec)
    scheduler_class, manager_class = _classes(arm, is_async=is_async)
    # Load-bearing: Scheduler.__init__ looks its KV manager up in its own module.
    with (
        disabled_logging(logging.INFO),
        _environment(arm.settings),
        measuring_workers(),
        _rebound(scheduler_module, "KVCacheManager", manager_class),
    ):
        return scheduler_class(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=blocks + 1,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=limits.block_size,
            log_stats=True,
        )


def _classes(arm: ReplayArm, *, is_async: bool) -> tuple[type, type]:
    stock = AsyncScheduler if is_async else Scheduler
    if any(base.__module__.startswith("meridian_patch") for base in stock.__mro__):
        raise BenchError(
            "vLLM is already patched in this process, so there is no stock arm to compare with; "
            "run the replay in a process in which no engine was started"
        )
    scheduler, manager = lean_scheduler(stock), lean_manager(KVCacheManager)
    if arm.build_scheduler is not None:
        return arm.build_scheduler(scheduler), manager
    if not arm.is_patched:
        return scheduler, manager
    build = build_async_phase_scheduler if is_async else build_phase_scheduler
    return build(scheduler), build_phase_kv_cache_manager(manager)


@functools.cache
def _vllm_config(is_async: bool, limits: EngineLimits) -> Any:
    init_none_hash(sha256)
    arguments = {
        "model": str(replay_model()),
        "hf_overrides": {"max_position_embeddings": limits.max_model_len},
        **asdict(limits),
        "dtype": "float32",
        "enforce_eager": True,
    }
    # Load-bearing: EngineArgs loads vLLM's plugins, ours too. This process stays unpatched.
    # vLLM's warnings are about this machine's CPU, which computes nothing here.
    with disabled_logging(logging.WARNING), _environment({"MERIDIAN_PATCH": "0"}):
        config = EngineArgs(**arguments).create_engine_config()
    # The CPU platform turns async scheduling off; the scheduler itself supports it.
    config.scheduler_config.async_scheduling = is_async
    return config


@contextmanager
def disabled_logging(level: int) -> Iterator[None]:
    """Log nothing up to ``level`` within this context."""
    before = logging.root.manager.disable
    logging.disable(level)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Only the arm's settings and the replay's family file; status files are thrown away."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "tiny_reasoner.yaml").write_text(_FAMILY)
        values = {**_NO_EXIT, **settings, _STATUS_DIR: folder, _FAMILIES_DIR: folder}
        with _rebound(envs, "environment", lambda: values):
            yield


@contextmanager
def _rebound(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
