"""Each arm takes the path that it claims, and loses no request."""

import random
from functools import partial

import numpy as np
import pytest
from arms.base import build_arm
from arms.facts import Facts, Lengths
from arms.registry import ARMS

from meridian_patch.replay.cost import load_cost
from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.player import play
from meridian_patch.replay.scheduler import read_template_tokens
from meridian_patch.replay.types import ReplayArm, ReplayRequest

TEMPLATE = read_template_tokens()
COST = load_cost("h100-8b-dense")
BLOCKS = 60  # 960 tokens


def request(name: str, prompt: int, think: int, answer: int) -> ReplayRequest:
    """A request with tokens of its own, so that no prefix is shared."""
    draw = random.Random(name)

    def ids(count: int) -> list[int]:
        return [draw.randrange(TEMPLATE.content_ids) for _ in range(count)]

    thought = [*ids(think), TEMPLATE.think_end] if think else []
    start = TEMPLATE.think_start if think else TEMPLATE.think_end
    output = [*thought, *ids(answer), TEMPLATE.turn_end]
    return ReplayRequest(name, [*ids(prompt), start], output, len(thought))


class Listed:
    """Requests at given times."""

    def __init__(self, arrivals: list[tuple[float, ReplayRequest]]) -> None:
        self.arrivals = arrivals

    def start(self) -> list[tuple[float, ReplayRequest]]:
        return self.arrivals

    def follow(self, record):
        return ()


def engine(name: str, requests: list[ReplayRequest], blocks: int = BLOCKS, **settings):
    lengths = {
        each.request_id: Lengths(each.answer_start, len(each.output) - each.answer_start)
        for each in requests
    }
    facts = Facts(COST.step_seconds, 8192, TEMPLATE.think_end, 1, lengths)
    build = partial(build_arm, mixin=ARMS[name].mixin, facts=facts, settings=settings)
    arm = ReplayArm(name, build_scheduler=build)
    return ReplayEngine(arm, blocks, COST.step_seconds, TEMPLATE)


def run(name: str, arrivals: list[tuple[float, ReplayRequest]], blocks: int = BLOCKS, **settings):
    """Play to the end; the engine and the records by id."""
    played = engine(name, [each for _, each in arrivals], blocks, **settings)
    records = play(played, Listed(arrivals))
    return played, {record.request.request_id: record for record in records}


def crowd(seed: int = 3) -> list[tuple[float, ReplayRequest]]:
    """More than the pool holds, with requests that do not think and long prompts among them."""
    draw = random.Random(seed)
    sizes = (5, 60, 400), (0, 20, 150, 450), (1, 30, 90)
    return [
        (0.05 * number, request(f"{seed}-{number}", *map(draw.choice, sizes)))
        for number in range(40)
    ]


@pytest.mark.parametrize("name", sorted(ARMS))
def test_every_request_ends_with_its_tokens(name: str) -> None:
    arrivals = crowd()
    played, records = run(name, arrivals)
    assert played.is_idle
    assert records.keys() == {each.request_id for _, each in arrivals}
    for _, each in arrivals:
        record = records[each.request_id]
        assert len(record.token_s) == len(each.output)
        assert record.finish_reason == "stop"
    scheduler = played.scheduler
    assert not scheduler.running and not scheduler.waiting and not scheduler.answering
    assert scheduler.max_num_scheduled_tokens == 8192


@pytest.mark.parametrize("name", sorted(ARMS))
def test_the_pool_is_whole_afterwards(name: str) -> None:
    played, _ = run(name, crowd(4))
    assert played.scheduler.kv_cache_manager.usage == 0


LONG, SHORT = request("1-0", 100, 700, 5), request("1-1", 300, 30, 5)


@pytest.mark.parametrize("name", ["mlfq", "mlfq-answers", "pascal", "pascal-answers"])
def test_attained_service_makes_room_for_a_newcomer(name: str) -> None:
    """The pool is nearly full with a long thinker when a short one arrives."""
    settings = {"first_level": 64} if name.startswith("mlfq") else {"quantum": 64}
    played, records = run(name, [(0.0, LONG), (4.3, SHORT)], **settings)
    assert played.scheduler.num_displaced == 1
    assert records["1-1"].token_s[-1] < records["1-0"].token_s[-1]


@pytest.mark.parametrize("name", ["fcfs-tuned", "sarathi", "answers-first", "vtc", "qoserve"])
def test_other_arms_displace_none(name: str) -> None:
    played, _ = run(name, [(0.0, LONG), (4.6, SHORT)])
    assert played.scheduler.num_displaced == 0


@pytest.mark.parametrize("name", ["srpt", "volume", "ltr", "ltr-answers"])
def test_the_shortest_goes_first(name: str) -> None:
    """Two wait while a third fills the pool; the later and shorter one is admitted first."""
    first = request("2-0", 700, 40, 10)
    middle, shortest = request("2-1", 500, 200, 5), request("2-2", 500, 60, 5)
    settings = {"sigma": 0.0} if name.startswith("ltr") else {}
    _, records = run(name, [(0.0, first), (0.1, middle), (0.2, shortest)], **settings)
    assert records["2-2"].admitted_s < records["2-1"].admitted_s


def test_srpt_compares_what_is_left() -> None:
    """A thinker that has nearly ended is not displaced for one that is shorter as a whole."""
    nearly = request("3-0", 100, 600, 5)
    played, _ = run("srpt", [(0.0, nearly), (4.5, request("3-1", 350, 100, 5))])
    assert played.scheduler.num_displaced == 0


@pytest.mark.parametrize("name", [name for name in sorted(ARMS) if ARMS[name].mixin.answers_first])
def test_answers_are_never_preempted(name: str) -> None:
    _, records = run(name, crowd(5), blocks=200)
    assert any(record.preemptions.total() for record in records.values())
    assert not any(record.preemptions["answer"] for record in records.values())


def test_the_cut_keeps_a_step_short_beside_an_answer() -> None:
    answering, prompt = request("4-0", 10, 5, 200), request("4-1", 6_000, 5, 5)
    arrivals = [(0.0, answering), (0.2, prompt)]
    gaps = {}
    for name, settings in (("answers-first", {}), ("sarathi", {"chunk": 8192})):
        _, records = run(name, arrivals, blocks=500, **settings)
        gaps[name] = max(np.diff(records["4-0"].token_s))
    decode_s = COST.weights_s + COST.fixed_s
    assert gaps["answers-first"] < 1.3 * decode_s
    assert gaps["sarathi"] > 10 * decode_s


def test_sarathi_fills_its_chunk() -> None:
    played, works = engine("sarathi", [LONG, SHORT], 200, chunk=32), []
    play(played, Listed([(0.0, LONG), (0.0, SHORT)]), lambda work, _: works.append(work))
    assert max(work.prefill_tokens + work.decode_seqs for work in works) == 32


def test_fcfs_tuned_bounds_one_prompt() -> None:
    played, works = engine("fcfs-tuned", [LONG, SHORT], 200, budget=64, threshold=16), []
    play(played, Listed([(0.0, LONG), (0.0, SHORT)]), lambda work, _: works.append(work))
    assert max(work.prefill_tokens for work in works) == 32  # two prompts
    assert played.scheduler.vllm_config.scheduler_config.long_prefill_token_threshold == 0


def test_mlfq_promotes_whoever_has_waited() -> None:
    """Short thinkers keep coming; with aging the long one ends before the last of them."""
    arrivals = [(0.0, LONG)]
    arrivals += [(4.0 + 0.2 * n, request(f"5-{n}", 300, 60, 5)) for n in range(60)]
    ends = {}
    for aging_s in (2.0, None):
        _, records = run("mlfq-answers", arrivals, aging_s=aging_s, first_level=64)
        ends[aging_s] = records["1-0"].token_s[-1]
    assert ends[2.0] < ends[None]


def test_pascal_demotes_a_long_thinker() -> None:
    played = engine("pascal", [], demoted_tokens=100)
    played.add(LONG, 0.0)
    seen = set()
    while (long := played.scheduler.requests["1-0"]).num_output_tokens <= 102:
        played.step()
        seen.add((long.num_output_tokens > 100, played.scheduler.rank(long)[0]))
    assert seen == {(False, 0), (True, 1)}


def test_pascal_keeps_an_answer_ahead_of_its_reader_behind_thinkers() -> None:
    played = engine("pascal", [], buffer_tokens=5, quantum=30)
    played.add(request("6-0", 10, 3, 60), 0.0)
    ranks = []
    while played.scheduler.requests["6-0"].num_output_tokens < 60:
        played.step()
        ranks.append(played.scheduler.rank(played.scheduler.requests["6-0"]))
    assert (-1,) in ranks
    assert ranks[-1][0] == 1


def test_vtc_admits_the_client_with_the_least_service() -> None:
    """Two clients: one that has been served, and one that has not."""
    names = [f"7{number}-0" for number in range(50)]
    played = engine("vtc", [], blocks=30, clients=2)
    scheduler = played.scheduler
    played.add(request(names[0], 200, 100, 5), 0.0)
    for _ in range(20):
        played.step()
    served = scheduler._client[names[0]]
    for name in names[1:]:
        played.add(request(name, 300, 20, 5), played.now)
    # A client that comes back starts at the least counter of those that wait.
    scheduler.service[1 - served] = 0.0
    played.step()
    clients = [scheduler._client[one.request_id] for one in scheduler.waiting]
    assert set(clients) == {0, 1}
    assert clients == sorted(clients, key=lambda client: client == served)


def test_qoserve_puts_the_smaller_of_two_prompts_first() -> None:
    big, small = request("8-0", 700, 20, 5), request("8-1", 100, 20, 5)
    filler = request("8-2", 600, 20, 60)
    _, records = run("qoserve", [(0.0, filler), (0.01, big), (0.02, small)], alpha_s=0.01)
    assert records["8-1"].admitted_s < records["8-0"].admitted_s


def test_andes_preempts_for_more_quality() -> None:
    """Newcomers that read nothing yet gain more than one that is far ahead of its reader."""
    ahead = request("9-0", 300, 600, 5)
    arrivals = [(0.0, ahead)] + [(2.5, request(f"9-{n}", 100, 40, 5)) for n in range(1, 6)]
    played, records = run("andes", arrivals, usage=0.3, first_token_s=0.1, pinned_tokens=10_000)
    assert played.scheduler.num_displaced > 0
    assert records["9-0"].preemptions.total() == 1


def test_ltr_errs_by_the_same_factor_whatever_the_order() -> None:
    one = engine("ltr", [LONG, SHORT])
    other = engine("ltr", [LONG, SHORT])
    for played, order in ((one, (LONG, SHORT)), (other, (SHORT, LONG))):
        for each in order:
            played.add(each, 0.0)
    assert one.scheduler._predicted == other.scheduler._predicted
