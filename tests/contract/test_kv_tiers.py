"""The real scheduler and KV manager: which free blocks are handed out first."""

import pytest
from queue_watch import walk_tiers
from scheduler_driver import (
    BLOCK_SIZE,
    WORD,
    Driver,
    Job,
    engine_config,
)
from tier_driver import (
    BLOCKS,
    SYNC_AND_ASYNC,
    THINKER,
    blocks_of,
    counted,
    driver_for,
    free_order,
    load,
    logged,
    pool_of,
    preempt,
    prompt,
    scheduler_class,
    step_until,
    tiers_of,
    turn,
)

from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.kv_cache.integrity import find_faults
from meridian_patch.phase.tracker import Phase
from meridian_patch.policy.retention import Tier

pytestmark = pytest.mark.usefixtures("patience")

TOOL_CALL = "<tool>"
TOOL_CALL_IDS = tuple(build_tokenizer().encode(TOOL_CALL, add_special_tokens=False))

# The pool holds an old prompt of 5 full blocks, then a thinker of about 13, of which 1 is prompt.
OLD = Job("old", prompt(161, 1, thinks=False), None, 2)
OLD_AGAIN = Job("old-again", (*OLD.prompt, *[WORD] * 40), None, 2)
OLD_HITS = 5 * BLOCK_SIZE
THINKER_KEEPS = BLOCK_SIZE
# Wants five blocks more than are blank by then.
FILLER = Job("filler", prompt(300, 3, thinks=False), None, 2)


def end_by_stop(driver):
    turn(driver, THINKER)


def end_by_length(driver):
    turn(driver, Job("thinker", THINKER.prompt, 1000, 10, max_tokens=400))


def end_by_abort(driver):
    driver.add(Job("thinker", THINKER.prompt, 1000, 10))
    step_until(driver, "thinker", Phase.THINK, tokens=400)
    driver.abort("thinker")
    driver.drain()


ENDINGS = pytest.mark.parametrize("end", [end_by_stop, end_by_length, end_by_abort])


@SYNC_AND_ASYNC
@ENDINGS
def test_a_finished_thought_makes_room_before_an_older_prompt(demo_model, is_async, end):
    """However it ended; the next turn then hits the whole old prompt."""
    driver = driver_for(demo_model, is_async=is_async)
    turn(driver, OLD)
    end(driver)
    turn(driver, FILLER)
    assert set(counted(driver, "kv_eviction")) == {"think_complete"}
    assert turn(driver, OLD_AGAIN) == OLD_HITS
    again = Job("thinker-again", (*THINKER.prompt[:-1], *[WORD] * 20), None, 2)
    assert turn(driver, again) == THINKER_KEEPS
    assert counted(driver, "kv_hit_tokens") == {"output_critical": OLD_HITS + THINKER_KEEPS}
    assert find_faults(pool_of(driver)) == []


@pytest.mark.parametrize(
    ("variable", "value"),
    [("KV__TIERS", "false"), ("POLICY__NAME", "noop"), ("KV__HISTORY", "keep")],
)
@SYNC_AND_ASYNC
@ENDINGS
def test_without_tiers_the_same_load_evicts_the_old_prompt(
    monkeypatch, demo_model, is_async, end, variable, value
):
    """The test above can fail: least recently used goes first, and the thought survives."""
    monkeypatch.setenv(f"MERIDIAN_PATCH_SET_{variable}", value)
    driver = driver_for(demo_model, is_async=is_async)
    turn(driver, OLD)
    end(driver)
    turn(driver, FILLER)
    assert set(counted(driver, "kv_eviction")) == {"output_critical"}
    assert turn(driver, OLD_AGAIN) == 0


@SYNC_AND_ASYNC
def test_a_kept_history_is_hit_again(monkeypatch, demo_model, is_async):
    """Thought and answer come back in the next turn's prompt and are found."""
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__HISTORY", "keep")
    driver = driver_for(demo_model, is_async=is_async)
    turn(driver, THINKER)
    said = [THINKER.token(i) for i in range(360 + 1 + 40 + 1)]
    again = Job("again", (*THINKER.prompt, *said, *[WORD] * 20), None, 2)
    num_known = len(THINKER.prompt) + len(said) - 1
    assert turn(driver, again) == num_known // BLOCK_SIZE * BLOCK_SIZE


@pytest.mark.parametrize("calls_tool", [False, True], ids=["answers", "calls-tool"])
@SYNC_AND_ASYNC
def test_a_tool_call_keeps_the_thought_where_the_template_does(
    monkeypatch, use_family, demo_model, is_async, calls_tool
):
    """A tool loop that goes on hits its thought; one that ended makes room."""
    use_family(tool_call=[TOOL_CALL])
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__HISTORY", "keep_in_tool_loop")
    driver = driver_for(demo_model, is_async=is_async)
    opening = TOOL_CALL_IDS if calls_tool else ()
    turn(driver, Job("thinker", THINKER.prompt, 360, 40, opening=opening))
    tiers = tiers_of(driver)
    assert len(tiers[Tier.THINK_COMPLETE]) == (0 if calls_tool else 12)
    assert len(tiers[Tier.OUTPUT_CRITICAL]) == (13 if calls_tool else 1)


def test_a_tool_call_that_was_only_thought_of_does_not_count(monkeypatch, use_family, demo_model):
    """The marker must stand in the answer."""
    use_family(tool_call=[TOOL_CALL])
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__HISTORY", "keep_in_tool_loop")
    driver = driver_for(demo_model)

    class Thinks(Job):
        def token(self, index):
            place = index - 50
            return TOOL_CALL_IDS[place] if 0 <= place < 6 else super().token(index)

    turn(driver, Thinks("thinker", THINKER.prompt, 360, 40))
    assert len(tiers_of(driver)[Tier.THINK_COMPLETE]) == 12


def test_a_tool_loop_rule_without_a_marker_is_stock_and_says_so(
    use_family, monkeypatch, demo_model, caplog
):
    """A loop that goes on cannot be seen, so nothing is evicted early."""
    use_family(history="keep_in_tool_loop", tool_call=[])
    with logged(caplog):
        driver = driver_for(demo_model)
        turn(driver, THINKER)
    assert len(tiers_of(driver)[Tier.OUTPUT_CRITICAL]) == 13
    assert caplog.text.count("has no tool_call marker") == 1


@SYNC_AND_ASYNC
def test_a_preempted_thinker_stands_between_finished_thoughts_and_prompts(demo_model, is_async):
    """Its blocks are handed out after finished thoughts and before prompts, and hit on resume."""
    driver = driver_for(demo_model, is_async=is_async)
    turn(driver, OLD)
    turn(driver, Job("done", prompt(40, 4, thinks=True), 100, 5))
    driver.add(THINKER)
    step_until(driver, "thinker", Phase.THINK, tokens=200)
    own = blocks_of(driver, "thinker")
    preempt(driver, "thinker")
    tiers = tiers_of(driver)
    kept = {block_id for block_id, end in own.items() if end <= THINKER_KEEPS}
    assert tiers[Tier.THINK_ACTIVE] == set(own) - kept
    assert kept < tiers[Tier.OUTPUT_CRITICAL]
    assert len(tiers[Tier.THINK_COMPLETE]) == 3
    blank, *_ = walk_tiers(pool_of(driver).free_block_queue)
    queue = pool_of(driver).free_block_queue
    order = [block.block_id for block in queue.get_all_free_blocks()][len(blank) :]
    places = {tier: [order.index(i) for i in ids] for tier, ids in tiers.items()}
    assert max(places[Tier.THINK_COMPLETE]) < min(places[Tier.THINK_ACTIVE])
    assert max(places[Tier.THINK_ACTIVE]) < min(places[Tier.OUTPUT_CRITICAL])
    driver.drain()
    assert driver.preempted_hits == len(own) * BLOCK_SIZE
    assert counted(driver, "kv_hit_tokens") == {
        "output_critical": BLOCK_SIZE,
        "think_active": (len(own) - 1) * BLOCK_SIZE,
    }
    assert len(driver.deliveries["thinker"]) == 360 + 40 + 2


@SYNC_AND_ASYNC
def test_a_preempted_answer_stands_with_the_prompts(demo_model, is_async):
    """It is an answer: all of it is kept for the resume."""
    driver = driver_for(demo_model, is_async=is_async)
    driver.add(THINKER)
    step_until(driver, "thinker", Phase.ANSWER, tokens=5)
    own = blocks_of(driver, "thinker")
    preempt(driver, "thinker")
    tiers = tiers_of(driver)
    assert tiers[Tier.OUTPUT_CRITICAL] == set(own)
    assert not tiers[Tier.THINK_ACTIVE]
    assert not tiers[Tier.THINK_COMPLETE]
    driver.drain()
    assert driver.preempted_hits == len(own) * BLOCK_SIZE
    assert counted(driver, "kv_hit_tokens") == {"output_critical": len(own) * BLOCK_SIZE}
    # Finished now, its thought goes first after all.
    assert len(tiers_of(driver)[Tier.THINK_COMPLETE]) == 12


def share_a_thought(driver, *, think_tokens=300):
    """Two thinkers over the same blocks: the second one's prompt is what the first one said."""
    first = Job("first", prompt(40, 5, thinks=True), 300, 5)
    driver.add(first)
    step_until(driver, "first", Phase.THINK, tokens=120)
    said = tuple(first.token(i) for i in range(100))
    driver.add(Job("second", (*first.prompt, *said), think_tokens, 200))
    step_until(driver, "second", Phase.THINK, tokens=40)
    firsts, seconds = blocks_of(driver, "first"), blocks_of(driver, "second")
    shared = {i for i in set(firsts) & set(seconds) if firsts[i] > THINKER_KEEPS}
    assert len(shared) == 3
    return shared, set(firsts) - set(seconds), set(seconds) - set(firsts)


@SYNC_AND_ASYNC
def test_shared_blocks_keep_the_higher_tier_of_who_went_first(demo_model, is_async):
    """The first was preempted and comes back: that the second is done does not count."""
    driver = driver_for(demo_model, is_async=is_async)
    shared, firsts, seconds = share_a_thought(driver)
    preempt(driver, "first")
    assert not shared & set().union(*tiers_of(driver).values())
    driver.abort("second")
    tiers = tiers_of(driver)
    assert shared | firsts <= tiers[Tier.THINK_ACTIVE]
    assert seconds <= tiers[Tier.THINK_COMPLETE]
    driver.drain()
    assert find_faults(pool_of(driver)) == []


@SYNC_AND_ASYNC
def test_shared_blocks_keep_the_higher_tier_of_who_went_last(demo_model, is_async):
    """The first is done; the second was preempted and comes back."""
    driver = driver_for(demo_model, is_async=is_async)
    shared, firsts, seconds = share_a_thought(driver)
    driver.abort("first")
    preempt(driver, "second")
    tiers = tiers_of(driver)
    assert shared | seconds <= tiers[Tier.THINK_ACTIVE]
    assert firsts <= tiers[Tier.THINK_COMPLETE]
    driver.drain()


@SYNC_AND_ASYNC
def test_blocks_shared_with_a_preempted_answer_stand_with_the_prompts(demo_model, is_async):
    """OUTPUT_CRITICAL is a tier like others when blocks are shared."""
    driver = driver_for(demo_model, is_async=is_async, blocks=40)
    shared, _, seconds = share_a_thought(driver, think_tokens=60)
    step_until(driver, "second", Phase.ANSWER, tokens=3)
    preempt(driver, "second")
    driver.abort("first")
    assert shared | seconds <= tiers_of(driver)[Tier.OUTPUT_CRITICAL]
    driver.drain()


@pytest.mark.parametrize("ending", ["abort", "preempt"])
def test_deferred_blocks_come_back_in_their_tiers(demo_model, ending):
    """A KV connector may make vLLM return blocks a step later, by another way."""
    driver = driver_for(demo_model, is_async=True, blocks=40)
    scheduler = driver.scheduler
    scheduler.defer_block_free = True
    driver.add(Job("other", prompt(20, 6, thinks=False), None, 300))
    driver.add(Job("thinker", THINKER.prompt, 1000, 5))
    step_until(driver, "thinker", Phase.THINK, tokens=100)
    own = blocks_of(driver, "thinker")
    low = {block_id for block_id, end in own.items() if end > THINKER_KEEPS}
    if ending == "abort":
        driver.abort("thinker")
        expected = Tier.THINK_COMPLETE
    else:
        preempt(driver, "thinker")
        # It must not resume before its blocks are back.
        scheduler.waiting.remove_request(waiting := scheduler.requests["thinker"])
        expected = Tier.THINK_ACTIVE
    assert scheduler.deferred_frees
    assert not set(own) & set().union(*tiers_of(driver).values())
    while scheduler.deferred_frees:
        driver.step()
    tiers = tiers_of(driver)
    assert tiers[expected] == low
    assert set(own) - low <= tiers[Tier.OUTPUT_CRITICAL]
    if ending == "preempt":
        scheduler.waiting.prepend_request(waiting)
    driver.drain()
    driver.step()
    assert not scheduler.deferred_frees
    assert find_faults(pool_of(driver)) == []
    assert not pool_of(driver).free_block_queue.assigned


@SYNC_AND_ASYNC
def test_without_prefix_caching_there_are_no_tiers(demo_model, is_async, caplog):
    """One warning, no hits, every answer."""
    with logged(caplog):
        driver = driver_for(demo_model, is_async=is_async, enable_prefix_caching=False)
        load(driver, seed=1, requests=10)
    assert caplog.text.count("prefix caching is off") == 1
    assert driver.hits == driver.preempted_hits == 0
    assert not counted(driver, "kv_")
    assert not counted(driver, "fallback")
    assert len(driver.scheduler.phase_tracker) == 0


def test_vllms_own_manager_means_no_tiers(demo_model, caplog):
    """As with --scheduler-cls: one warning, and the order of steps is still ours."""
    config = engine_config(demo_model, is_async=False, blocks=BLOCKS)
    with logged(caplog):
        driver = Driver.build(scheduler_class(is_async=False), config, is_async=False)
        load(driver, seed=1, requests=10)
    assert caplog.text.count("KV tiers are inactive") == 1
    assert not counted(driver, "kv_")
    assert not counted(driver, "fallback")


def test_an_unknown_history_is_stock_and_says_so(monkeypatch, use_family, demo_model, caplog):
    """Where it is unknown what comes back, the free blocks stand as with tiers off."""
    use_family(history="unverified")
    with logged(caplog):
        unknown = driver_for(demo_model)
    load(unknown, seed=2)
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__TIERS", "false")
    off = driver_for(demo_model)
    load(off, seed=2)
    assert caplog.text.count("KV tiers keep outputs as stock does") == 1
    assert free_order(unknown) == free_order(off)
    assert set(counted(unknown, "kv_eviction")) == {"output_critical"}
    monkeypatch.delenv("MERIDIAN_PATCH_SET_KV__TIERS")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_KV__HISTORY", "strip")
    tiered = driver_for(demo_model)
    load(tiered, seed=2)
    assert free_order(tiered) != free_order(off), "the load must tell tiers from stock"
