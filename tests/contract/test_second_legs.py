"""Requests that leave at a ticket: what their client gets, whatever an answer server does.

The answer server is scripted; outputs are vLLM's own structures, and what comes home is played.
"""

import asyncio
import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from leg_driver import (
    ANSWER,
    FAULTS,
    PROMPT,
    SAME,
    THOUGHT,
    TICKET,
    AnswerServer,
    Home,
    make_request,
    play,
)
from tier_driver import logged
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

from meridian_patch.engine.handoff import answer_servers
from meridian_patch.engine.handoff.answer_servers import AnswerServers
from meridian_patch.engine.handoff.engine_client import _drained
from meridian_patch.engine.wire import ANSWERED, RELEASE
from meridian_patch.handoff.ticket import OFFER


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from([each for each in FAULTS if each != "silent"]), st.integers(0, 4),
       st.integers(1, 4))  # fmt: skip
def test_no_token_is_lost_doubled_or_reordered(fault, after, chunk):
    """At whatever chunk an answer server fails, and in whatever way."""
    server = AnswerServer(fault, after, chunk)
    if fault == "other":
        server.same = SAME._replace(block_size="32")

    async def script(home, server):
        home.think()
        await home.until_finished()
        await asyncio.sleep(0.02)
        assert home.ids() == THOUGHT + ANSWER
        ended = [each for each in home.delivered if each.finished]
        assert len(ended) == 1
        assert ended[0].finish_reason == FinishReason.STOP
        assert {each.request_id for each in home.delivered} == {"r"}
        assert home.legs.num_away == 0
        assert not home.legs._moving
        assert not home.legs._home_names
        outcomes = home.outcomes()
        assert outcomes == ({"moved": 1} if not home.added else {"answered_at_home": 1})
        if fault == "none":
            assert outcomes == {"moved": 1}

    urls = ["http://127.0.0.1:9"] if fault == "refused" else None
    play(server, script, urls)


def test_a_silent_answer_server_is_lost_after_its_time():
    async def script(home, server):
        home.think()
        await home.until_finished(limit_s=5)
        assert home.ids() == THOUGHT + ANSWER
        assert home.outcomes() == {"answered_at_home": 1}

    play(AnswerServer("silent", 1), script)


def test_what_an_answer_server_is_asked():
    """Token ids, limits that are left, and nothing that the think server does itself."""

    async def script(home, server):
        extra = {"meridian_max_think_tokens": 50, "kv_transfer_params": {"remote_host": "evil"}}
        given = home.think(max_tokens=40, min_tokens=6, stop=["x"], extra_args=extra)
        assert given.sampling_params.extra_args["kv_transfer_params"] == dict(OFFER)
        await home.until_finished()
        (body,) = server.bodies
        params = body["sampling_params"]
        assert body["token_ids"] == PROMPT + THOUGHT
        assert (params["max_tokens"], params["min_tokens"]) == (36, 2)
        assert params["extra_args"] == {"meridian_max_think_tokens": 46}
        assert not {"stop", "n", "_all_stop_token_ids"} & set(params)
        assert body["model"] == "m"
        assert body["reasoning_ended"] is True
        assert body["kv_transfer_params"]["remote_request_id"] == "kept"

    play(AnswerServer(), script)


def test_one_that_comes_home_has_another_id_and_goes_on():
    """Its blocks are let go only if no answer server was given the ticket."""

    async def script(home, server):
        grammar = StructuredOutputsParams(regex="a+")
        home.think(max_tokens=40, structured_outputs=grammar)
        await home.until_finished()
        (again,) = home.added
        assert again.request_id != "r"
        assert again.prompt_token_ids == PROMPT + THOUGHT + ANSWER[:2]
        assert again.sampling_params.max_tokens == 34
        assert again.reasoning_ended
        assert again.sampling_params.extra_args["kv_transfer_params"] == {ANSWERED: 2}
        home.servers._servers[0].failed("rests")
        home.think("s")
        await home.until_finished("s")
        released = home.added[1].sampling_params.extra_args["kv_transfer_params"]
        assert released == {RELEASE: "kept"}

    play(AnswerServer("cut", 1), script)


def test_an_abort_reaches_the_request_wherever_it_is():
    async def script(home, server):
        home.legs.offered(make_request("thinks"))
        assert home.legs.aborted(["thinks", "unknown"]) == ["thinks", "unknown"]
        home.think("away")
        await server.is_asked.wait()
        assert home.legs.aborted(["away"]) == []
        await asyncio.sleep(0.1)
        assert server.is_left
        assert home.outcomes() == {"aborted": 1}
        assert not home.legs._moving

    play(AnswerServer("silent", 1), script)


def test_legs_end_with_their_server():
    async def script(home, server):
        home.think()
        await server.is_asked.wait()
        await asyncio.to_thread(home.legs.end)
        await home.until_finished()
        await asyncio.sleep(0.1)
        assert home.delivered[-1].finish_reason == FinishReason.ABORT
        assert server.is_left

    play(AnswerServer("silent", 1), script)


@pytest.mark.parametrize(
    ("reason", "params"),
    [
        ("seed", {"seed": 1, "temperature": 0.5}),
        ("penalties", {"presence_penalty": 0.5}),
        ("penalties", {"frequency_penalty": 0.5}),
        ("prompt_logprobs", {"prompt_logprobs": 1}),
        ("many_logprobs", {"logprobs": -1}),
    ],
)
def test_what_cannot_travel_is_offered_to_none(reason, params):
    async def script(home, server):
        evil = {"kv_transfer_params": {"remote_host": "evil"}}
        given = home.legs.offered(make_request(**params, extra_args=evil))
        assert given.sampling_params.extra_args is None
        assert home.outcomes() == {reason: 1}

    play(AnswerServer(), script)


@pytest.mark.parametrize(
    ("field", "theirs", "said"),
    [
        ("version", "0.1", "its version is '0.1'"),
        ("block_size", "32", "its block_size is '32'"),
        ("cache_dtype", "fp8", "its cache_dtype is 'fp8'"),
        ("length", 2048, "its max_model_len is 2048"),
        ("models", ("large",), "its model is 'large', expected 'tiny' as at the think engine"),
    ],
)
def test_an_engine_that_differs_rests_and_is_named(field, theirs, said, caplog):
    async def script(home, server):
        home.think()
        await home.until_finished()
        assert not server.bodies
        assert home.servers.pick() is None

    with logged(caplog):
        play(AnswerServer(same=SAME._replace(**{field: theirs})), script)
    assert said in caplog.text


def test_requests_that_do_not_move_pass_as_they_are():
    outputs = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id="x", new_token_ids=[1])])
    before = outputs.outputs
    home = Home(["http://127.0.0.1:9"])
    home.legs.take(outputs)
    assert outputs.outputs is before


def test_many_that_fail_alike_wait_once_and_count_once(caplog):
    """No request waits for the check of another one, and the rest is that of one failure."""

    async def script(home, server):
        for number in range(8):
            home.think(f"r{number}")
        began_s = asyncio.get_running_loop().time()
        for number in range(8):
            await home.until_finished(f"r{number}")
        assert asyncio.get_running_loop().time() - began_s < 2
        assert home.servers._servers[0].num_failures == 1
        assert all(each.sampling_params.extra_args for each in home.added)

    with logged(caplog):
        play(AnswerServer(), script, ["http://127.0.0.1:9"])
    assert "rests for 1 s" in caplog.text


@pytest.mark.parametrize(
    ("fault", "said"), [("http", "HTTP 400 from"), ("error", "dead"), ("cut", "rests for 1 s")]
)
def test_why_a_request_came_home_is_in_the_log_once(fault, said, caplog):
    async def script(home, server):
        for name in ("r", "s"):
            home.think(name)
            await home.until_finished(name)

    with logged(caplog):
        play(AnswerServer(fault, 1), script)
    assert len({each for each in caplog.messages if said in each}) == 1


def test_a_default_limit_of_tokens_travels():
    """msgspec leaves out what has its default."""

    async def script(home, server):
        home.think(max_tokens=16)
        await home.until_finished()
        assert home.outcomes() == {"moved": 1}
        assert server.bodies[0]["sampling_params"]["max_tokens"] == 12

    play(AnswerServer(), script)


def test_a_request_that_is_added_to_be_ended_is_not_kept():
    home = Home(["http://127.0.0.1:9"])
    request = make_request(extra_args={"ec_transfer_params": {"host": "evil"}})
    request.abort_immediately = True
    assert home.legs.offered(request).sampling_params.extra_args is None
    assert home.legs.num_away == 0


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_twenty_thousand_requests_lose_nothing(monkeypatch):
    """Sixty at a time, each with a fault of its own, a tenth of them aborted by their clients."""
    monkeypatch.setattr(answer_servers, "_FIRST_REST_S", 0.0)
    monkeypatch.setattr(AnswerServers, "_check", checked)
    rng = random.Random(5)
    faults = [each for each in FAULTS if each not in {"silent", "refused", "other"}]

    async def one(home, server, number, places):
        name = f"r{number}"
        async with places:
            server.faults[name] = rng.choice(faults), rng.randrange(5), rng.randrange(1, 5)
            home.think(name)
            if number % 10 == 0:
                await asyncio.sleep(rng.random() / 100)
                home.legs.aborted([name])
                return None
            await home.until_finished(name)
            return name

    async def script(home, server):
        places = asyncio.Semaphore(60)
        work = (one(home, server, number, places) for number in range(20_000))
        names = [name for name in await asyncio.gather(*work) if name]
        await asyncio.sleep(0.1)
        said, ended = defaultdict(list), Counter()
        for each in home.delivered:
            said[each.request_id] += each.new_token_ids
            ended[each.request_id] += each.finished
        assert len(names) == 18_000
        assert all(said[name] == THOUGHT + ANSWER for name in names)
        assert all(ended[name] == 1 for name in names)
        assert not home.legs._moving
        assert not home.legs._home_names
        outcomes = home.outcomes()
        print(outcomes)
        assert outcomes["moved"] > 1000
        assert outcomes["answered_at_home"] > 5000

    play(ManyFaults(), script)


async def checked(_servers, _server):
    return "m"


class ManyFaults(AnswerServer):
    """Fails each request in its own way."""

    def __init__(self):
        super().__init__()
        self.faults = {}

    async def generate(self, request):
        name = (await request.json()).get("request_id")
        self.bodies.clear()
        fault, after, chunk = self.faults[name]
        return await AnswerServer(fault, after, chunk).play(request)


def test_a_thought_that_ends_after_the_server_was_stopped_is_ended_too():
    """EngineCore finishes its step, and no engine would go on with the request."""

    async def script(home, server):
        home.think("a")
        await server.is_asked.wait()
        late = make_request("late")
        home.legs.offered(late)
        home.legs.end()
        home.engine_says("late", THOUGHT)
        home.engine_says("late", [], ticket=TICKET)
        for name in ("a", "late"):
            await home.until_finished(name)
        assert home.legs.num_away == 0
        assert not home.added
        ends = {each.request_id: each.finish_reason for each in home.delivered if each.finished}
        assert ends["late"] == FinishReason.ABORT

    play(AnswerServer(fault="silent", after=1), script)


def test_an_engine_that_drains_rests_and_others_are_asked():
    async def script(home, server):
        other = AnswerServer()
        home = Home([await server.start(), await other.start()])
        home.think("first")
        await home.until_finished("first")
        server.is_draining = True
        for number in range(4):
            home.think(f"r{number}")
            await home.until_finished(f"r{number}")
        assert home.outcomes() == {"moved": 4, "answered_at_home": 1}
        # Nor is it taken for an engine that serves when it has rested.
        home.servers._servers[0].rests_until_s = 0.0
        home.think("again")
        await home.until_finished("again")
        assert len(server.bodies) == 2
        await home.legs.close()
        await other.runner.cleanup()

    play(AnswerServer(), script)


def test_an_engine_is_checked_again_after_a_quiet_time():
    """By then it may be another one."""

    async def script(home, server):
        for name in ("a", "b"):
            home.think(name)
            await home.until_finished(name)
        assert server.num_checks == 1
        home.servers._servers[0].asked_at_s -= 31
        home.think("c")
        await home.until_finished("c")
        assert server.num_checks == 2

    play(AnswerServer(), script)


def test_a_drain_waits_only_where_requests_can_still_end():
    """Not on the loop that they need, nor when their EngineCore is dead."""
    legs = SimpleNamespace(num_away=1, is_draining=False)
    client = SimpleNamespace(meridian_legs=legs, resources=SimpleNamespace(engine_dead=False))
    assert _drained(client, 0.2) == 0
    assert legs.is_draining

    async def on_the_loop():
        return _drained(client, 30.0)

    assert asyncio.run(on_the_loop()) == 30.0
    client.resources.engine_dead = True
    assert _drained(client, 30.0) > 29
