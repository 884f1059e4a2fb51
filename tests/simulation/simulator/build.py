"""Builds the scheduler of a case: vLLM's own, or ours in its place."""

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from short_thoughts import as_variables, short_thoughts
from vllm.config import KVEventsConfig, KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched import scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker import worker_base

import meridian_patch.demo
from meridian_patch.config.policy import PolicyConfig
from meridian_patch.engine import wire
from meridian_patch.engine.early_exit import binding as exit_binding
from meridian_patch.engine.kv_cache.manager import build_phase_kv_cache_manager
from meridian_patch.engine.scheduler import assembly
from meridian_patch.engine.scheduler import scheduler as ours
from meridian_patch.engine.upstream import is_release
from meridian_patch.patching.candidate import MARK
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.replay.offload import OffloadTier, transfer_config
from meridian_patch.replay.types import ReplayArm
from simulator.axes import Case
from simulator.grammar import SimGrammarBackend, reasoner_for
from simulator.oracle import WRAP_UP, boundaries_of

MODEL = Path(meridian_patch.demo.__file__).parent / "tiny-reasoner"
# Seconds after which who was preempted stands first, by axis `haste`.
AGING_S = {"default": 30.0, "eager": 2.0}
WINDOW = 96
MAX_LORAS = 2
_OFFLOAD_GB_PER_S = 0.02


# The vocabulary is the same for all cases, and takes long to read.
_find_breaks = exit_binding.load_breaks
_BREAKS: list[Any] = []


def _load_breaks(model_config: Any) -> Any:
    if not _BREAKS:
        _BREAKS.append(_find_breaks(model_config))
    return _BREAKS[0]


class Built(NamedTuple):
    """A scheduler and what stands around it.

    Attributes:
        depth: batches that may be in flight.
        tier: workers' side of an offload tier; None: there is none.
    """

    scheduler: Any
    grammars: StructuredOutputManager
    depth: int
    tier: OffloadTier | None


@contextlib.contextmanager
def surroundings(case: Case) -> Iterator[None]:
    """The environment that a case's engine is built and run in."""
    for name in ("vllm", "vllm.meridian_patch"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    variables = {
        # Neither arm is to be patched by the plug-in: both are built here.
        "MERIDIAN_PATCH": "0",
        # The tiny reasoner's own length is 4,096, and it is not run.
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
        "MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS": "all",
        "VLLM_USE_V2_MODEL_RUNNER": "1" if case.runner == "v2" else "0",
        **{f"MERIDIAN_PATCH_SET_{key}": value for key, value in _settings(case).items()},
    }
    with patch.dict(os.environ, variables), _tapped():  # noqa: TID251 - the engine reads it
        yield


def pool_blocks(case: Case) -> int:
    """Blocks of the KV pool, the null block included; one request of full length always fits."""
    one = -(-(case.length + case.drafts) // case.block) + 1
    if case.cache == "window":
        # What batches in flight hold counts, too: as many as a pipeline has stages.
        one += -(-(WINDOW + case.budget * 4) // case.block) + 2
        one = min(one, 2 * (-(-case.length // case.block) + 2))
    if case.cache == "hybrid":
        one += 4 + case.drafts
    factor = {"starving": 1.0, "tight": 2.0, "ample": 6.0}[case.pool]
    if case.scale == "wide":
        factor = 64.0
    spare = case.drafts + (4 if case.connector != "none" else 0)
    return 1 + int(one * factor) + spare


def build(case: Case, *, is_stock: bool) -> Built:
    """The scheduler of a case, within its ``surroundings``."""
    config = _config(case)
    specs = _specs(case)
    blocks = pool_blocks(case)
    config.cache_config.num_gpu_blocks = blocks
    cache_config = KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec([f"layer{n}"], spec) for n, spec in enumerate(specs)],
    )
    init_none_hash(sha256)
    grammars = StructuredOutputManager(config)
    grammars._use_async_grammar_compilation = False
    grammars.backend = SimGrammarBackend(config, None, config.model_config.get_vocab_size())
    boundaries = boundaries_of(case.boundary, case.history)
    if case.grammar == "behind" and boundaries is not None:
        grammars.reasoner_cls = reasoner_for(boundaries)
    stock = AsyncScheduler if case.is_async else Scheduler
    chosen, manager = stock, KVCacheManager
    if not is_stock:
        build_class = (
            ours.build_async_phase_scheduler if case.is_async else ours.build_phase_scheduler
        )
        chosen, manager = build_class(stock), build_phase_kv_cache_manager(KVCacheManager)
    with (
        patch.object(scheduler_module, "KVCacheManager", manager),
        patch.object(assembly, "resolve_boundaries", lambda *_: boundaries),
        patch.object(assembly.status, "publish", lambda *_, **__: None),
        patch.object(exit_binding, "load_breaks", _load_breaks),
    ):
        scheduler = chosen(
            vllm_config=config,
            kv_cache_config=cache_config,
            structured_output_manager=grammars,
            block_size=case.block * case.dcp,
            hash_block_size=min(spec.block_size for spec in specs) * case.dcp,
            log_stats=True,
        )
    if case.images != "none":
        # What a multi-modal model's configuration would say.
        size = 24 if case.encoder == "scarce" else 4096
        scheduler.max_num_encoder_input_tokens = size
        scheduler.encoder_cache_manager = EncoderCacheManager(size)
    tier = None
    if case.connector == "offload":
        tier = OffloadTier(scheduler, _OFFLOAD_GB_PER_S, 1024)
    return Built(scheduler, grammars, config.max_concurrent_batches, tier)


def _config(case: Case) -> Any:
    settings: dict[str, Any] = {}
    if case.drafts:
        settings["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": case.drafts, "prompt_lookup_max": 3,
        }  # fmt: skip
    if case.lora != "none":
        settings |= {"enable_lora": True, "max_loras": MAX_LORAS, "max_lora_rank": 8}
    # Without Triton vLLM refuses runner V2, whose output shapes the scheduler makes all the same.
    with patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": "0"}):  # noqa: TID251
        config = _engine_config(case, settings)
    scheduling = config.scheduler_config
    # The CPU platform has opinions on these; the scheduler itself does not mind.
    scheduling.async_scheduling = case.is_async
    scheduling.enable_chunked_prefill = case.chunked
    scheduling.disable_chunked_mm_input = case.images == "whole"
    config.cache_config.block_size = case.block
    config.parallel_config.pipeline_parallel_size = case.stages
    config.cache_config.mamba_cache_mode = "align" if case.cache == "hybrid" else "none"
    config.kv_transfer_config = _transfer(case)
    scheduling.scheduler_reserve_full_isl = case.reserve
    if paces_itself(case):
        scheduling.prefill_schedule_interval = case.cadence
    config.parallel_config.decode_context_parallel_size = case.dcp
    config.aux_output_config.enable_return_routed_experts = case.experts
    if case.graphs:
        config.additional_config = {wire.GRAPH_TOKENS: case.graphs}
    if case.events:
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    if case.drafter != "ngram":
        # The scheduler asks for no more of a model that drafts, which would have to be loaded.
        config.speculative_config.method = case.drafter
        modules = SimpleNamespace(num_nextn_predict_layers=case.drafts)
        config.speculative_config.draft_model_config = SimpleNamespace(hf_config=modules)
    return config


def paces_itself(case: Case) -> bool:
    """Whether the scheduler, not the engine core, keeps prompts out of steps: vLLM 0.33 may."""
    return case.cadence > 1 and case.seed % 2 == 1 and is_release("0.33")


def _engine_config(case: Case, settings: dict[str, Any]) -> Any:
    return EngineArgs(
        model=str(MODEL),
        max_model_len=case.length,
        max_num_seqs=case.seats,
        max_num_batched_tokens=max(case.budget, case.length if not case.chunked else 0),
        block_size=32,
        dtype="float32",
        enforce_eager=True,
        long_prefill_token_threshold=case.long_prefill,
        scheduling_policy=case.queue,
        enable_prefix_caching=case.prefix,
        **settings,
    ).create_engine_config()


def _transfer(case: Case) -> KVTransferConfig | None:
    if case.connector == "none":
        return None
    if case.connector == "offload":
        arm = ReplayArm("offload", "stock", offload_gb_per_s=_OFFLOAD_GB_PER_S)
        return transfer_config(arm, _full(case))
    return KVTransferConfig(
        kv_connector="SimConnector",
        kv_connector_module_path="simulator.connector",
        kv_load_failure_policy="recompute" if case.seed % 2 else "fail",
        kv_role="kv_consumer" if case.connector == "load" else "kv_producer",
        kv_connector_extra_config={
            "loads": case.connector == "load",
            "delays": case.connector == "delayed",
        },
    )


def _full(case: Case) -> FullAttentionSpec:
    return FullAttentionSpec(
        block_size=case.block, num_kv_heads=2, head_size=32, dtype=torch.float32
    )


def _specs(case: Case) -> list[KVCacheSpec]:
    specs: list[KVCacheSpec] = [_full(case)]
    if case.cache == "window":
        specs.append(
            SlidingWindowSpec(
                block_size=case.block,
                num_kv_heads=2,
                head_size=32,
                dtype=torch.float32,
                sliding_window=WINDOW,
            )
        )
    if case.cache == "hybrid":
        specs.append(
            MambaSpec(
                block_size=case.block,
                shapes=((16, 32),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_speculative_blocks=case.drafts,
            )
        )
    return specs


def _settings(case: Case) -> dict[str, str]:
    settings = {
        "POLICY__NAME": case.profile,
        "POLICY__TIME_BUDGET_US": "1000000000",
        "POLICY__AGING_S": str(AGING_S[case.haste]),
        "KV__TIERS": str(case.tiers).lower(),
        "KV__HISTORY": "auto",
        "KV__RETAIN_S": "3.0" if case.haste == "eager" else "300.0",
        "KV__CHECK_INTERVAL_S": "0.001",
        "EXIT__MODE": case.exit,
        **as_variables(_exit_settings(case)),
    }
    if case.haste == "eager":
        settings |= {
            "POLICY__LEVEL_TOKENS": "40",
            "POLICY__DRAIN_S": "0.05",
            "POLICY__PROTECTED_ANSWER_TOKENS": "4",
        }
    if case.rule != "profile":
        # A rule on its own against its profile.
        is_on = getattr(choose_rules(PolicyConfig(name=case.profile)), case.rule)
        settings[f"POLICY__{case.rule.upper()}"] = str(not is_on).lower()
    return settings


def _exit_settings(case: Case) -> dict[str, Any]:
    common = {
        "min_think_tokens": 16,
        "grace_tokens": 4,
        "probe_min_gap_tokens": case.gap,
        "probe_max_gap_tokens": max(case.gap, 16 if case.gap < 64 else 128),
        **short_thoughts(case.strategy),
    }
    if case.wrap_up:
        common["wrap_up"] = WRAP_UP
    return common


@contextlib.contextmanager
def _tapped() -> Iterator[None]:
    """Workers that measure: the simulator stands in for them."""
    with patch.object(worker_base.WorkerBase, MARK, "worker", create=True):
        yield
