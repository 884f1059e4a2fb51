"""Ranks in lock step on vLLM's real schedulers."""

import random
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from vllm.distributed.utils import create_tcp_store
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from meridian_patch.bench.arms import override
from meridian_patch.engine.scheduler import rank_exchange
from meridian_patch.engine.scheduler.rank_exchange import ZmqExchange, join_ranks
from meridian_patch.replay.ranks import LockStepRanks
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
    return LockStepRanks(number, arm, blocks, seconds, TEMPLATE, limits)


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

    Prompts are computed in pieces, so the play takes a bounded number of steps more.
    """
    steps = {}
    for is_on in (False, True):
        rng = random.Random(seed)
        ranks = ranks_with(3, blocks=60, **{"policy.balance": str(is_on).lower()})
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
        steps[is_on] = ranks.steps
        for engine in ranks.engines:
            assert engine.scheduler.get_request_counts() == (0, 0)
            assert not engine.counters().get("fallback:exception")
    assert steps[True] < 3 * steps[False] + 200


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


def fill(ranks):
    """All ranks at their cap, and as many requests again that wait on each."""
    for rank, engine in enumerate(ranks.engines):
        for number in range(2 * LIMITS.max_num_seqs):
            think = (0, 30, 110, 170)[number % 4] + 20 * rank
            engine.add(request(f"f{rank}-{number}", 20, think, 40), ranks.now)


def test_ranks_that_are_all_full_go_on_when_clients_leave():
    """All at their cap, then all requests of one rank are aborted, and half of the others'."""
    ranks = ranks_with(3)
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
    assert not ranks.engines[2].num_waiting
    drain(ranks, 2000)
    for engine in ranks.engines:
        assert engine.scheduler.get_request_counts() == (0, 0)


def test_blocks_that_come_back_late_stop_no_rank():
    """vllm-ascend#16315: preempted requests' blocks come back a step later, on all ranks at once.

    Each rank runs out of KV blocks while the other one is full; both get on all the same.
    """
    ranks = ranks_with(2, blocks=20)
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


class Silent:
    """An exchange that fails, as a library may."""

    def __init__(self, error):
        self._error = error

    def tell(self, answering):
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
    answering, heard, end_s = [4, 5, 0], [], time.monotonic() + 30
    while time.monotonic() < end_s and heard != [5, 4, 9]:
        for rank, count in enumerate(answering):
            joined[rank].tell(count)
        heard = [joined[rank].hear() for rank in range(3)]
        time.sleep(0.01)
    assert heard == [5, 4, 9]


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


@pytest.fixture
def met():
    """Two exchanges, of which the second one has a number from the first one."""
    one, other = (ZmqExchange(rank, "127.0.0.1") for rank in range(2))
    other.connect({0: one.endpoint})
    end_s = time.monotonic() + 30
    while not other.hear() and time.monotonic() < end_s:
        one.tell(3)
        time.sleep(0.01)
    return one, other


def test_a_rank_that_fell_silent_counts_no_more(met, monkeypatch):
    one, other = met
    one.tell(3)
    assert other.hear() == 3
    monkeypatch.setattr(rank_exchange, "_STALE_S", -1.0)
    assert not other.hear()


def test_a_rank_that_took_no_step_reads_the_last_number_alone(met):
    """More than a queue of ZeroMQ holds: the last ones would be dropped, and old ones read."""
    one, other = met
    for _ in range(200_000):
        one.tell(3)
    time.sleep(0.5)
    one.tell(7)
    time.sleep(0.5)
    assert other.hear() == 7
