"""A think engine's client without an engine, and answer servers that play a script."""

import asyncio
import json
from dataclasses import dataclass, field

from aiohttp import web
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.engine.handoff.answer_servers import AnswerServers
from meridian_patch.engine.handoff.second_legs import SecondLegs
from meridian_patch.engine.wire import FACTS
from meridian_patch.handoff.answer_engine import ASKED, Same
from meridian_patch.telemetry.handoffs import Handoffs

PROMPT = [1, 2, 3]
THOUGHT = [10, 11, 12, 13]
ANSWER = [20, 21, 22, 23, 24, 25]
SAME = Same("0.0", "16", "auto", ("tiny",), 4096)
# As vLLM writes it: other labels end in the same words.
CACHE_INFO = (
    'vllm:cache_config_info{{_block_size_resolved="True",block_size="{0}",cache_dtype="{1}",'
    'engine="0",mamba_ssm_cache_dtype="auto",user_specified_block_size="False"}} 1.0\n'
)
TICKET = {FACTS: {}, "remote_request_id": "kept"}
# After so many chunks the stream breaks, is silent, or reports an error; or it is not begun.
FAULTS = ("none", "cut", "silent", "error", "abort", "http", "busy", "refused", "other", "odd")


@dataclass
class AnswerServer:
    """A server of vLLM's token endpoint that plays a script."""

    fault: str = "none"
    after: int = 0
    chunk: int = 2
    same: Same = SAME
    bodies: list[dict] = field(default_factory=list)
    is_left: bool = False
    # As an engine that was stopped: it aborts what comes.
    is_draining: bool = False
    num_checks: int = 0
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self.play(request)

    async def play(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body == json.loads(ASKED):
            self.num_checks += 1
            return web.json_response({"choices": [{"token_ids": [5] * (not self.is_draining)}]})
        self.bodies.append(body)
        self.is_asked.set()
        if self.fault in {"http", "busy"}:
            status = 400 if self.fault == "http" else 503
            return web.json_response({"error": "no"}, status=status)
        response = web.StreamResponse()
        await response.prepare(request)
        if self.is_draining:
            await self._write(response, [], "abort")
            return response
        done = len(body["token_ids"]) - len(PROMPT + THOUGHT)
        left = ANSWER[done:]
        try:
            for number, first in enumerate(range(0, len(left), self.chunk)):
                if number == self.after and self.fault != "none":
                    return await self._fail(request, response)
                ids = left[first : first + self.chunk]
                is_last = first + self.chunk >= len(left)
                await self._write(response, ids, "stop" if is_last else None)
                await asyncio.sleep(0)
            if self.fault != "none":
                return response
            await response.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.is_left = True
            raise
        return response

    async def _fail(self, request, response) -> web.StreamResponse:
        if self.fault == "silent":
            await asyncio.sleep(30)
        elif self.fault == "error":
            await response.write(b'data: {"error": {"message": "dead"}}\n\n')
        elif self.fault == "odd":
            await self._write(response, [1], "a reason of a later release")
        elif self.fault == "abort":
            await self._write(response, [], "abort")
        elif self.fault == "cut" and request.transport is not None:
            request.transport.abort()
        return response

    async def _write(self, response, ids, finish) -> None:
        choice = {"index": 0, "token_ids": ids, "finish_reason": finish, "stop_reason": None}
        chunk = {"request_id": "r", "choices": [{**choice, "logprobs": None}]}
        await response.write(f"data: {json.dumps(chunk)}\n\n".encode())

    async def start(self) -> str:
        app = web.Application()
        info = CACHE_INFO.format(self.same.block_size, self.same.cache_dtype)
        model = {"id": "m", "root": self.same.models[0], "max_model_len": self.same.length}
        app.add_routes(
            [
                web.post("/inference/v1/generate", self.generate),
                web.get("/version", lambda _: _json({"version": self.same.version})),
                web.get("/v1/models", lambda _: _json({"data": [model]})),
                web.get("/metrics", lambda _: _text(info)),
            ]
        )
        self.runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        return f"http://127.0.0.1:{self.runner.addresses[0][1]}"


async def _json(value):
    return web.json_response(value)


async def _text(value):
    return web.Response(text=value)


class Home:
    """A think engine and its client: what was delivered, and what was added again."""

    def __init__(self, urls, wait_s=0.4):
        config = HandoffConfig(role="think", answer_urls=tuple(urls), answer_wait_s=wait_s)
        self.delivered = []
        self.finished = set()
        self.added = []
        self.handoffs = Handoffs()
        self.servers = AnswerServers(config, SAME)
        self.legs = SecondLegs(
            self.servers,
            self._deliver,
            self._add,
            lambda _: None,
            self.handoffs,
            binds_thoughts=False,
        )

    def _deliver(self, outputs):
        self.delivered += outputs.outputs
        self.finished |= {each.request_id for each in outputs.outputs if each.finished}

    async def _add(self, request):
        self.added.append(request)
        said = len(request.prompt_token_ids) - len(PROMPT + THOUGHT)
        left = ANSWER[said:]
        for first in range(0, max(len(left), 1), 2):
            await asyncio.sleep(0)
            ids = left[first : first + 2]
            self.engine_says(request.request_id, ids, is_last=first + 2 >= len(left))

    def engine_says(self, name, ids, *, is_last=False, ticket=None):
        output = EngineCoreOutput(request_id=name, new_token_ids=ids)
        if is_last:
            output.finish_reason = FinishReason.STOP
        if ticket:
            output.finish_reason, output.kv_transfer_params = FinishReason.LENGTH, dict(ticket)
        outputs = EngineCoreOutputs(outputs=[output])
        self.legs.take(outputs)
        if outputs.outputs:
            self._deliver(outputs)

    def think(self, name="r", **params):
        request = make_request(name, **params)
        given = self.legs.offered(request)
        self.engine_says(name, THOUGHT[:3])
        self.engine_says(name, THOUGHT[3:])
        self.engine_says(name, [], ticket=TICKET)
        return given

    async def until_finished(self, name="r", limit_s=10):
        for _ in range(int(limit_s / 0.01)):
            if name in self.finished:
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} did not finish: {self.delivered}")

    def ids(self, name="r"):
        mine = [each for each in self.delivered if each.request_id == name]
        return [token for each in mine for token in each.new_token_ids]

    def outcomes(self):
        events, _ = self.handoffs.drain()
        return {key.partition(":")[2]: n for key, n in events.items()}


def make_request(name="r", *, tokens=None, **params):
    params = {"max_tokens": 100, "temperature": 0.0, **params}
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(PROMPT),
        mm_features=None,
        sampling_params=SamplingParams(**params),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


def play(server, script, urls=None):
    """Run ``script(home, server)`` beside the server."""

    async def run():
        url = await server.start()
        home = Home([url] if urls is None else urls)
        try:
            return await script(home, server)
        finally:
            await home.legs.close()
            await server.runner.cleanup()

    return asyncio.run(run())
