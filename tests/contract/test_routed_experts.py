"""Engines that return routed experts, on vLLM's real scheduler and with its own store of them.

The store raises where a request hits a block whose rows it evicted, and the engine ends.
"""

import pytest
from exit_driver import exit_driver, is_empty, thinker
from routed_experts import BOUNDS_HITS, return_routed_experts, run_worker
from scheduler_driver import BLOCK_SIZE, WORD, Job
from tier_driver import SYNC_AND_ASYNC, THINKER, driver_for, prompt, turn

from meridian_patch.engine import status

# The pool holds an old prompt of 8 full blocks, then a thinker of 13 that are evicted before it.
OLD = Job("old", prompt(8 * BLOCK_SIZE + 1, 1, thinks=False), None, 2)
OLD_AGAIN = Job("old-again", (*OLD.prompt, *[WORD] * 40), None, 2)
FILLER = Job("filler", prompt(300, 3, thinks=False), None, 2)


@pytest.fixture(autouse=True)
def engines(monkeypatch):
    return_routed_experts(monkeypatch)
    monkeypatch.setattr(status, "_report", {})


@pytest.fixture
def rows_of(request):
    """Runs the worker side behind a driver; rows by request."""

    def run(driver):
        experts = run_worker(driver)
        request.addfinalizer(experts.close)
        return experts.sent

    return run


@SYNC_AND_ASYNC
@pytest.mark.usefixtures("patience")
def test_what_a_prompt_hits_has_its_routed_experts(demo_model, rows_of, is_async):
    """With vLLM 0.32 in stock's order of eviction, as the status says; with 0.33 in any order."""
    driver = driver_for(demo_model, is_async=is_async)
    sent = rows_of(driver)
    for each in (OLD, THINKER, FILLER):
        turn(driver, each)
    hits = turn(driver, OLD_AGAIN)
    # Asynchronously a token is computed behind the last one, too.
    assert sent["old-again"] - len(OLD_AGAIN.prompt) - 2 in (0, int(is_async))
    assert (driver.scheduler.kv_tiers is not None) == BOUNDS_HITS
    assert (hits > 0) == BOUNDS_HITS
    told = status._report["kv_tiers_off"]
    assert told is None if BOUNDS_HITS else "--enable-return-routed-experts" in told


@SYNC_AND_ASYNC
def test_a_probe_is_sent_no_routed_experts(demo_model, monkeypatch, rows_of, is_async):
    """It would be sent those of its parent's whole prefix, which no client gets."""
    settings = {
        "EXIT__MODE": "observe",
        "EXIT__EAT_WARMUP_PROBES": "1000",
        "EXIT__PROBE_MIN_GAP_TOKENS": "1",
        "EXIT__PROBE_MAX_GAP_TOKENS": "2",
    }
    driver = exit_driver(monkeypatch, demo_model, is_async=is_async, tiered=True, **settings)
    sent = rows_of(driver)
    jobs = [thinker(name, 200) for name in ("one", "two", "three")]
    for each in jobs:
        driver.add(each)
    driver.drain()
    probes = {name for name in sent if name.startswith("meridian-probe")}
    assert driver.scheduler.early_exit.probes.num_probes > 100
    assert len(probes) > 100
    assert not sum(sent[name] for name in probes)
    for each in jobs:
        said = len(driver.deliveries[each.request_id])
        assert sent[each.request_id] - len(each.prompt) - said + 1 in (0, int(is_async))
    assert is_empty(driver)
