"""Which probes are due: those that need nothing but what is in their parent's blocks."""

from types import SimpleNamespace

import pytest

from meridian_patch.engine.early_exit.probes import ProbeLimits, Probes
from meridian_patch.exit.actions import Probe

BLOCK_SIZE = 32


def is_due(prefix_tokens, ec_connector=None, **parent):
    scheduler = SimpleNamespace(
        block_size=BLOCK_SIZE,
        ec_connector=ec_connector,
        vllm_config=SimpleNamespace(
            model_config=SimpleNamespace(max_model_len=1000),
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)]),
        kv_cache_manager=SimpleNamespace(coordinator=SimpleNamespace(eagle_group_ids=())),
    )
    probes = Probes(scheduler, (257,), ProbeLimits(16, 1, 32_768))
    told = {"request_id": "r", "prompt_embeds": None, "num_prompt_tokens": 40, "mm_features": []}
    watched = SimpleNamespace(request=SimpleNamespace(**told | parent))
    probes.ask(watched, Probe(1, 5), prefix_tokens)
    return len(probes) == 1


def image(begin, end, data=None):
    place = SimpleNamespace(offset=begin, length=end - begin)
    return SimpleNamespace(data=data, mm_position=place)


def test_a_prompt_of_tokens_is_always_behind():
    assert is_due(41)


@pytest.mark.parametrize(("prefix_tokens", "expected"), [(41, False), (63, False), (64, True)])
def test_embeddings_must_be_in_full_blocks(prefix_tokens, expected):
    """A probe has token ids alone: of embeddings in its own block it would see other tokens."""
    assert is_due(prefix_tokens, prompt_embeds=object()) == expected


@pytest.mark.parametrize(("prefix_tokens", "expected"), [(41, False), (63, False), (64, True)])
def test_images_must_be_in_full_blocks(prefix_tokens, expected):
    assert is_due(prefix_tokens, mm_features=[image(0, 20), image(24, 40)]) == expected
    assert is_due(prefix_tokens, mm_features=[image(0, 20)])


def test_images_in_shared_memory_are_not_read_again():
    assert not is_due(200, mm_features=[image(0, 20, data={"address": 0})])
    assert is_due(200, mm_features=[image(0, 20, data={"pixels": 0})])


def test_images_that_an_encoder_connector_fetched_are_not_seen_again():
    """It would be asked for a request that its peer never heard of."""
    assert not is_due(200, ec_connector=object(), mm_features=[image(0, 20)])
    assert is_due(200, ec_connector=object())
