"""What the router relies on to tell a slow engine from one that hangs."""

import inspect
import random
import re

import pytest
from scheduler_driver import Driver, Job, engine_config, make_prompt
from tier_driver import SYNC_AND_ASYNC
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.v1.metrics.loggers import PrometheusStatLogger

from meridian_patch.router.hung import _ONE_TOKEN
from meridian_patch.router.load import progress_from

SAMPLES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "prefix_cache_queries_total",
    "num_preemptions_total",
    "iteration_tokens_total_count",
)


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_are_written_with_outputs_of_engine_core_only(name):
    assert progress_from(f'vllm:{name}{{engine="0"}} 1.0')
    source = inspect.getsource(PrometheusStatLogger.__init__)
    metric = name.removesuffix("_count") if name.endswith("_count") else name
    written = {metric, metric.removesuffix("_total")}
    assert written & set(re.findall(r'name="vllm:(\w+)"', source))


@SYNC_AND_ASYNC
def test_each_piece_of_a_long_prompt_moves_the_use_of_the_kv_cache(demo_model, is_async):
    """Nothing else does: pieces sample no token, and no request comes or goes."""
    config = engine_config(demo_model, is_async=is_async, blocks=200)
    driver = Driver.build(None, config, is_async=is_async)
    used, make_stats = [], driver.scheduler.make_stats

    def watched(*args, **kwargs):
        stats = make_stats(*args, **kwargs)
        used.append(stats.kv_cache_usage)
        return stats

    driver.scheduler.make_stats = watched
    driver.add(Job("r", tuple(make_prompt(random.Random(1), 1500, thinks=False)), None, 5))
    pieces = 0
    while not driver.deliveries["r"]:
        driver.step()
        pieces += 1
    assert pieces > 4
    assert len(set(used[:5])) == 5


def test_a_question_of_one_token_needs_no_name():
    asked = CompletionRequest(**_ONE_TOKEN)
    assert (asked.model, asked.max_tokens, asked.prompt) == (None, 1, [0])
