"""Runs a real engine in this process and times its steps and tokens.

    python -P -m meridian_patch.replay.timed_engine JOB.json RESULT.json

The job holds ``engine``, arguments of ``vllm.LLM``, and ``plays``, lists of requests by name. A
request has ``id``, ``arrival_s``, ``max_tokens`` and either ``messages`` for the chat template or
``prompt``, token ids; with ``ignore_eos`` it samples ``max_tokens`` tokens; ``extra_args`` are its
``vllm_xargs``. The result holds ``engine``, facts of the engine, and for each play its ``steps``
(the fields of ``StepWork`` and seconds), its ``requests`` (token ids, and when each token was
delivered) and ``preemptions``.

Requests are put into the engine core when their time has come, on the wall clock: what an API
server does before and after is not part of it. Sampling is greedy.
"""

import json
import sys
import time
from collections import deque
from dataclasses import astuple
from pathlib import Path
from typing import Any

from vllm import LLM
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from meridian_patch import envs
from meridian_patch.engine.device import accelerator_name
from meridian_patch.replay.cpu_affinity import keep_to_the_engines_core
from meridian_patch.replay.in_process import core_of
from meridian_patch.replay.step_log import StepLog


class TimedEngine:
    """One engine whose core lives in this process.

    Attributes:
        core: vLLM's ``EngineCore``.

    Load-bearing: ``step_fn`` followed by ``post_step`` is what the core's own loop does.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Kept: without it the worker ends.
        self._llm = LLM(**arguments)
        self._tokenizer = self._llm.get_tokenizer()
        self.core = core_of(self._llm)
        self._log = StepLog(self.core.scheduler)

    @property
    def facts(self) -> dict[str, Any]:
        """The engine's properties that a replay needs."""
        config = self.core.vllm_config
        scheduler = self.core.scheduler
        return {
            # Load-bearing: one block is the null block, which holds no tokens.
            "blocks": scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1,
            "block_size": scheduler.block_size,
            "max_model_len": config.model_config.max_model_len,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "is_async": config.scheduler_config.async_scheduling,
            "is_patched": hasattr(scheduler, "phase_tracker"),
            "accelerator": accelerator_name(),
        }

    def play(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Play requests to the end of the last one, with an empty prefix cache at the start."""
        self.core.scheduler.reset_prefix_cache()
        self._log.restart()
        waiting = deque(sorted(map(self._with_prompt, requests), key=lambda r: r["arrival_s"]))
        seen = {request["id"]: request | {"output": [], "token_s": []} for request in waiting}
        begin = time.perf_counter()
        while waiting or self._has_work():
            while waiting and waiting[0]["arrival_s"] <= time.perf_counter() - begin:
                self.core.add_request(self._upstream(waiting.popleft()))
            if not self._has_work():
                due = begin + waiting[0]["arrival_s"] - time.perf_counter()
                time.sleep(max(0.0, due))
                continue
            outputs, is_executed = self.core.step_fn()
            self.core.post_step(is_executed)
            now = time.perf_counter() - begin
            for engine_outputs in (outputs or {}).values():
                for item in engine_outputs.outputs:
                    record = seen[item.request_id]
                    record["output"].extend(item.new_token_ids)
                    record["token_s"].extend([now] * len(item.new_token_ids))
        return {
            "steps": [(*astuple(work), seconds) for work, seconds in self._log.steps],
            "preemptions": self._log.preemptions,
            "requests": list(seen.values()),
        }

    def _has_work(self) -> bool:
        # After the last token one more step tells the worker that the request has ended.
        return bool(self.core.scheduler.has_requests() or self.core.batch_queue)

    def _with_prompt(self, request: dict[str, Any]) -> dict[str, Any]:
        if "prompt" in request:
            return request
        # As text first: newer tokenizers return more than ids when asked for ids.
        text = self._tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True
        )
        prompt = self._tokenizer.encode(text, add_special_tokens=False)
        return {name: value for name, value in request.items() if name != "messages"} | {
            "prompt": list(prompt)
        }

    def _upstream(self, request: dict[str, Any]) -> Request:
        sampling = SamplingParams(
            temperature=0,
            max_tokens=request["max_tokens"],
            ignore_eos=request.get("ignore_eos", False),
            extra_args=request.get("extra_args"),
        )
        sampling.update_from_generation_config({}, self._tokenizer.eos_token_id)
        return Request(
            request_id=request["id"],
            prompt_token_ids=request["prompt"],
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            block_hasher=self.core.request_block_hasher,
        )


def main() -> None:
    """Read the job, play it, write the result after each play."""
    keep_to_the_engines_core(envs.environment())
    job = json.loads(Path(sys.argv[1]).read_text())
    engine = TimedEngine(job["engine"])
    facts, plays, result = engine.facts, {}, Path(sys.argv[2])
    for name, requests in job["plays"].items():
        plays[name] = engine.play(requests)
        # As it goes, and in one piece: an early end leaves the plays before it.
        part = result.with_suffix(".part")
        part.write_text(json.dumps({"engine": facts, "plays": plays}))
        part.replace(result)


if __name__ == "__main__":
    main()
