"""Routed experts without a model: vLLM's own store and worker side of them, behind the driver."""

from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock, patch

import exit_driver
import numpy as np
import tier_driver
import torch
from scheduler_driver import engine_config
from vllm.distributed.aux_output_connector import worker
from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector

# vLLM 0.33 bounds a hit by what its store has; 0.32 does not.
BOUNDS_HITS = hasattr(AuxOutputSchedulerConnector, "max_cache_hit")


class Capturer:
    """In place of what notes the experts in the model's layers."""

    shape_per_token = (2, 2)
    output_dtype_name = "uint8"

    def __init__(self, **_):
        pass

    def snapshot_routing_data(self, num_rows):
        return torch.zeros((num_rows, *self.shape_per_token), dtype=torch.uint8)


def config_with_routed_experts(*args, **kwargs):
    """As ``engine_config``, with ``--enable-return-routed-experts``.

    vLLM refuses that without model runner V2 and a model with experts; the scheduler needs neither.
    """
    config = engine_config.__wrapped__(*args, **kwargs)
    config.aux_output_config.enable_return_routed_experts = True
    return config


def return_routed_experts(monkeypatch):
    """Let the engines of all drivers return routed experts."""
    for module in (tier_driver, exit_driver):
        monkeypatch.setattr(module, "engine_config", config_with_routed_experts)


def run_worker(driver):
    """Run vLLM's worker side behind a new driver.

    Returns:
        The worker side, to be closed, and the number of rows that each request was sent.
    """
    scheduler, run = driver.scheduler, driver._run
    with (
        patch.object(worker, "RoutedExpertsCapturer", Capturer),
        patch.object(worker, "bind_routed_experts_capturer"),
        patch.object(worker, "get_tp_group", Mock(is_first_rank=True)),
    ):
        connector = worker.AuxOutputWorkerConnector(
            vllm_config=scheduler.vllm_config,
            model=None,
            kv_cache_config=scheduler.kv_cache_config,
        )
    sent = Counter()

    def run_and_send(output):
        result = run(output)
        connector.begin_step(output.aux_output_connector_metadata)
        names = list(output.num_scheduled_tokens)
        if names:
            tokens = np.array([output.num_scheduled_tokens[name] for name in names])
            known = np.array([scheduler.requests[name].num_computed_tokens for name in names])
            pending = connector.prepare_output(
                SimpleNamespace(
                    req_ids=names,
                    query_start_loc_np=np.concatenate(([0], np.cumsum(tokens))),
                    num_computed_tokens_np=known - tokens,
                )
            )
            num_sampled = np.array([len(row) for row in result.sampled_token_ids])
            pending.enqueue_cpu_copy(num_sampled, np.zeros_like(num_sampled))
            result.aux_output_connector_output = pending.process_output()
            for name, part in result.aux_output_connector_output.items():
                sent[name] += len(part.rows)
        return result

    driver._run = run_and_send
    return connector, sent
