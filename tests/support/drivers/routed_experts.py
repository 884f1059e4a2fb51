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


class ExpertsWorker:
    """vLLM's worker side of routed experts behind a scheduler.

    Attributes:
        sent: number of rows that each request was sent.
    """

    def __init__(self, scheduler):
        with (
            patch.object(worker, "RoutedExpertsCapturer", Capturer),
            patch.object(worker, "bind_routed_experts_capturer"),
            patch.object(worker, "get_tp_group", Mock(is_first_rank=True)),
        ):
            self._connector = worker.AuxOutputWorkerConnector(
                vllm_config=scheduler.vllm_config,
                model=None,
                kv_cache_config=scheduler.kv_cache_config,
            )
        self.sent = Counter()

    def begin(self, output):
        """A step begins."""
        self._connector.begin_step(output.aux_output_connector_metadata)

    def sampled(self, output, starts, result):
        """A step has its tokens.

        Args:
            starts: computed tokens of each request when it began.

        Returns:
            To be passed to ``deliver`` when the step is back; None: it computed nothing.
        """
        names = list(output.num_scheduled_tokens)
        if not names:
            return None
        tokens = [output.num_scheduled_tokens[name] for name in names]
        pending = self._connector.prepare_output(
            SimpleNamespace(
                req_ids=names,
                query_start_loc_np=np.concatenate(([0], np.cumsum(tokens))),
                num_computed_tokens_np=np.array([starts[name] for name in names]),
            )
        )
        drafts = output.scheduled_spec_decode_tokens
        said = np.array([len(row) for row in result.sampled_token_ids])
        given = np.array([len(drafts.get(name, ())) for name in names])
        pending.enqueue_cpu_copy(said, np.where(said > 0, given + 1 - said, 0))
        return pending

    def deliver(self, pending, result):
        """The scheduler gets a step's result."""
        result.aux_output_connector_output = pending.process_output()
        for name, part in result.aux_output_connector_output.items():
            self.sent[name] += len(part.rows)

    def close(self):
        self._connector.close()


def run_worker(driver):
    """Run vLLM's worker side behind a new driver.

    Returns:
        The worker side, to be closed.
    """
    scheduler, run = driver.scheduler, driver._run
    experts = ExpertsWorker(scheduler)

    def run_and_send(output):
        result = run(output)
        experts.begin(output)
        known = {
            name: scheduler.requests[name].num_computed_tokens - tokens
            for name, tokens in output.num_scheduled_tokens.items()
        }
        pending = experts.sampled(output, known, result)
        if pending is not None:
            experts.deliver(pending, result)
        return result

    driver._run = run_and_send
    return experts
