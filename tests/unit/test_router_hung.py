"""The router and an engine whose EngineCore hangs while its API server answers."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

from meridian_patch.router import pool
from meridian_patch.router.app import Router
from meridian_patch.router.command import engines_of
from meridian_patch.router.load import progress_from
from meridian_patch.router.silence import Silence

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "q"}], "stream": True}
HUNG_S = 0.3
PAGE = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:tool_call_parser_invocations_total{engine="0",model_name="m"} 3.0
process_cpu_seconds_total 1.5
"""


def chunk(token: int, **choice) -> dict:
    return {"id": "x", "choices": [{"index": 0, "delta": {}, "token_ids": [token]} | choice]}


BEGUN = {**chunk(10, delta={"role": "assistant", "content": "4"}), "prompt_token_ids": [1, 2]}
ENDED = chunk(11, delta={"content": "2"}, finish_reason="stop")


class Stream(httpx.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts


class Core:
    """An engine whose EngineCore can be stopped between two chunks of a stream.

    Args:
        chunks: of each response, ``None`` where the EngineCore stops the first time.
    """

    def __init__(self, *chunks: dict | None) -> None:
        self.chunks = chunks
        self.runs = asyncio.Event()
        self.runs.set()
        self.num_tokens = 0
        self.bodies: list[dict] = []
        self.exports, self.takes_questions, self.steps_unseen = True, True, False

    async def reply(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path == "/metrics":
            self.num_tokens += self.steps_unseen
            page = f'vllm:generation_tokens_total{{engine="0"}} {self.num_tokens}\n'
            return httpx.Response(200, text=page if self.exports else "")
        if path == "/v1/completions":
            if not self.takes_questions:
                return httpx.Response(401)
            await self.runs.wait()
            self.num_tokens += 1
            return httpx.Response(200, json={})
        if path == CHAT:
            self.bodies.append(json.loads(request.content))
            if self.bodies[-1].get("stream"):
                return httpx.Response(200, stream=Stream(self._parts()))
            said = b"".join([part async for part in self._parts()])
            return httpx.Response(200, json={"choices": [], "said": said.decode()})
        return httpx.Response(200)

    async def _parts(self) -> AsyncIterator[bytes]:
        for each in self.chunks:
            if each is None and len(self.bodies) == 1:
                self.runs.clear()
            await self.runs.wait()
            if each is not None:
                self.num_tokens += 1
                yield f"data: {json.dumps(each)}\n\n".encode()
        yield b"data: [DONE]\n\n"


class ByHost(httpx.AsyncBaseTransport):
    def __init__(self, cores: dict[str, Core]) -> None:
        self._cores = cores

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return await self._cores[request.url.host].reply(request)


@pytest.fixture(autouse=True)
def often(monkeypatch):
    monkeypatch.setattr(pool, "POLL_S", 0.03)


@asynccontextmanager
async def routed(cores: dict[str, Core], answer: tuple[str, ...] = (), hung_s: float = HUNG_S):
    """A client of a router; the first engine is the one with the least load."""
    think = [f"http://{name}" for name in cores if name not in answer]
    engines = engines_of(think, [f"http://{name}" for name in answer])
    router = Router(engines, 0.1, transport=ByHost(cores), hung_after_s=hung_s)
    app = router.app()
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:
            yield client, router


async def until(condition, limit_s: float = 3.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.01)


def text(response: httpx.Response) -> str:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    deltas = [c["delta"] for each in map(json.loads, lines) for c in each.get("choices", ())]
    return "".join(delta.get("content") or "" for delta in deltas)


def states(router: Router) -> dict[str, float]:
    samples = router.metrics.page(router.pool.engines).decode().splitlines()
    found = [line for line in samples if line.startswith('meridian_route_engines{role="think"')]
    return {line.split('state="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_the_rule() -> None:
    """Half of the limit: ask; all of it: hung, until there is a sign of life."""
    silence = Silence()
    silence.report(("a 1",), 0.0, is_waiting=False)
    assert silence.verdict(99.0, 10.0) == "fine", "no request waits"
    silence.begin(100.0)
    silence.begin(104.0)
    assert silence.verdict(104.9, 10.0) == "fine"
    assert silence.verdict(105.0, 10.0) == "ask"
    assert silence.verdict(110.0, 10.0) == "hung"
    assert silence.verdict(110.0, 0.0) == "fine", "never"
    silence.heard(110.0, is_waiting=True)
    assert silence.verdict(114.0, 10.0) == "fine"
    silence.report((), 119.0, is_waiting=True)
    silence.report(("a 1",), 119.0, is_waiting=True)
    assert silence.verdict(120.0, 10.0) == "hung", "a page that was not read is no sign"
    silence.report(("a 2",), 119.0, is_waiting=True)
    assert silence.verdict(120.0, 10.0) == "fine"
    silence.settle()
    assert silence.verdict(999.0, 10.0) == "fine"


def test_an_engine_that_reports_no_steps_is_never_judged() -> None:
    silence = Silence()
    silence.report((), 0.0, is_waiting=False)
    silence.begin(0.0)
    assert silence.verdict(999.0, 10.0) == "fine"


@pytest.mark.parametrize(
    ("before", "after", "moves"),
    (
        ("_total{engine", "_total{engine", False),
        (" 7.0", " 8.0", True),
        (" 0.25", " 0.26", True),
        (" 3.0", " 4.0", False),
        (" 1.5", " 1.6", False),
    ),
    ids=("nothing", "a token", "a piece of a prompt", "the API server", "the process"),
)
def test_what_counts_as_a_step(before: str, after: str, moves: bool) -> None:
    assert len(progress_from(PAGE)) == 2
    assert (progress_from(PAGE) != progress_from(PAGE.replace(before, after))) is moves


def test_a_request_that_got_nothing_goes_to_another_engine() -> None:
    async def run() -> None:
        hangs, other = Core(None, BEGUN, ENDED), Core(BEGUN, ENDED)
        async with routed({"a": hangs, "c": other}) as (client, router):
            first, _ = router.pool.engines
            response = await client.post(CHAT, json=BODY)
            assert text(response) == "42"
            assert (len(hangs.bodies), len(other.bodies)) == (1, 1)
            assert states(router) == {"healthy": 1, "hung": 1, "down": 0}
            await asyncio.sleep(2 * HUNG_S)
            assert not first.is_healthy, "its health checks succeed, but it is still stopped"
            hangs.runs.set()
            await until(lambda: first.is_healthy)
            assert states(router) == {"healthy": 2, "hung": 0, "down": 0}

    asyncio.run(run())


def test_a_whole_response_too() -> None:
    async def run() -> None:
        hangs, other = Core(None, BEGUN, ENDED), Core(BEGUN, ENDED)
        async with routed({"a": hangs, "c": other}) as (client, _):
            response = await client.post(CHAT, json=BODY | {"stream": False})
            assert response.json()["said"]
            assert (len(hangs.bodies), len(other.bodies)) == (1, 1)

    asyncio.run(run())


def test_a_stream_that_has_begun_is_resumed() -> None:
    async def run() -> None:
        hangs, other = Core(BEGUN, None, ENDED), Core(ENDED)
        async with routed({"a": hangs, "c": other}) as (client, _):
            assert text(await client.post(CHAT, json=BODY)) == "42"
            assert other.bodies[0]["kv_transfer_params"]

    asyncio.run(run())


def test_what_no_other_engine_can_continue_is_kept() -> None:
    """It ends well once the engine goes on; given up, it would be an error."""

    async def run() -> None:
        hangs, other = Core(BEGUN, None, ENDED), Core(ENDED)
        async with routed({"a": hangs, "c": other}) as (client, router):
            asked = asyncio.create_task(client.post(CHAT, json=BODY | {"stop": ["x"]}))
            await until(lambda: states(router)["hung"] == 1)
            await asyncio.sleep(HUNG_S)
            hangs.runs.set()
            assert text(await asked) == "42"
            assert not other.bodies

    asyncio.run(run())


@pytest.mark.parametrize("sign", ["steps", "question", "never", "no metrics", "last"])
def test_a_slow_engine_is_not_taken_for_a_hung_one(sign: str) -> None:
    """It makes steps, or answers a question of one token: only its API server is slow."""

    async def run() -> None:
        slow, other = Core(None, BEGUN, ENDED), Core(BEGUN, ENDED)
        slow.steps_unseen, slow.exports = sign == "steps", sign != "no metrics"
        cores = {"a": slow} if sign == "last" else {"a": slow, "c": other}
        async with routed(cores, hung_s=0 if sign == "never" else HUNG_S) as (client, router):
            asked = asyncio.create_task(client.post(CHAT, json=BODY))
            await until(lambda: slow.bodies)
            if sign == "question":
                core_runs, slow.runs = slow.runs, asyncio.Event()
                slow.runs.set()
            await asyncio.sleep(3 * HUNG_S)
            assert states(router)["hung"] == 0
            if sign == "question":
                assert slow.num_tokens, "it was asked"
                slow.runs = core_runs
            slow.runs.set()
            assert text(await asked) == "42"
            assert not other.bodies

    asyncio.run(run())


def test_an_engine_that_takes_no_questions_is_tried_again() -> None:
    async def run() -> None:
        hangs, other = Core(None, BEGUN, ENDED), Core(BEGUN, ENDED)
        hangs.takes_questions = False
        async with routed({"a": hangs, "c": other}) as (client, router):
            assert text(await client.post(CHAT, json=BODY)) == "42"
            first, _ = router.pool.engines
            await until(lambda: first.is_healthy)

    asyncio.run(run())


def test_waits_that_end_by_their_own_limit_count_too() -> None:
    """A hand-off waits for an answer engine for less than it takes to find that it hangs."""

    async def run() -> None:
        hangs = Core(None)
        hangs.runs.clear()
        async with routed({"a": Core(), "b": hangs}, answer=("b",)) as (_, router):
            _, answer = router.pool.engines
            for _ in range(9):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(HUNG_S / 5) as wait:
                        answer.begin_wait(wait, may_leave=True)
                        try:
                            await asyncio.sleep(9)
                        finally:
                            answer.end_wait(wait)
            assert not answer.is_healthy
            hangs.runs.set()
            await until(lambda: answer.is_healthy)

    asyncio.run(run())


def test_a_client_that_leaves_proves_nothing() -> None:
    async def run() -> None:
        only, other = Core(None, BEGUN, ENDED), Core(BEGUN, ENDED)
        only.takes_questions = False
        async with routed({"a": only, "c": other}) as (client, router):
            asked = asyncio.create_task(client.post(CHAT, json=BODY))
            await until(lambda: only.bodies)
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
            await asyncio.sleep(2 * HUNG_S)
            assert states(router)["hung"] == 0

    asyncio.run(run())
