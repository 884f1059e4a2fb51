"""What the KV tiers keep on a real engine whose pool is filled by thoughts."""

import pytest

pytestmark = pytest.mark.engine

PATHS = (pytest.param("sync", marks=pytest.mark.nightly), "async")
BLOCK_SIZE = 32


def turns(result: dict, path: str) -> dict:
    return result["stages"][path]["runs"]["turns"]


def kept_tokens(run: dict) -> int:
    """Tokens of the first turn's prompt that stand in full blocks before its thought."""
    # `<think>` and a line end close the prompt; what stands before comes back.
    return (run["outputs"]["first"]["prompt_tokens"] - 2) // BLOCK_SIZE * BLOCK_SIZE


def hit_tokens(run: dict) -> int:
    return run["outputs"]["next"]["cached_tokens"]


@pytest.mark.parametrize("path", PATHS)
def test_the_next_turn_hits_what_thoughts_push_out_in_stock(v1_stock, v1_patched, path):
    """The first turn's prompt survives the thinkers only with tiers."""
    stock, patched = turns(v1_stock, path), turns(v1_patched, path)
    assert kept_tokens(patched) > 0
    assert hit_tokens(patched) == kept_tokens(patched)
    assert hit_tokens(stock) < kept_tokens(stock)


@pytest.mark.parametrize("path", PATHS)
def test_noop_hits_what_stock_hits(v1_stock, v1_noop, path):
    """Without the policy there are no tiers: the same blocks are evicted."""
    assert hit_tokens(turns(v1_noop, path)) == hit_tokens(turns(v1_stock, path))


@pytest.mark.parametrize("path", PATHS)
def test_it_was_the_tiers_that_kept_it(v1_patched, v1_noop, path):
    """Thoughts of finished requests were evicted and nothing else; noop evicts by age alone."""
    patched, noop = (turns(result, path)["counted"] for result in (v1_patched, v1_noop))
    assert patched["kv_eviction:think_complete"] > 0
    assert not patched.get("kv_eviction:output_critical")
    assert patched["kv_hit_tokens:output_critical"] >= kept_tokens(turns(v1_patched, path))
    assert not noop.get("kv_eviction:think_complete")
    assert noop["kv_eviction:output_critical"] > 0


def test_the_next_turn_hits_on_model_runner_v2(v2_stock, v2_patched):
    """The same on the model runner that GPUs use."""
    stock, patched = turns(v2_stock, "async"), turns(v2_patched, "async")
    assert hit_tokens(patched) == kept_tokens(patched) > 0
    assert hit_tokens(stock) < kept_tokens(stock)


def test_free_blocks_are_in_order_after_every_run(v1_patched, v2_patched):
    """Aborts, pauses, resets, n > 1 and preemptions leave the queue of free blocks sound."""
    for result in (v1_patched, v2_patched):
        for stage in result["stages"].values():
            for name, run in stage["runs"].items():
                assert run["kv_faults"] == [], name
