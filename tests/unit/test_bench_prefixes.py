"""What a prefix cache that never evicts would have held."""

import pytest

from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.metrics import run_figures
from meridian_patch.bench.served.prefixes import reusable_tokens
from meridian_patch.bench.served.workload import ServedRequest

BLOCK = 4
SHARED = list(range(8))


def record(submit_s: float, prompt: list[int], end_s: float, output: tuple[int, ...] = (90,)):
    """A request whose tokens all come at its end, but for the first one half a second earlier."""
    request = ServedRequest("a", submit_s, (), "", 64)
    stamps = [end_s - 0.5, *[end_s] * (len(output) - 1)]
    return RequestRecord(request, submit_s, [*output], stamps, "", "stop", prompt_ids=prompt)


def test_a_prompt_reuses_whole_blocks_of_earlier_ones():
    """From its first token on, as far as the tokens are the same; the last one is computed."""
    first = record(0.0, [*SHARED, 20, 21], 1.0)
    assert reusable_tokens([first, record(2.0, [*SHARED, 30], 3.0)], BLOCK) == 8
    assert reusable_tokens([first, record(2.0, SHARED, 3.0)], BLOCK) == 4
    assert reusable_tokens([first, record(2.0, [9, *SHARED], 3.0)], BLOCK) == 0


def test_what_is_not_computed_yet_is_not_reused():
    """A prompt is there with the first token of its request, the output with the last one."""
    other = record(1.0, [*SHARED, 30, 31, 32, 33, 34], 3.0)
    assert reusable_tokens([record(0.0, [*SHARED, 20], 2.0), other], BLOCK) == 0
    assert reusable_tokens([record(0.0, [*SHARED, 20], 1.4), other], BLOCK) == 8
    said = record(0.0, SHARED, 0.9, (30, 31, 32, 33, 34))
    assert reusable_tokens([said, other], BLOCK) == 12
    # Its last token was sampled and never computed.
    cut = record(0.0, SHARED, 0.9, (30, 31, 32, 33))
    assert reusable_tokens([cut, other], BLOCK) == 8


def test_an_evicted_prompt_is_computed_again():
    """Of the tokens that had been computed, those that the server's cache did not have."""
    records = [record(0.0, [*SHARED, 20], 1.0), record(2.0, [*SHARED, 30], 3.0)]
    counters = {"prompt_tokens": 18.0, "hit_tokens": 4.0}
    assert run_figures(records, (), counters, BLOCK)["computed_again_tokens"] == 4
    full = counters | {"hit_tokens": 8.0}
    assert run_figures(records, (), full, BLOCK)["computed_again_tokens"] == 0


@pytest.mark.parametrize(("block_size", "prompt"), [(None, SHARED), (BLOCK, [])])
def test_without_blocks_or_prompts_it_is_not_known(block_size, prompt):
    """A server whose block size vLLM chose, or one that does not tell its prompts."""
    figures = run_figures([record(0.0, prompt, 1.0)], (), {"prompt_tokens": 8.0}, block_size)
    assert figures["computed_again_tokens"] is None
