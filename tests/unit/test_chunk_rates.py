"""Which sizes of a step's prefill take little time per token."""

import random

from meridian_patch.policy.chunk_rates import ChunkRates


def seen(*chunks: tuple[int, float, bool]) -> ChunkRates:
    rates = ChunkRates()
    for tokens, seconds, is_launched in chunks * 3:
        rates.add(tokens, seconds, is_launched=is_launched)
    return rates


def test_the_smallest_chunk_with_a_good_rate() -> None:
    """What an H200 took: 11 ms more for any chunk in the graph, 19 ms for 1,000 tokens above it."""
    rates = seen((200, 0.011, False), (400, 0.0185, True), (1000, 0.019, True), (2000, 0.036, True))
    assert rates.worthwhile(226, 0) == 1000
    assert rates.worthwhile(226, 5000) == 1000


def test_without_a_fixed_time_no_size_is_better() -> None:
    rates = seen(*((size, 2e-5 * size, False) for size in (64, 128, 256, 1024)))
    assert rates.worthwhile(None, 0) == 0


def test_what_hides_behind_decoding_may_be_small() -> None:
    assert seen((64, 0.0, False), (200, 0.0, False), (2000, 0.03, True)).worthwhile(226, 0) == 0


def test_one_size_alone_tells_nothing() -> None:
    assert ChunkRates().worthwhile(None, 0) == 0
    assert seen((8192, 0.2, True)).worthwhile(226, 0) == 0


def test_sizes_that_were_not_seen_are_tried_where_a_fit_expects_them() -> None:
    """Else a step that was cut small would stay so: larger chunks would never be seen."""
    small = seen((70, 0.011, False), (200, 0.011, False))
    assert small.worthwhile(226, 1500) == 1024
    assert small.worthwhile(226, 150) == 200
    # Smaller ones, too.
    assert seen((100, 3e-3, False), (200, 5e-3, False)).worthwhile(None, 80) == 80


def test_a_chunk_in_the_graph_must_fit_into_it() -> None:
    rates = seen((70, 0.011, False), (200, 0.003, False), (500, 0.0075, True))
    assert rates.worthwhile(226, 0) == 200
    assert rates.worthwhile(100, 0) == 500


def test_sizes_in_between_are_tried() -> None:
    """After small chunks and whole prompts alone, the smallest good one is not known yet."""
    rates = seen((70, 2.4e-3, False), (8192, 0.165, True))
    tried = []
    while len(tried) < 24:
        tried.append(rates.worthwhile(226, 64))
        rates.add(tried[-1], 1e-3 + 2e-5 * tried[-1], is_launched=tried[-1] > 226)
    assert tried[0] == 4096
    assert tried[-1] <= 256


def test_no_size_between_two_neighbours_is_asked_for() -> None:
    """Chunks in whole blocks of 400 tokens: 600 of them are 400, and stay unseen."""
    rates = seen((400, 0.016, True), (1200, 0.032, True))
    assert rates.worthwhile(0, 0) == 1200


def test_a_size_that_is_not_seen_any_more_is_forgotten() -> None:
    """It was measured while an engine compiled, or under another load."""
    rates = seen((200, 5.0, False), (1000, 0.02, True))
    for _ in range(1200):
        rates.add(1000, 0.02, is_launched=True)
    assert rates.worthwhile(226, 200) == 200


def test_a_class_at_the_edge_of_the_graph_is_used_as_far_as_it_fits() -> None:
    rates = seen((70, 0.011, False), (200, 0.003, False), (1500, 0.025, True))
    assert rates.worthwhile(190, 0) == 190


def test_steps_that_stalled_do_not_count() -> None:
    """Each size is told by the median of its newest chunks."""
    rates, rng = ChunkRates(), random.Random(1)
    for number in range(60):
        stall_s = 5.0 if number % 4 == 0 else 0.0
        tokens = rng.choice((100, 1000))
        rates.add(tokens, 0.01 + 1e-5 * tokens + stall_s, is_launched=tokens > 226)
    assert rates.worthwhile(226, 0) >= 500
    for _ in range(9):
        rates.add(100, 1e-3, is_launched=False)
    assert rates.worthwhile(226, 0) == 0


def sizes_tried(seconds, decode_s: float, most: int = 3276) -> list[int]:
    """Sizes that are tried after chunks of 64 tokens, where a chunk adds ``seconds(tokens)``."""
    rates = seen((64, seconds(64), False))
    tried = []
    while (tokens := rates.untried(decode_s, most)) and len(tried) < 10:
        tried.append(tokens)
        for _ in range(3):
            rates.add(tokens, seconds(tokens), is_launched=tokens > 226)
    return tried


def test_larger_chunks_are_tried_where_small_ones_take_long() -> None:
    """What an H200 took: any chunk in the graph adds 11 ms, one above it 19 ms, to 6 ms."""
    sizes = sizes_tried(lambda tokens: 0.011 if tokens <= 226 else 0.019, 0.006)
    assert sizes == [128, 256, 512, 1024]


def test_no_chunk_is_tried_that_a_step_has_no_room_for() -> None:
    sizes = sizes_tried(lambda tokens: 0.02 + 1e-4 * tokens, 0.006, most=819)
    assert sizes == [128, 256, 512]
    sizes = sizes_tried(lambda tokens: 0.011 if tokens <= 226 else 0.019, 0.006, most=1000)
    assert sizes == [128, 256, 512, 1000]


def test_larger_chunks_are_not_tried_where_each_token_takes_as_long() -> None:
    """As on a CPU: 64 tokens take twice as long as decoding, 128 four times."""
    assert sizes_tried(lambda tokens: 1e-3 * tokens, 0.03) == [128]


def test_larger_chunks_are_not_tried_where_small_ones_hide() -> None:
    assert sizes_tried(lambda tokens: 0.001, 0.006) == []
    assert ChunkRates().untried(0.006, 3276) == 0
