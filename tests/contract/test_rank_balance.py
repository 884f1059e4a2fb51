"""Ranks in lock step on vLLM's real schedulers, and vLLM's real choice of a rank."""

import asyncio
import random
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from vllm.distributed.utils import create_tcp_store
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core_client import DPLBAsyncMPClient
from vllm.v1.request import RequestStatus

from meridian_patch.bench.arms import override
from meridian_patch.engine.api.phase_changes import KEY
from meridian_patch.engine.api.rank_choice import build_balancing_client
from meridian_patch.engine.scheduler import rank_exchange
from meridian_patch.engine.scheduler.rank_exchange import ZmqExchange, join_ranks
from meridian_patch.phase.progress import PhaseChange
from meridian_patch.policy.rank_balance import RankLoad
from meridian_patch.replay.ranks import LockStepRanks, make_front
from meridian_patch.replay.scheduler import read_template_tokens
from meridian_patch.replay.types import EngineLimits, ReplayArm, ReplayRequest

TEMPLATE = read_template_tokens()
LIMITS = EngineLimits(max_model_len=4096, max_num_seqs=4, max_num_batched_tokens=512)


def seconds(work):
    """Prefill is dear."""
    return 0.01 + 1e-3 * work.prefill_tokens


def ranks_with(number, blocks=400, limits=LIMITS, **policy):
    settings = {"policy.time_budget_us": "10000000", "policy.balance": "true", **policy}
    arm = ReplayArm("patched", True, override(settings))
    return LockStepRanks(number, arm, blocks, seconds, TEMPLATE, DPLBAsyncMPClient, limits)


def request(name, prompt_tokens, think, answer):
    prompt = [1 + (sum(map(ord, name)) + n) % 100 for n in range(prompt_tokens - 1)]
    opened = TEMPLATE.think_start if think else 7
    thought = [*[9] * think, TEMPLATE.think_end] if think else []
    output = [*thought, *[8] * answer, TEMPLATE.turn_end]
    return ReplayRequest(name, [*prompt, opened], output, len(thought))


def longest_step_beside_an_answer(is_on):
    """An answer on rank 0, a long prompt on rank 1, which answers nothing."""
    ranks = ranks_with(2, **{"policy.balance": str(is_on).lower()})
    first, second = ranks.engines
    first.add(request("reader", 20, 5, 400), 0.0)
    for _ in range(60):
        ranks.step()
    second.add(request("long", 1500, 50, 5), ranks.now)
    longest = 0.0
    while second.num_waiting or not second.running_phases():
        began_s = ranks.now
        ranks.step()
        longest = max(longest, ranks.now - began_s)
    for _ in range(40):
        began_s = ranks.now
        ranks.step()
        longest = max(longest, ranks.now - began_s)
    return longest


def test_prefill_spares_answers_of_other_ranks():
    assert longest_step_beside_an_answer(is_on=False) > 0.5
    assert longest_step_beside_an_answer(is_on=True) < 0.3


def drain(ranks, most_steps):
    for _ in range(most_steps):
        if ranks.is_idle:
            return
        ranks.step()
    raise AssertionError(f"after {most_steps} steps requests are left")


@pytest.mark.parametrize("seed", range(6))
def test_no_rank_waits_for_ever(seed):
    """All ranks at their cap, idle ranks, aborts, preemptions, deferred frees, pauses.

    Held admissions are delayed by a bounded number of steps, so the play ends about as soon as
    without them.
    """
    steps = {}
    for most in (0, 64):
        rng = random.Random(seed)
        ranks = ranks_with(3, blocks=60, **{"policy.balance_hold_steps": str(most)})
        for engine in ranks.engines:
            # Blocks of a preempted request come back steps later (vllm-ascend#16315).
            engine.scheduler.defer_block_free = bool(seed % 2)
        names = [f"r{number}" for number in range(40)]
        jobs = [
            request(name, rng.randrange(20, 200), rng.choice((0, 30, 120)), rng.randrange(5, 60))
            for name in names
        ]
        for number, job in enumerate(jobs):
            # Rank 2 is idle most of the time; the others are full.
            rank = 2 if number % 13 == 0 else number % 2
            ranks.engines[rank].add(job, ranks.now)
            for _ in range(rng.randrange(3)):
                ranks.step()
            if rng.random() < 0.2:
                abort(ranks.engines[rank], rng.choice(names[: number + 1]))
            if rng.random() < 0.1:
                pause(ranks, rng.randrange(2), steps=5)
        drain(ranks, 4000)
        steps[most] = ranks.steps
        for engine in ranks.engines:
            assert engine.scheduler.get_request_counts() == (0, 0)
            assert not engine.counters().get("fallback:exception")
    assert steps[64] < 3 * steps[0] + 200


def abort(engine, name):
    if name in engine.scheduler.requests:
        engine.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        engine.forget(name)


def pause(ranks, rank, steps):
    """One rank schedules nothing; the others go on."""
    scheduler = ranks.engines[rank].scheduler
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    others = [engine for engine in ranks.engines if engine.scheduler is not scheduler]
    for _ in range(steps):
        for engine in others:
            if not engine.is_idle:
                engine.step()
    ranks.move_to(max(engine.now for engine in ranks.engines))
    scheduler.set_pause_state(PauseState.UNPAUSED)


def test_a_full_rank_holds_the_others_for_so_many_steps():
    held = {}
    for most in (0, 6):
        ranks = ranks_with(2, **{"policy.balance_hold_steps": str(most)})
        first, second = ranks.engines
        for number in range(4):
            first.add(request(f"full{number}", 20, 5, 300), 0.0)
        for number in range(3):
            second.add(request(f"busy{number}", 20, 300, 300), 0.0)
        second.add(request("ends", 20, 0, 30), 0.0)
        for _ in range(40):
            ranks.step()
        second.add(request("new", 20, 5, 5), ranks.now)
        began = ranks.steps
        while second.num_waiting:
            ranks.step()
        held[most] = ranks.steps - began
        assert second.counters().get("limited_step:ranks", 0) == most
    assert held[6] == held[0] + 6


def with_cadence(ranks, interval):
    """Let vLLM's ``--prefill-schedule-interval`` act: prompts only in each n-th lock step."""
    for engine in ranks.engines:
        schedule = engine.scheduler.schedule
        engine.scheduler.schedule = lambda schedule=schedule: schedule(ranks.steps % interval != 0)


def steps_to_admit(interval, most, late_by):
    """Lock steps until a request is admitted beside a full rank, under vLLM's cadence."""
    ranks = ranks_with(2, **{"policy.balance_hold_steps": str(most)})
    with_cadence(ranks, interval)
    first, second = ranks.engines
    for number in range(4):
        first.add(request(f"full{number}", 20, 5, 400), 0.0)
    for number in range(3):
        second.add(request(f"busy{number}", 20, 300, 300), 0.0)
    for _ in range(4 * interval + late_by):
        ranks.step()
    second.add(request("new", 20, 5, 5), ranks.now)
    began = ranks.steps
    while second.num_waiting:
        ranks.step()
        assert ranks.steps < began + 200
    return ranks.steps - began


@pytest.mark.parametrize("interval", [2, 4])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_a_request_gets_past_the_gate_and_vllms_cadence(interval, most):
    """The step that is free of the gate may always be one that ``throttle_prefills`` spares.

    Both have periods, here equal ones too.
    """
    waits = [steps_to_admit(interval, most, late_by) for late_by in range(interval)]
    assert max(waits) > max(most, 1)
    assert max(waits) <= most + interval


def fill(ranks):
    """All ranks at their cap, and as many requests again that wait on each."""
    for rank, engine in enumerate(ranks.engines):
        for number in range(2 * LIMITS.max_num_seqs):
            think = (0, 30, 110, 170)[number % 4] + 20 * rank
            engine.add(request(f"f{rank}-{number}", 20, think, 40), ranks.now)


@pytest.mark.parametrize("most", [0, 8, 64])
def test_ranks_that_are_all_full_go_on_when_clients_leave(most):
    """All at their cap, then all requests of one rank are aborted, and half of the others'."""
    ranks = ranks_with(3, **{"policy.balance_hold_steps": str(most)})
    fill(ranks)
    for _ in range(20):
        ranks.step()
    for engine in ranks.engines:
        assert engine.scheduler.get_request_counts()[0] == LIMITS.max_num_seqs
    for rank, engine in enumerate(ranks.engines):
        names = list(engine.scheduler.requests)
        for name in names if rank == 2 else names[::2]:
            abort(engine, name)
    # Rank 2 is idle and says nothing more; the others do not wait for it.
    for _ in range(3):
        ranks.step()
    assert ranks.engines[2].is_idle
    ranks.engines[2].add(request("again", 20, 5, 5), ranks.now)
    ranks.step()
    # It would be idle: it is never held.
    assert not ranks.engines[2].num_waiting
    drain(ranks, 2000)
    for engine in ranks.engines:
        assert engine.scheduler.get_request_counts() == (0, 0)


@pytest.mark.parametrize("most", [0, 64])
def test_blocks_that_come_back_late_stop_no_rank(most):
    """vllm-ascend#16315: preempted requests' blocks come back a step later, on all ranks at once.

    Each rank runs out of KV blocks while the other one is full; both get on all the same.
    """
    ranks = ranks_with(2, blocks=20, **{"policy.balance_hold_steps": str(most)})
    late = [0, 0]
    for engine in ranks.engines:
        engine.scheduler.defer_block_free = True
    fill(ranks)
    for _ in range(4000):
        if ranks.is_idle:
            break
        ranks.step()
        for rank, engine in enumerate(ranks.engines):
            late[rank] += bool(engine.scheduler.deferred_frees)
    assert ranks.is_idle
    assert all(late)
    assert all(engine.totals.preemptions for engine in ranks.engines)
    held = [engine.counters().get("limited_step:ranks", 0) for engine in ranks.engines]
    assert any(held) == bool(most)


class Silent:
    """An exchange that fails, as a library may."""

    def __init__(self, error):
        self._error = error

    def tell(self, load):
        raise self._error

    def hear(self):
        raise self._error


def test_a_broken_exchange_is_switched_off():
    ranks = ranks_with(2)
    for number, engine in enumerate(ranks.engines):
        engine.scheduler._parts._parts[1].exchange = Silent(OSError("no route"))
        engine.add(request(f"r{number}", 20, 20, 20), 0.0)
    drain(ranks, 200)
    assert ranks.engines[0].scheduler._parts.off == ["the balance of ranks"]


# The exchange between processes.


def parallel_config(port, rank, size=2):
    return SimpleNamespace(
        _coord_store_port=port,
        data_parallel_master_ip="127.0.0.1",
        data_parallel_rank=rank,
        data_parallel_size=size,
        data_parallel_size_local=size,
        enable_elastic_ep=False,
    )


def vllm_config(parallel, *, is_moe=True):
    return SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(is_moe=is_moe))


@pytest.fixture
def store():
    return create_tcp_store("127.0.0.1", 0, is_master=True, world_size=-1, wait_for_workers=False)


def test_ranks_meet_in_vllms_store_and_hear_each_other(store):
    joined = {}

    def join(rank):
        joined[rank] = join_ranks(vllm_config(parallel_config(store.port, rank, size=3)))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # vLLM 0.32 ends its store when all engines have started.
    loads = [RankLoad(1, 2, 3, 4, is_full=True), RankLoad(5), RankLoad()]
    heard, end_s = [], time.monotonic() + 30
    while time.monotonic() < end_s:
        for rank, load in enumerate(loads):
            joined[rank].tell(load)
        heard = [sorted(joined[rank].hear()) for rank in range(3)]
        if all(len(each) == 2 for each in heard):
            break
        time.sleep(0.01)
    assert heard == [sorted(loads[:rank] + loads[rank + 1 :]) for rank in range(3)]


def test_a_rank_without_others_starts_alone(store, monkeypatch):
    """One rank has no plug-in: the others say so after a while, and start."""
    monkeypatch.setattr(rank_exchange, "_MEETING", timedelta(seconds=1))
    assert "did not meet" in join_ranks(vllm_config(parallel_config(store.port, 0)))


def test_a_dead_store_stops_no_start(store, monkeypatch):
    monkeypatch.setattr(rank_exchange, "_MEETING", timedelta(seconds=1))
    port = store.port
    del store
    assert isinstance(join_ranks(vllm_config(parallel_config(port, 0))), str)


def test_an_address_that_cannot_be_bound_stops_no_start(store, monkeypatch):
    """As in a container whose address is another one outside."""
    monkeypatch.setattr(rank_exchange, "get_ip", lambda: "203.0.113.7")
    parallel = parallel_config(store.port, 0)
    parallel.data_parallel_size_local = 1
    assert "did not meet" in join_ranks(vllm_config(parallel))


@pytest.mark.parametrize(
    ("changed", "is_moe", "reason"),
    [
        ({"data_parallel_size": 1}, True, None),
        ({}, False, None),
        ({"_coord_store_port": 0}, True, "no store"),
        ({"enable_elastic_ep": True}, True, "elastic"),
    ],
    ids=["one rank", "dense", "offline", "elastic"],
)
def test_ranks_that_do_not_step_together_do_not_meet(changed, is_moe, reason):
    parallel = SimpleNamespace(**vars(parallel_config(1, 0)) | changed)
    joined = join_ranks(vllm_config(parallel, is_moe=is_moe))
    assert joined is None if reason is None else reason in joined


def test_a_rank_that_fell_silent_counts_no_more(monkeypatch):
    one, other = (ZmqExchange(rank, "127.0.0.1") for rank in range(2))
    other.connect({0: one.endpoint})
    end_s = time.monotonic() + 30
    while not other.hear() and time.monotonic() < end_s:
        one.tell(RankLoad(answering=3))
        time.sleep(0.01)
    one.tell(RankLoad(answering=3))
    assert list(other.hear()) == [RankLoad(answering=3)]
    monkeypatch.setattr(rank_exchange, "_STALE_S", -1.0)
    assert not other.hear()


# The front.


def front_of(is_on, monkeypatch, number=2):
    class Unconnected(DPLBAsyncMPClient):
        def __init__(self):
            """Opens no socket."""

    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__BALANCE", str(is_on).lower())
    client = build_balancing_client(Unconnected)
    front = client()
    vars(front).update(vars(make_front(client, number)))
    return front


def ask(name, rank=None):
    return SimpleNamespace(
        request_id=name, data_parallel_rank=rank, pooling_params=None, resumable=False
    )


def receive(front, finished=(), **phases):
    outputs = [
        EngineCoreOutput(name, [1], kv_transfer_params={KEY: list(PhaseChange(thinks, 0, 0))})
        for name, thinks in phases.items()
    ]
    answer = EngineCoreOutputs(outputs=outputs, finished_requests=set(finished) or None)
    asyncio.run(type(front).process_engine_outputs(front, answer))
    return answer


def place(front, *names):
    return [front.core_engines.index(front.get_core_engine_for_request(ask(n))) for n in names]


def test_a_request_goes_to_the_rank_whose_requests_end_sooner(monkeypatch):
    """Two ranks with two requests each: on one of them they think."""
    for is_on, expected in ((False, {0, 1}), (True, {1})):
        front = front_of(is_on, monkeypatch)
        for number, rank in enumerate((0, 1, 0, 1)):
            front.get_core_engine_for_request(ask(f"r{number}", rank))
        receive(front, r0=True, r2=True, r1=False, r3=False)
        front.lb_engines = [[0, 2, 0.1], [0, 2, 0.1]]
        # Published counts are vLLM's business; they are as they were, but for the chosen rank.
        [first] = place(front, "new")
        assert [row[1:] for row in front.lb_engines] == [[2, 0.1], [2, 0.1]]
        assert sum(row[0] for row in front.lb_engines) == 1
        front.lb_engines = [[0, 2, 0.1], [0, 2, 0.1]]
        assert {first, *place(front, "newer")} == expected


@pytest.mark.parametrize("is_on", [False, True])
def test_placement_is_vllms_while_nobody_thinks(monkeypatch, is_on):
    rng = random.Random(3)
    stock, ours = make_front(DPLBAsyncMPClient, 4), front_of(is_on, monkeypatch, number=4)
    for number in range(300):
        name = f"r{number}"
        assert stock.get_core_engine_for_request(ask(name)) == ours.get_core_engine_for_request(
            ask(name)
        )
        if rng.random() < 0.5:
            rows = [[rng.randrange(9), rng.randrange(9), rng.random()] for _ in range(4)]
            stock.lb_engines, ours.lb_engines = ([list(row) for row in rows] for _ in range(2))
        gone = [f"r{rng.randrange(number + 1)}"]
        receive(stock, finished=gone)
        receive(ours, finished=gone, **{name: False})
        assert stock.engine_inflight == ours.engine_inflight


def test_outputs_keep_their_phase_changes(monkeypatch):
    """The output processor reads them afterwards."""
    front = front_of(True, monkeypatch)
    place(front, "r0")
    answer = receive(front, r0=True)
    assert KEY in answer.outputs[0].kv_transfer_params


def test_requests_that_ended_leave_nothing(monkeypatch):
    front = front_of(True, monkeypatch)
    for number in range(20):
        place(front, f"r{number}")
        receive(front, **{f"r{number}": True})
    receive(front, finished=[f"r{number}" for number in range(20)])
    assert not len(front._placed)
    assert all(front._placed.beyond_count(engine) < 1e-9 for engine in front.core_engines)
