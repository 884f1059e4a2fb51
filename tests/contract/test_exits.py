"""Early exit on the real scheduler: what is measured, probed, forced, and left behind."""

import random
from collections import Counter
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
from exit_driver import exit_driver, is_empty, thinker, told
from scheduler_driver import BLOCK_SIZE, THINK_END, WORD, Driver, Job, engine_config
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.request_state import RequestState
from meridian_patch.engine.scheduler.scheduler import build_phase_scheduler
from meridian_patch.exit.thought_monitor import ThoughtMonitor

CAPPED = {"EXIT__MAX_THINK_TOKENS": "90", "EXIT__EAT": "false"}
UNDOCUMENTED = {"provenance": "unverified", "source": "a test", "single_token": False}


@pytest.fixture
def driver_for(monkeypatch, demo_model):
    return partial(exit_driver, monkeypatch, demo_model)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_converged_thought_is_closed_once(driver_for, is_async):
    """A steady entropy closes it, with one forced boundary; answer and bookkeeping are whole."""
    driver = driver_for(is_async=is_async)
    driver.add(thinker("r"))
    driver.drain()
    assert driver.forced == [("r", THINK_END)]
    assert driver.scheduler.phase_counters.totals["exit:eat"] == 1
    assert driver.scheduler.phase_counters.totals["exit_verdict:eat"] == 1
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("mode", ["off", "observe"])
def test_nothing_is_forced_unless_asked_for(driver_for, is_async, mode):
    """observe probes and says what it would do, off does neither; both leave the thought alone."""
    driver = driver_for(is_async=is_async, EXIT__MODE=mode)
    driver.add(thinker("r"))
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    assert not driver.forced
    assert totals.get("exit:natural", 0) == totals.get("exit_verdict:eat", 0) == (mode != "off")
    assert bool(totals.get("probe:measured")) == (mode == "observe")
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_observing_takes_a_sample(driver_for, is_async):
    """So many at a time, those that begin first; who asks is always measured; all ends are told."""
    driver = driver_for(is_async=is_async, EXIT__MODE="observe", EXIT__OBSERVED_AT_A_TIME="2")
    exits = driver.scheduler.early_exit
    reports, measured = told(driver), []
    for number in range(6):
        driver.add(thinker(f"r{number}", 200 + 10 * number))
    driver.step()
    driver.add(thinker("asks"), {"meridian_eat_delta": 0.5})
    while driver.scheduler.requests:
        driver.step()
        measured.append(len(exits.measured))
    driver.add(thinker("late"))
    driver.drain()
    assert max(measured) == 3
    assert {name for name, [*_, (outcome, *_)] in reports.items() if outcome.is_measured} == {
        "r0",
        "r1",
        "asks",
        "late",
    }
    for number in range(6):
        outcome, think_tokens, *_ = reports[f"r{number}"][-1]
        assert outcome.think_tokens == think_tokens == 201 + 10 * number
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:natural"] == 8
    assert totals["measured:observe"] == totals["exit_verdict:eat"] == 4
    assert "invalid_signals:think" not in totals
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_request_has_its_own_mode_and_bounds(driver_for, is_async):
    """A cap closes at its token, in the one request that asks for it."""
    driver = driver_for(is_async=is_async, EXIT__MODE="observe")
    driver.add(thinker("own"), {"meridian_exit": "enforce", "meridian_max_think_tokens": 64})
    driver.add(thinker("other"))
    driver.drain()
    assert [name for name, _ in driver.forced] == ["own"]
    totals = driver.scheduler.phase_counters.totals
    assert totals["exit:natural"] == 1
    # One token is on the way when the close is decided, and the boundary counts.
    assert sum(totals.get(f"think_tokens:{why}", 0) for why in ("eat", "hard_cap")) <= 64 + 2


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_probe_computes_a_block_and_the_boundary_at_most(driver_for, is_async):
    """Its prefix comes from the cache, whatever the length."""
    never = {"EXIT__EAT_WARMUP_PROBES": "1000", "EXIT__PROBE_MAX_GAP_TOKENS": "13"}
    driver = driver_for(is_async=is_async, tiered=True, **never)
    for number in range(4):
        driver.add(thinker(f"r{number}", prompt_tokens=31 + 9 * number))
    driver.drain()
    probes = driver.scheduler.early_exit.probes
    assert probes.num_probes > 60
    assert 1 < probes.most_computed_tokens <= BLOCK_SIZE + 1
    # Stock's own statistics know nothing of them.
    assert driver.hits == 0
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_the_boundary_that_comes_first_counts(driver_for, is_async):
    """A thought that ends by itself while its close is being decided is not ended twice."""
    for think_tokens in range(56, 76):
        driver = driver_for(is_async=is_async, EXIT__MAX_THINK_TOKENS="64", EXIT__EAT="false")
        driver.add(thinker("r", think_tokens))
        driver.drain()
        reasons = [n for n in driver.scheduler.phase_counters.totals if n.startswith("exit:")]
        assert reasons == ["exit:hard_cap" if driver.forced else "exit:natural"]
        assert driver.scheduler.phase_counters.totals[reasons[0]] == 1
        assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("call", ["<call>", "<|pad|>"], ids=["text", "token"])
def test_nothing_is_forced_behind_a_tool_call_that_ends_the_thought(
    driver_for, use_family, is_async, call
):
    """Before the call is known a cap closes the thought, from there on the thought is over."""
    use_family(implicit_end=[call])
    ids = tuple(build_tokenizer().encode(call, add_special_tokens=False))
    for cap in (20, 28, 29, 30, 31, 33, 60):
        driver = driver_for(is_async=is_async, EXIT__MAX_THINK_TOKENS=str(cap), EXIT__EAT="false")
        driver.add(Job("r", thinker("r").prompt, 30, 60, opening=ids, is_closed=False))
        request = driver.scheduler.requests["r"]
        driver.drain()
        said = list(request.output_token_ids)
        totals = driver.scheduler.phase_counters.totals
        if driver.forced:
            assert cap <= 30
            assert said.index(THINK_END) < 30 + len(ids)
            assert totals["exit:hard_cap"] == 1
        else:
            assert cap >= 28
            assert tuple(said[30 : 30 + len(ids)]) == ids
            assert totals["exit:natural"] == 1
            # Tokens that began the call were thought until it was known.
            assert totals["think_tokens:natural"] == 30 + len(ids) - 1
        assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_closes_hold_under_preemption(driver_for, is_async):
    """Under KV pressure each thought still has one end, and nothing is left behind."""
    driver = driver_for(is_async=is_async, blocks=40, tiered=True)
    for number in range(24):
        driver.add(thinker(f"r{number}", 100 + 20 * number))
        for _ in range(5):
            driver.step()
    driver.drain()
    totals = driver.scheduler.phase_counters.totals
    ended = sum(count for name, count in totals.items() if name.startswith("exit:"))
    assert totals["preemption:think"] > 5
    assert ended == 24
    assert len({name for name, _ in driver.forced}) == totals["exit:eat"]
    # A parent that resumes computes its own blocks first.
    assert driver.scheduler.early_exit.probes.most_computed_tokens <= BLOCK_SIZE + 1
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_aborts_leave_nothing(driver_for, is_async):
    """Parents go at any moment, alone or all at once; their probes go with them."""
    driver = driver_for(is_async=is_async, blocks=60, tiered=True)
    rng = random.Random(4)
    for number in range(120):
        driver.add(thinker(f"r{number}", rng.randrange(30, 300)))
        for _ in range(rng.randrange(20)):
            driver.step()
        if number % 3 == 0:
            driver.abort(f"r{number - rng.randrange(6)}")
        if number == 60:
            driver.abort(None)
    driver.drain()
    assert driver.scheduler.early_exit.probes.num_probes > 50
    assert is_empty(driver)


def test_without_prefix_caching_nothing_is_probed(driver_for, demo_model, monkeypatch):
    """Each probe would compute its whole thought; the other strategies go on."""
    driver_for()
    config = engine_config(demo_model, is_async=False, blocks=200, enable_prefix_caching=False)
    driver = Driver.build(build_phase_scheduler(Scheduler), config, is_async=False)
    driver.add(thinker("r"))
    driver.drain()
    assert driver.scheduler.early_exit.probes is None
    assert "exit:natural" in driver.scheduler.phase_counters.totals


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_what_would_be_undone_is_not_forced(driver_for, is_async):
    """A request that may not say the boundary thinks on."""
    driver = driver_for(is_async=is_async)
    driver.add(thinker("r"))
    request = driver.scheduler.requests["r"]
    request.sampling_params.allowed_token_ids = [WORD]
    driver.drain()
    assert not driver.forced
    assert driver.scheduler.phase_counters.totals["exit_given_up:allowed_tokens"] == 1


def test_a_family_has_its_own_mode(driver_for, demo_model, use_family, monkeypatch):
    """What the configuration leaves open, the family's file may say."""
    use_family(exit={"mode": "enforce", "max_think_tokens": 64})
    driver_for()
    monkeypatch.delenv("MERIDIAN_PATCH_SET_EXIT__MODE")
    config = engine_config(demo_model, is_async=False, blocks=200)
    driver = Driver.build(build_phase_scheduler(Scheduler), config, is_async=False)
    driver.add(thinker("r"))
    driver.drain()
    assert driver.forced == [("r", THINK_END)]


def test_without_patched_workers_only_the_cap_is_left(driver_for):
    """As with --scheduler-cls alone: nothing is measured, so nothing is probed."""
    driver = driver_for(is_tapped=False, EXIT__MAX_THINK_TOKENS="64")
    driver.add(thinker("r"))
    driver.drain()
    assert driver.scheduler.early_exit.probes is None
    assert driver.forced == [("r", THINK_END)]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_boundary_of_several_tokens_is_forced_in_order(driver_for, use_family, is_async):
    """Under KV pressure too, and behind a last token that might have begun the marker."""
    use_family(end="</done>", probe=None, documented_ids=UNDOCUMENTED)
    driver = driver_for(is_async=is_async, blocks=24, tiered=True, **CAPPED)
    end = driver.scheduler.early_exit.forced_closes.sequence
    assert len(end) > 3
    for number in range(12):
        # Said as an answer's opening, the marker's first token comes just where the cap is.
        opening = (end[0],) * 3
        driver.add(thinker(f"r{number}", 85 + number % 4, opening=opening, max_tokens=140))
        driver.step()
    driver.drain()
    forced = {}
    for name, token in driver.forced:
        forced.setdefault(name, []).append(token)
    assert len(forced) == 12
    assert driver.scheduler.phase_counters.totals["preemption:think"] > 0
    for name, tokens in forced.items():
        # What a preemption took back is forced again.
        assert tokens[-len(end) :] == list(end), name
    assert driver.scheduler.phase_counters.totals["exit:hard_cap"] == 12
    assert is_empty(driver)


def test_a_boundary_that_the_thought_has_begun_ends_within_the_close(driver_for, use_family):
    """The token on the way when the close is decided may be the first of the marker's three."""
    use_family(end="zzz", probe=None, documented_ids=UNDOCUMENTED)
    driver = driver_for(is_async=True, **CAPPED)
    end = driver.scheduler.early_exit.forced_closes.sequence
    assert end == end[:1] * 3
    names = [f"r{number}" for number in range(12)]
    for number, name in enumerate(names):
        driver.add(thinker(name, 83 + number, opening=end[:1], max_tokens=140))
    driver.drain()
    forced = Counter(name for name, _ in driver.forced)
    assert sorted(forced[name] for name in names) == [2, *[3] * 11]
    assert is_empty(driver)


def test_no_probe_is_made_while_an_answer_waits(driver_for):
    """Room that comes free is the answer's."""
    driver = driver_for(EXIT__EAT_WARMUP_PROBES="1000")
    driver.add(thinker("r"))
    for _ in range(100):
        driver.step()
    scheduler = driver.scheduler
    made = scheduler.early_exit.probes.num_probes
    assert made > 3
    waiting = scheduler.request_states.waiting_answers
    waiting[RequestState(SimpleNamespace(status=RequestStatus.RUNNING))] = None
    for _ in range(100):
        driver.step()
    assert scheduler.early_exit.probes.num_probes <= made + 1
    waiting.clear()
    driver.drain()
    assert scheduler.early_exit.probes.num_probes > made + 3
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_tokens_that_are_only_kept_change_nothing(driver_for, is_async, monkeypatch):
    """Told of every token at once, the controllers come to the same closes at the same tokens."""
    seen = []
    for is_told_at_once in (False, True):
        with monkeypatch.context() as patch:
            if is_told_at_once:
                patch.setattr(ThoughtMonitor, "fast_path_tokens", 0)
            driver = driver_for(
                is_async=is_async, blocks=40, tiered=True, EXIT__RPDI="true", EXIT__GRACE_TOKENS="9"
            )
            rng = random.Random(6)
            for number in range(30):
                driver.add(thinker(f"r{number}", rng.randrange(20, 300)))
                for _ in range(rng.randrange(20)):
                    driver.entropy_nats = rng.choice([0.5, 0.5, 3.0, float("nan")])
                    driver.step()
            driver.drain()
            assert is_empty(driver)
            seen.append((driver.forced, driver.deliveries, driver.scheduler.phase_counters.totals))
    assert seen[0] == seen[1]


def test_probes_that_are_due_go_together(driver_for):
    """Most steps only decode."""
    driver = driver_for(EXIT__EAT_WARMUP_PROBES="1000", EXIT__PROBE_EVERY_STEPS="5")
    for number in range(8):
        driver.add(thinker(f"r{number}"))
    probes = []
    while driver.scheduler.has_unfinished_requests():
        output = driver.step()
        probes.append(sum("probe" in name for name in output.num_scheduled_tokens))
    steps = [step for step, count in enumerate(probes) if count]
    assert sum(probes) > 100
    assert min(later - step for step, later in pairwise(steps)) == 5


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_full_batch_makes_no_probes(driver_for, is_async, monkeypatch):
    """With no place among those that may run, none is made in vain, step after step."""
    driver = driver_for(is_async=is_async, EXIT__MODE="observe")
    probes, made = driver.scheduler.early_exit.probes, []
    make = probes._make
    monkeypatch.setattr(probes, "_make", lambda *args: made.append(args) or make(*args))
    for number in range(driver.scheduler.max_num_running_reqs):
        driver.add(thinker(f"r{number}"))
    for _ in range(200):
        driver.step()
    assert len(probes)
    assert not made
    driver.abort("r0")
    for _ in range(30):
        driver.step()
    assert made
    driver.drain()
    assert is_empty(driver)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_enforcing_keeps_a_seat_for_probes(driver_for, is_async):
    """With more thinkers than seats they are still probed, and closed."""
    driver = driver_for(is_async=is_async)
    scheduler = driver.scheduler
    for number in range(2 * scheduler.max_num_running_reqs):
        driver.add(thinker(f"r{number}"))
    users = 0
    while scheduler.has_unfinished_requests():
        output = driver.step()
        names = output.num_scheduled_tokens
        users = max(users, sum("probe" not in name for name in names))
        assert len(names) <= scheduler.max_num_running_reqs
    assert users == scheduler.max_num_running_reqs - 1
    assert scheduler.phase_counters.totals["exit:eat"] == 2 * scheduler.max_num_running_reqs
    while driver._in_flight:
        driver._deliver()
    assert is_empty(driver)


def test_a_single_seat_is_the_users(driver_for):
    """With too few seats none is kept: the thought runs, and is not probed."""
    driver = driver_for()
    driver.scheduler.max_num_running_reqs = driver.scheduler.max_num_active_reqs = 1
    driver.add(thinker("r"))
    driver.add(thinker("s"))
    driver.drain(5_000)
    assert driver.scheduler.phase_counters.totals["exit:natural"] == 2
    assert is_empty(driver)


def test_no_name_of_a_measured_request_stays_when_its_last_step_is_late(driver_for):
    """It is aborted while its step is under way, and beside it one goes on that is not measured."""
    driver = driver_for(is_async=True, EXIT__MODE="observe", EXIT__OBSERVED_AT_A_TIME="1")
    driver.add(thinker("measured"))
    driver.add(thinker("other"))
    while not driver.deliveries["other"]:
        driver.step()
    driver.abort("measured")
    driver.drain()
    assert not driver.scheduler.early_exit.signals.spans
    assert is_empty(driver)
