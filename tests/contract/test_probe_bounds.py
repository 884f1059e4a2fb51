"""What a probe may not exceed, on the real scheduler: the model's length, a step's tokens."""

from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import exit_driver as exits_of
import pytest
import scheduler_driver
from exit_driver import exit_driver, is_empty, thinker
from scheduler_driver import BLOCK_SIZE, Job, engine_config, sliding_window
from tier_driver import let_eagle_draft, pool_of
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_utils import get_request_block_hasher

from meridian_patch.engine.probe_request import sampled_as
from meridian_patch.engine.upstream import is_release

# Probed at every turn, and closed by none.
PROBED = {
    "EXIT__MODE": "observe",
    "EXIT__EAT_WARMUP_PROBES": "1000",
    "EXIT__PROBE_MIN_GAP_TOKENS": "1",
    "EXIT__PROBE_MAX_GAP_TOKENS": "1",
    "EXIT__PROBE_EVERY_STEPS": "1",
}


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def driver_for(request, monkeypatch, demo_model):
    def build(**kwargs):
        return exit_driver(monkeypatch, demo_model, is_async=request.param, **{**PROBED, **kwargs})

    return build


class Seen(NamedTuple):
    """A probe in a step: its prompt, the tokens computed of it, and whose it is."""

    step: int
    length: int
    computed: int
    parent: str


def watch(driver):
    """Every probe of every step from now on."""
    scheduler, seen = driver.scheduler, []
    schedule = scheduler.schedule

    def watched(*args, **kwargs):
        output = schedule(*args, **kwargs)
        for name, due in scheduler.early_exit.probes.live.items():
            computed = output.num_scheduled_tokens.get(name, 0)
            length = scheduler.requests[name].num_prompt_tokens
            if computed:
                seen.append(Seen(driver.steps, length, computed, due.parent.request_id))
        return output

    scheduler.schedule = watched
    return seen


@pytest.mark.parametrize("prompt_tokens", [40, 41, 47])
def test_a_probe_fits_into_the_model_with_the_token_it_samples(driver_for, prompt_tokens):
    """A runaway thought is probed up to the limit, and behind it no probe is made."""
    driver = driver_for(engine_args={"max_model_len": 256})
    suffix = driver.scheduler.early_exit.probes.suffix_tokens
    for number in range(3):
        driver.add(thinker(f"r{number}", 1000, prompt_tokens=prompt_tokens))
    seen = watch(driver)
    driver.drain()
    longest = max(each.length for each in seen)
    assert longest in (254, 255)
    assert suffix
    assert is_empty(driver)


def test_probes_that_do_not_fit_into_a_step_keep_no_request_out(driver_for):
    """Without chunked prefill a probe is all or nothing: at the queue's head it would block."""
    driver = driver_for(
        engine_args={
            "max_model_len": 256,
            "max_num_batched_tokens": 256,
            "enable_chunked_prefill": False,
        }
    )
    scheduler = driver.scheduler
    for number in range(4):
        driver.add(thinker(f"r{number}", 300, prompt_tokens=31 + 8 * number))
    for _ in range(10):
        driver.step()
    # As if other requests took the rest of the step.
    scheduler.max_num_scheduled_tokens = len(scheduler.running) + 12
    for _ in range(3):
        driver.step()
    driver.add(Job("newcomer", (65,) * 8, None, 3))
    steps = 0
    while not driver.deliveries["newcomer"]:
        driver.step()
        steps += 1
        assert steps < 6, "the newcomer starves"
    driver.drain()
    assert is_empty(driver)


def test_a_padded_probe_keeps_no_request_out(monkeypatch, demo_model):
    """vLLM pads one token to a decode with drafts, and admits no request if they do not fit."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    build = engine_config.__wrapped__
    monkeypatch.setattr(
        exits_of, "engine_config", lambda *a, **k: build(*a, **k, speculative_config=drafts)
    )
    gap = {
        "EXIT__PROBE_MIN_GAP_TOKENS": str(2 * BLOCK_SIZE),
        "EXIT__PROBE_MAX_GAP_TOKENS": str(2 * BLOCK_SIZE),
    }
    driver = exit_driver(monkeypatch, demo_model, **{**PROBED, **gap})
    scheduler = driver.scheduler
    probes = scheduler.early_exit.probes
    assert probes.suffix_tokens == 1
    driver.add(thinker("thinks", 300, prompt_tokens=BLOCK_SIZE))
    while not probes.are_next:
        driver.step()
    # As if other requests took the rest of the step.
    scheduler.max_num_scheduled_tokens = len(scheduler.running) + 2
    for _ in range(2):
        driver.step()
    driver.add(Job("newcomer", (65,) * 8, None, 3))
    for _ in range(10):
        driver.step()
    assert driver.deliveries["newcomer"]
    scheduler.max_num_scheduled_tokens = 256
    driver.drain()
    assert probes.num_probes > 2
    assert is_empty(driver)


def test_a_probe_leaves_room_for_the_drafts_behind_it(monkeypatch, demo_model):
    """vLLM asks for their blocks too: a probe without them would only be taken back."""
    driver = exit_driver(monkeypatch, demo_model, **PROBED)
    scheduler = driver.scheduler
    scheduler.num_lookahead_tokens = 3
    pool, probes = scheduler.kv_cache_manager.block_pool, scheduler.early_exit.probes
    driver.add(thinker("thinks", 400))
    seen, refused, take_back = watch(driver), [], probes._take_back
    probes._take_back = lambda request: refused.append(request) or take_back(request)
    while not seen:
        driver.step()
    manager, parent = scheduler.kv_cache_manager, scheduler.requests["thinks"]
    taken = []
    for _ in range(3 * BLOCK_SIZE):
        held = len(manager.get_blocks("thinks").blocks[0]) * BLOCK_SIZE
        # Where the thought itself needs a block, there are enough.
        least = 1 if parent.num_computed_tokens + 1 + 3 <= held else 6
        pool.free_blocks(taken)
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - manager.watermark_blocks - least)
        driver.step()
    assert len(seen) > 2 * BLOCK_SIZE
    assert not refused
    pool.free_blocks(taken)
    driver.drain()
    assert is_empty(driver)


def test_a_probe_that_is_passed_over_is_not_made_again_at_once(monkeypatch, demo_model):
    """A request of higher priority waits for blocks: making a probe takes time in each step."""
    settings = {**PROBED, "EXIT__PROBE_EVERY_STEPS": "8"}
    arguments = {"scheduling_policy": "priority"}
    driver = exit_driver(monkeypatch, demo_model, blocks=60, engine_args=arguments, **settings)
    scheduler = driver.scheduler
    pool, probes = scheduler.kv_cache_manager.block_pool, scheduler.early_exit.probes
    driver.add(thinker("thinks", 1200, priority=1))
    while not probes.num_probes:
        driver.step()
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 20)
    driver.add(thinker("waits", 20, prompt_tokens=1000))
    made, make = [], probes._make
    probes._make = lambda *args: made.append(args) or make(*args)
    for _ in range(80):
        driver.step()
    assert 8 <= len(made) <= 11
    pool.free_blocks(taken)
    driver.drain()
    assert is_empty(driver)


def test_a_probe_may_come_in_chunks(driver_for):
    """Where upstream cuts all prefill, what it measures is that of its last step."""
    driver = driver_for(engine_args={"long_prefill_token_threshold": 4})
    for number in range(3):
        driver.add(thinker(f"r{number}", 200))
    seen = watch(driver)
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert max(each.computed for each in seen) <= 4
    assert totals["probe:measured"] > 50
    assert "probe:lost" not in totals
    assert is_empty(driver)


def test_a_block_that_eagle_drops_is_computed_again(driver_for):
    """A hit ends a block earlier where EAGLE drafts; probes are made by that."""
    driver = driver_for(tiered=True)
    let_eagle_draft(driver)
    for number in range(3):
        driver.add(thinker(f"r{number}", 200, prompt_tokens=31 + 9 * number))
    seen = watch(driver)
    driver.drain()
    suffix = driver.scheduler.early_exit.probes.suffix_tokens
    assert max(each.computed for each in seen) == 2 * BLOCK_SIZE - 1 + suffix
    for each in seen:
        full = (each.length - suffix) // BLOCK_SIZE * BLOCK_SIZE
        assert each.computed == each.length - max(full - BLOCK_SIZE, 0)
    assert is_empty(driver)


@pytest.mark.skipif(not is_release("0.33"), reason="vLLM drops a block of each before 0.33")
def test_a_block_that_eagle_does_not_drop_is_not_computed_again(driver_for):
    """A cache group may be flagged as a drafter's and drop nothing."""
    driver = driver_for(tiered=True)
    let_eagle_draft(driver)
    coordinator = driver.scheduler.kv_cache_manager.coordinator
    coordinator.drop_eagle_group_ids = set()
    coordinator.single_type_managers[0].use_eagle = False
    probes = driver.scheduler.early_exit.probes
    driver.add(thinker("r", 200))
    seen = watch(driver)
    driver.drain()
    assert seen
    assert probes._num_cached(2 * BLOCK_SIZE) == 2 * BLOCK_SIZE
    for each in seen:
        assert each.computed == each.length - probes._num_cached(each.length - probes.suffix_tokens)
    assert is_empty(driver)


@pytest.mark.skipif(not is_release("0.33"), reason="vLLM hashes so from 0.33 on")
def test_a_block_is_found_once_the_tokens_that_its_hash_covers_are_there(driver_for, monkeypatch):
    """Where EAGLE drafts, a hash covers tokens behind its block, which a probe has others of."""
    ahead = 2
    monkeypatch.setattr(
        scheduler_driver,
        "get_request_block_hasher",
        lambda size, function: get_request_block_hasher(size, function, ahead),
    )
    driver = driver_for(tiered=True)
    driver.scheduler.num_hash_lookahead_tokens = ahead
    pool_of(driver).num_hash_lookahead_tokens = ahead
    for number in range(3):
        driver.add(thinker(f"r{number}", 200, prompt_tokens=31 + 9 * number))
    seen = watch(driver)
    driver.drain()
    probes, late = driver.scheduler.early_exit.probes, 0
    for each in seen:
        prefix = each.length - probes.suffix_tokens
        late += each.length - each.computed < prefix // BLOCK_SIZE * BLOCK_SIZE
        # What was found is no less than what the probe was sized by.
        assert each.length - each.computed >= probes._num_cached(prefix)
    assert late
    assert is_empty(driver)


def test_a_probe_whose_window_is_gone_is_not_made(driver_for):
    """With a sliding window alone, a probe never computes more than its last block."""
    driver = driver_for(blocks=60, groups=[sliding_window(64)])
    for number in range(8):
        driver.add(thinker(f"r{number}", 400))
        for _ in range(20):
            driver.step()
    seen = watch(driver)
    driver.drain()
    suffix = driver.scheduler.early_exit.probes.suffix_tokens
    assert len(seen) > 200
    assert max(each.computed for each in seen) <= BLOCK_SIZE + suffix
    assert is_empty(driver)


def test_probes_of_long_thoughts_are_spread_over_steps(driver_for):
    """Their contexts add up to the bound at most; one alone may be longer."""
    driver = driver_for(EXIT__PROBE_CONTEXT_TOKENS="300")
    scheduler = driver.scheduler
    for number in range(6):
        driver.add(thinker(f"r{number}", 380 + number))
    suffix = scheduler.early_exit.probes.suffix_tokens
    seen = watch(driver)
    driver.drain()
    steps = defaultdict(list)
    for each in seen:
        steps[each.step].append(each.length - suffix)
    assert all(len(lengths) == 1 or sum(lengths) <= 300 for lengths in steps.values())
    assert max(map(len, steps.values())) > 3
    assert max(map(max, steps.values())) > 300
    # Nor does any thought go without.
    assert min(Counter(each.parent for each in seen).values()) > 60
    assert is_empty(driver)


def test_steps_with_probes_keep_their_distance(driver_for):
    """Eight by default; a probe that is due after a longer pause does not wait."""
    driver = driver_for(EXIT__PROBE_EVERY_STEPS="8", EXIT__PROBE_MAX_GAP_TOKENS="20")
    driver.add(thinker("alone", 300))
    probes, asked = driver.scheduler.early_exit.probes, []
    ask = probes.ask
    probes.ask = lambda *args: asked.append(driver.steps) or ask(*args)
    seen = watch(driver)
    driver.drain()
    steps = [each.step for each in seen]
    assert len(steps) > 10
    assert min(later - step for step, later in pairwise(steps)) >= 8
    # 20 tokens lie between two of them. A block that is just full is computed one step later.
    assert {step - max(at for at in asked if at < step) for step in steps} == {1, 2}
    assert is_empty(driver)


def test_many_thoughts_share_steps_with_probes(driver_for):
    """As many steps pass between two as is asked for, however many probes are due."""
    driver = driver_for(EXIT__PROBE_EVERY_STEPS="8")
    for number in range(8):
        driver.add(thinker(f"r{number}", 300))
    seen = watch(driver)
    driver.drain()
    steps = sorted({each.step for each in seen})
    assert {later - step for step, later in pairwise(steps[:20])} == {8}
    assert len(seen) > 7 * len(steps)


def test_the_limit_of_probes_keeps_their_steps_apart(driver_for):
    """More thoughts than may be probed at a time: no step is slower than without them for that."""
    driver = driver_for(EXIT__PROBE_EVERY_STEPS="8", EXIT__PROBES_IN_FLIGHT="2")
    for number in range(8):
        driver.add(thinker(f"r{number}", 300))
    seen = watch(driver)
    driver.drain()
    steps = Counter(each.step for each in seen)
    assert set(steps.values()) == {2}
    assert min(later - step for step, later in pairwise(sorted(steps))) >= 8
    # Nor does any thought go without.
    assert min(Counter(each.parent for each in seen).values()) > 5
    assert is_empty(driver)


@pytest.mark.parametrize("lacks", ["tokens", "seats"])
def test_probes_that_find_no_room_follow_in_the_next_steps(driver_for, lacks):
    """No step that left some out starts a pause: one such step in eight would not keep up."""
    number, gap = 8, str(4 * BLOCK_SIZE)
    driver = driver_for(
        EXIT__PROBE_EVERY_STEPS="8",
        EXIT__PROBE_MIN_GAP_TOKENS=gap,
        EXIT__PROBE_MAX_GAP_TOKENS=gap,
    )
    scheduler = driver.scheduler
    for one in range(number):
        driver.add(thinker(f"r{one}", 500))
    while not scheduler.early_exit.probes.are_next:
        driver.step()
    probes, asked = scheduler.early_exit.probes, {}
    ask = probes.ask
    probes.ask = lambda watched, probe, tokens: (
        asked.update({(watched.name, tokens): driver.steps}) or ask(watched, probe, tokens)
    )
    suffix = probes.suffix_tokens
    # As if the policy cut each step, or others ran: it has room for a probe or two.
    if lacks == "tokens":
        scheduler.max_num_scheduled_tokens = number + BLOCK_SIZE + suffix
    else:
        scheduler.max_num_active_reqs = number + 2
    seen = watch(driver)
    driver.drain()
    probed = {(each.parent, each.length - suffix): each.step for each in seen}
    assert len(asked) > 2 * number
    assert asked.keys() <= probed.keys()
    assert max(probed[each] - step for each, step in asked.items()) <= number + 2
    assert is_empty(driver)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05},
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5, "logprobs": 3, "prompt_logprobs": 1},
        {"presence_penalty": 1.0, "repetition_penalty": 1.1, "min_tokens": 3},
        {"logit_bias": {65: 1.0}, "allowed_token_ids": [65, 66], "bad_words": ["x"]},
        {"extra_args": {"meridian_exit": "observe"}, "stop": ["x"], "ignore_eos": True},
    ],
)
def test_a_probe_is_sampled_as_its_parent_and_asks_for_nothing_more(asked):
    """Else a probe would choose the sampler's path for the whole batch."""
    parent = SamplingParams(max_tokens=50, **asked)
    probe = sampled_as(parent, 90)
    alike = ("temperature", "top_p", "top_k", "min_p")
    assert [getattr(probe, name) for name in alike] == [getattr(parent, name) for name in alike]
    plain = SamplingParams(max_tokens=1, detokenize=False, routed_experts_prompt_start=90)
    others = set(SamplingParams.__struct_fields__) - set(alike)
    assert {name: getattr(probe, name) for name in others} == {
        name: getattr(plain, name) for name in others
    }
    assert probe.seed is None


def test_a_probe_of_a_seeded_parent_has_no_seed(driver_for):
    """On a CPU a seed keeps prefill whole; a probe is not of that kind."""
    driver = driver_for()
    driver.add(thinker("r", 100), seed=7)
    seen = []
    while driver.scheduler.has_unfinished_requests():
        output = driver.step()
        seen += [new.sampling_params for new in output.scheduled_new_reqs]
    assert [params.seed for params in seen] == [7] + [None] * (len(seen) - 1)
    assert len(seen) > 20
    driver.drain()


def test_no_probe_is_made_whose_prefix_is_found_where_no_request_holds_it(monkeypatch, demo_model):
    """Two requests thought the same; the one whose blocks were cached first is gone."""
    driver = exit_driver(monkeypatch, demo_model, is_async=False, blocks=120, **PROBED)
    seen, scheduler = watch(driver), driver.scheduler
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    gone = thinker("a", think_tokens=900)
    driver.add(gone)
    driver.add(replace(gone, request_id="b"))
    while scheduler.requests["b"].num_output_tokens < 20 * BLOCK_SIZE:
        driver.step()
    [found] = pool.get_cached_block(scheduler.requests["b"].block_hashes[9], [0])
    first = next(name for name in "ab" if found in manager.get_blocks(name).blocks[0])
    driver.abort(first)
    # What is left free is nearly all that it held.
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 18)
    made, make = [], scheduler.early_exit.probes._make
    scheduler.early_exit.probes._make = lambda *args: made.append(args) or make(*args)
    for _ in range(30):
        driver.step()
    assert not made
    pool.free_blocks(taken)
    seen.clear()
    while not seen:
        driver.step()
    driver.drain()
    assert is_empty(driver)


def test_a_thought_that_reads_no_cache_is_probed_from_its_own_blocks(monkeypatch, demo_model):
    """Prompt log-probabilities keep a request from reading the cache, and not its probes."""
    driver = exit_driver(monkeypatch, demo_model, is_async=False, blocks=120, **PROBED)
    seen, scheduler = watch(driver), driver.scheduler
    driver.add(thinker("a", think_tokens=900))
    scheduler.requests["a"].skip_reading_prefix_cache = True
    while scheduler.requests["a"].num_output_tokens < 20 * BLOCK_SIZE:
        driver.step()
    pool = scheduler.kv_cache_manager.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 8)
    seen.clear()
    for _ in range(30):
        driver.step()
    assert len(seen) > 10
    pool.free_blocks(taken)
    driver.drain()
    assert is_empty(driver)


def test_a_probe_leaves_what_it_finds_unheld_to_no_other(monkeypatch, demo_model):
    """Two pairs of requests thought the same; of each, the one whose blocks came first is gone."""
    driver = exit_driver(monkeypatch, demo_model, is_async=False, blocks=200, **PROBED)
    seen, scheduler = watch(driver), driver.scheduler
    pool, manager = scheduler.kv_cache_manager.block_pool, scheduler.kv_cache_manager
    for pair in ("ab", "cd"):
        gone = thinker(pair, think_tokens=900)
        for name in pair:
            driver.add(replace(gone, request_id=name))
    while scheduler.requests["d"].num_output_tokens < 20 * BLOCK_SIZE:
        driver.step()
    for pair in ("ab", "cd"):
        [found] = pool.get_cached_block(scheduler.requests[pair[0]].block_hashes[9], [0])
        driver.abort(next(n for n in pair if found in manager.get_blocks(n).blocks[0]))
    # More than what one of the two held, and less than both.
    taken = pool.get_new_blocks(pool.get_num_free_blocks() - 30)
    refused, take_back = [], scheduler.early_exit.probes._take_back
    scheduler.early_exit.probes._take_back = lambda probe: refused.append(probe) or take_back(probe)
    seen.clear()
    for _ in range(20):
        driver.step()
    assert len(seen) > 10
    assert not refused
    pool.free_blocks(taken)
    driver.drain()
    assert is_empty(driver)
