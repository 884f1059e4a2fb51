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

    args = AsyncEngineArgs(**request_kinds.engine_arguments(stage["engine"]))
    engine = AsyncLLM.from_engine_args(args)
    report = {"runs": {}}
    try:
        for run in stage["runs"]:
            report["runs"][run["name"]] = await AsyncRun(engine, run).drive()
        report["status"] = read_status()
    finally:
        engine.shutdown()
    return report


def read_status() -> list[dict]:
    """What the product reports as live, by process."""
    files = sorted(Path(JOB["status_dir"]).glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


class AsyncRun:
    """All clients of one run, at once."""

    def __init__(self, engine, run: dict) -> None:
        self._engine = engine
        self._tokenizer = engine.get_tokenizer()
        self._run = run
        self._outputs: dict[str, dict] = {}
        self._fired: list[dict] = []
        # Notified of every output.
        self._news = asyncio.Condition()

    async def drive(self) -> dict:
        clients = [self._client(n, request) for n, request in enumerate(self._run["requests"])]
        operators = [self._operator(event) for event in self._run.get("events", ())]
        await asyncio.gather(*clients, *operators)
        return {
            "outputs": self._outputs,
            "events": self._fired,
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
            kept["transfer"] = output.kv_transfer_params
            async with self._news:
                self._news.notify_all()
            if leaves is not None and len(kept["samples"][0]["ids"]) >= leaves:
                # The engine aborts the request of a client that is gone.
                break

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
        core = self._engine.engine_core
        # Aborts of clients that left are still on their way.
        await asyncio.sleep(1)
        return [
            await core._call_utility_async("job_report", engine=engine)
            for engine in core.core_engines
        ]


if __name__ == "__main__":
    main()
