"""Runs one job on vLLM's asynchronous engine, whose cores are processes of their own.

    python -P async_job.py JOB.json RESULT.json

Started by ``run_engine.run_job`` for jobs with ``is_async``. Each request is a streaming client of
its own; clients leave in the middle of their streams, talk in sessions, and operators pause the
engine, put it to sleep and reset its caches while they read. Of the job's stages the first is run.
"""

import asyncio
import json
import os
import sys
import time
import traceback
from pathlib import Path

import core_reports
import cpu_engine
import request_kinds

JOB = json.loads(Path(sys.argv[1]).read_text())

# At module level: processes that this one spawns import it again and must do the same.
if JOB["interpret_triton"]:
    cpu_engine.add_triton_cpu_backend()
if JOB["allow_async"]:
    cpu_engine.allow_async_scheduling()
if JOB["share_experts"]:
    cpu_engine.add_gloo_gatherv()
core_reports.watch_cores()

ARRIVAL_S = 0.02
PORT = "VLLM_NIXL_SIDE_CHANNEL_PORT"
# What a request to the first engine of two says: its KV cache is wanted elsewhere.
FOR_ANOTHER = {"do_remote_decode": True, "do_remote_prefill": False}


def main() -> None:
    [stage] = JOB["stages"]
    result = {"pid": os.getpid(), "stages": {stage["name"]: asyncio.run(try_stage(stage))}}
    Path(sys.argv[2]).write_text(json.dumps(result))


async def try_stage(stage: dict) -> dict:
    try:
        return await run_stage(stage)
    except Exception as error:
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}


async def run_stage(stage: dict) -> dict:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    engines = []
    report = {"runs": {}}
    try:
        # The first of two computes prompts for the second.
        for number, more in enumerate(stage.get("engines", [{}])):
            args = request_kinds.engine_arguments(stage["engine"] | more)
            # Each engine's handshakes have a port of their own; its processes read it when born.
            os.environ[PORT] = str(JOB["side_port"] + number)  # noqa: TID251
            engines.append(AsyncLLM.from_engine_args(AsyncEngineArgs(**args)))
        for run in stage["runs"]:
            report["runs"][run["name"]] = await AsyncRun(*engines, run=run).drive()
        report["status"] = read_status()
    finally:
        for engine in engines:
            engine.shutdown()
    return report


def read_status() -> list[dict]:
    """What the product reports as live, by process."""
    files = sorted(Path(JOB["status_dir"]).glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


class AsyncRun:
    """All clients of one run, at once."""

    def __init__(self, *engines, run: dict) -> None:
        self._engines, self._engine = engines, engines[-1]
        engine = self._engine
        self._tokenizer = engine.get_tokenizer()
        self._run = run
        self._outputs: dict[str, dict] = {}
        self._fired: list[dict] = []
        # Notified of every output.
        self._news = asyncio.Condition()

    async def drive(self) -> dict:
        clients = [self._client(n, request) for n, request in enumerate(self._run["requests"])]
        operators = [self._operator(event) for event in self._run.get("events", ())]
        began_s = time.monotonic()
        await asyncio.gather(*clients, *operators)
        seconds = time.monotonic() - began_s
        return {
            "outputs": self._outputs,
            "events": self._fired,
            "seconds": seconds,
            "tokens": self._produced,
            "cores": await self._reports(),
        }

    @property
    def _produced(self) -> int:
        return sum(len(output["samples"][0]["ids"]) for output in self._outputs.values())

    async def _until(self, is_so) -> None:
        async with self._news:
            await self._news.wait_for(is_so)

    async def _client(self, number: int, request: dict) -> None:
        from vllm.sampling_params import RequestOutputKind

        await asyncio.sleep(ARRIVAL_S * request.get("at_step", number))
        params = request_kinds.params(request)
        params.output_kind = RequestOutputKind.DELTA
        prompt = self._session(request) if "turns" in request else self._prompt(request)
        if len(self._engines) > 1:
            params.extra_args = {"kv_transfer_params": await self._prefill(request, params)}
        kept = {"samples": [{"ids": [], "finish_reason": None}], "finished": False, "pieces": 0}
        self._outputs[request["name"]] = kept
        leaves = request.get("leaves_after")
        async for output in self._engine.generate(
            prompt,
            params,
            request["name"],
            priority=request.get("priority", 0),
            lora_request=request_kinds.lora(request.get("lora")),
            data_parallel_rank=request.get("rank"),
        ):
            [sample] = output.outputs
            kept["pieces"] += 1
            kept["samples"][0]["ids"] += sample.token_ids
            kept["samples"][0]["finish_reason"] = sample.finish_reason
            kept["finished"] = output.finished
            async with self._news:
                self._news.notify_all()
            if leaves is not None and len(kept["samples"][0]["ids"]) >= leaves:
                # The engine aborts the request of a client that is gone.
                break

    async def _prefill(self, request: dict, params) -> dict:
        """Compute a prompt on the first engine; what the second needs to fetch its KV cache."""
        params = params.clone()
        params.max_tokens, params.min_tokens = 1, 0
        params.extra_args = {"kv_transfer_params": FOR_ANOTHER}
        name, prompt = f"{request['name']}-prefill", self._prompt(request)
        async for output in self._engines[0].generate(prompt, params, name):
            if output.finished:
                return output.kv_transfer_params
        raise AssertionError(f"{name} ended without a last output")

    def _prompt(self, request: dict) -> str:
        return self._tokenizer.apply_chat_template(
            request["messages"],
            tokenize=False,
            add_generation_prompt=True,
            **request.get("template", {}),
        )

    async def _session(self, request: dict):
        """The turns of a session, each said once so many tokens have come."""
        from vllm import SamplingParams
        from vllm.engine.protocol import StreamingInput
        from vllm.sampling_params import RequestOutputKind

        for turn in request["turns"]:
            sample, needed = self._outputs[request["name"]]["samples"][0], turn["after_tokens"]
            await self._until(lambda s=sample, n=needed: len(s["ids"]) >= n)
            ids = self._tokenizer.encode(turn["text"])
            params = SamplingParams(**request["params"] | {"max_tokens": turn["max_tokens"]})
            params.output_kind = RequestOutputKind.DELTA
            yield StreamingInput(prompt={"prompt_token_ids": ids}, sampling_params=params)

    async def _operator(self, event: dict) -> None:
        await self._until(lambda: self._produced >= event["at_token"])
        engine, result = self._engine, None
        match event["do"]:
            case "pause":
                await engine.pause_generation(mode=event["mode"], clear_cache=False)
            case "resume":
                await engine.resume_generation()
            case "sleep":
                await engine.sleep(event["level"], event["mode"])
            case "wake":
                await engine.wake_up()
            case "reset_prefix_cache":
                result = await engine.reset_prefix_cache(event["reset_running_requests"])
        before = self._produced
        if "hold_s" in event:
            # Of a pause: what comes while it lasts.
            await asyncio.sleep(event["hold_s"] / 2)
            before = self._produced
            await asyncio.sleep(event["hold_s"] / 2)
        self._fired.append(event | {"result": result, "produced": [before, self._produced]})
        if event["do"] == "pause":
            await engine.resume_generation()
        if event["do"] == "sleep":
            await engine.wake_up(["scheduling"] if event["level"] == 0 else None)

    async def _reports(self) -> list[dict]:
        """What each engine core saw, when nothing is left to do."""
        # Aborts of clients that left are still on their way.
        await asyncio.sleep(1)
        cores = [engine.engine_core for engine in self._engines]
        return [
            await core._call_utility_async("job_report", engine=each)
            for core in cores
            for each in core.core_engines
        ]


if __name__ == "__main__":
    main()
