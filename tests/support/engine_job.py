"""Runs one job on real engines in this process and writes what happened as JSON.

    python -P engine_job.py JOB.json RESULT.json

Started by ``run_engine.run_job``: being patched, the runner and asynchronous scheduling are
matters of the whole process, so every job has its own. A job is a list of stages; a stage is one
engine and the runs made on it, one after the other.
"""

import gc
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import cpu_engine
from engine_watch import SchedulerWatch
from signal_watch import SignalWatch, signals_of, tapped

JOB = json.loads(Path(sys.argv[1]).read_text())

# At module level: processes that this one spawns import it again and must do the same.
if JOB["import_meridian_patch"]:
    import meridian_patch  # noqa: F401 - importing it is what is tested
if JOB["interpret_triton"]:
    cpu_engine.add_triton_cpu_backend()
if JOB["allow_async"]:
    cpu_engine.allow_async_scheduling()

THINK_START, THINK_END = "<think>", "</think>"


def main() -> None:
    result = {"pid": os.getpid(), "stages": {}}
    for stage in JOB["stages"]:
        result["stages"][stage["name"]] = run_stage(stage)
    Path(sys.argv[2]).write_text(json.dumps(result))


def run_stage(stage: dict) -> dict:
    """Start one engine, make its runs, stop it."""
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = LLM(**stage["engine"])
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    watch = signals = entropies = None
    report = {"runs": {}}
    if stage.get("samples_entropies"):
        # Only in a job that is told not to be patched by this.
        from meridian_patch.engine.sampled_entropies import SampledEntropies

        entropies = SampledEntropies(llm)
    if core is not None and hasattr(core, "scheduler"):
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.convert_tokens_to_ids([THINK_START, THINK_END])
        watch = SchedulerWatch(core.scheduler, *ids)
        report["scheduler"] = [cls.__name__ for cls in type(core.scheduler).__mro__]
        [report["runner"]] = llm.collective_rpc(runner_module)
        if any("measures" in run for run in stage["runs"]):
            signals = SignalWatch(core.scheduler, ids[1])
    for run in stage["runs"]:
        if signals is not None:
            signals.restart(is_on=run["measures"])
        report["runs"][run["name"]] = outcome = Run(llm, watch, run, entropies).drive()
        if signals is not None:
            [names] = llm.collective_rpc(tapped)
            outcome["signals"] = signals.report() | {"tapped": names}
    report["status"] = read_status()
    llm.llm_engine.engine_core.shutdown()
    del llm, core, watch, signals, entropies
    cleanup_dist_env_and_memory()
    gc.collect()
    return report


def runner_module(worker) -> str:
    return type(worker.model_runner).__module__


def read_status() -> list[dict]:
    """What the product reports as live, by process; the files go when their process ends."""
    files = sorted(Path(JOB["status_dir"]).glob("*.json"))
    return [json.loads(file.read_text()) for file in files]


class Run:
    """Adds requests and fires events at given engine steps, and steps until all is done."""

    def __init__(self, llm, watch: SchedulerWatch | None, run: dict, entropies=None) -> None:
        self._engine = llm.llm_engine
        self._entropies = entropies
        self._tokenizer = llm.get_tokenizer()
        self._watch = watch
        self._requests = list(run["requests"])
        self._events = list(run.get("events", ()))
        self._outputs: dict[str, dict] = {}
        self._fired: list[dict] = []

    def drive(self) -> dict:
        seen = self._watch.restart() if self._watch else None
        counted = _totals(self._watch.scheduler) if self._watch else {}
        step = 0
        while self._requests or self._events or self._engine.has_unfinished_requests():
            for request in _take_due(self._requests, step):
                self._add(request)
            for event in _take_due(self._events, step):
                self._fire(event)
            for output in self._engine.step():
                self._take_in(output)
            step += 1
        report = {
            "outputs": {name: _listed(output) for name, output in self._outputs.items()},
            "events": self._fired,
        }
        if self._watch is not None:
            report |= asdict(seen) | _left_behind(self._watch.scheduler)
            totals = _totals(self._watch.scheduler)
            report["counted"] = {n: v - counted.get(n, 0) for n, v in totals.items()}
        return report

    def _add(self, request: dict) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = dict(request["params"])
        if "regex" in params:
            params["structured_outputs"] = StructuredOutputsParams(regex=params.pop("regex"))
        if "logit_bias" in params:
            # JSON knows no other keys than strings.
            params["logit_bias"] = {int(key): b for key, b in params["logit_bias"].items()}
        prompt = self._tokenizer.apply_chat_template(
            request["messages"], tokenize=False, add_generation_prompt=True
        )
        if self._entropies is not None:
            self._entropies.measure(request["name"])
        self._engine.add_request(
            request["name"],
            _with_image(prompt, request.get("image")),
            SamplingParams(**params),
            lora_request=_lora(request.get("lora")),
            priority=request.get("priority", 0),
        )

    def _take_in(self, output) -> None:
        """Keep the newest of each sample: with n > 1 they come one at a time."""
        kept = self._outputs.setdefault(output.request_id, {"samples": {}})
        kept["finished"] = output.finished
        kept["cached_tokens"] = output.num_cached_tokens
        kept["prompt_tokens"] = len(output.prompt_token_ids)
        for sample in output.outputs:
            kept["samples"][sample.index] = {
                "ids": list(sample.token_ids),
                "text": sample.text,
                "finish_reason": sample.finish_reason,
            }
            if output.finished and sample.logprobs:
                boundary_id = self._tokenizer.convert_tokens_to_ids(THINK_END)
                rows = [signals_of(logits, boundary_id) for logits in sample.logprobs]
                kept["samples"][sample.index]["signals"] = rows
        if output.finished and self._entropies is not None:
            number = len(kept["samples"][0]["ids"])
            kept["samples"][0]["entropies"] = self._entropies.take(output.request_id, number)

    def _fire(self, event: dict) -> None:
        engine = self._engine
        result = None
        match event["do"]:
            case "abort":
                engine.abort_request(event["names"])
            case "pause":
                engine.engine_core.engine_core.pause_scheduler("keep", clear_cache=False)
            case "resume":
                engine.engine_core.engine_core.resume_scheduler()
            case "reset_prefix_cache":
                result = engine.reset_prefix_cache(event["reset_running_requests"])
            case "observe":
                pass
        samples = [s for output in self._outputs.values() for s in output["samples"].values()]
        produced = sum(len(sample["ids"]) for sample in samples)
        self._fired.append(event | {"result": result, "produced": produced})


def _lora(folder: str | None):
    from vllm.lora.request import LoRARequest

    return None if folder is None else LoRARequest("adapter", 1, folder)


def _with_image(prompt: str, seed: int | None):
    if seed is None:
        return prompt
    from tiny_vlm import picture

    return {"prompt": prompt, "multi_modal_data": {"image": picture(seed)}}


def _take_due(entries: list[dict], step: int) -> list[dict]:
    due = [entry for entry in entries if entry.get("at_step", 0) <= step]
    entries[:] = [entry for entry in entries if entry not in due]
    return due


def _listed(output: dict) -> dict:
    return output | {"samples": [sample for _, sample in sorted(output["samples"].items())]}


def _left_behind(scheduler) -> dict:
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "requests_left": len(scheduler.requests),
        # One block is vLLM's null block and never free.
        "blocks_left": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "encoded_left": len(scheduler.encoder_cache_manager.request_cached_ids),
        **(_of_product(scheduler) if hasattr(scheduler, "phase_router") else {}),
    }


def _totals(scheduler) -> dict[str, int]:
    return dict(scheduler.phase_counters.totals) if hasattr(scheduler, "phase_counters") else {}


def _of_product(scheduler) -> dict:
    """What our scheduler and cache manager say of themselves."""
    from meridian_patch.engine.free_queue import TieredFreeQueue
    from meridian_patch.engine.kv_integrity import find_faults

    pool = scheduler.kv_cache_manager.block_pool
    is_tiered = isinstance(pool.free_block_queue, TieredFreeQueue)
    return {
        "routed_left": len(scheduler.phase_router),
        **(_of_exits(scheduler.exits) if scheduler.exits else {}),
        **({"kv_faults": find_faults(pool)} if is_tiered else {}),
    }


def _of_exits(exits) -> dict:
    return {
        "watched_left": exits.num_watched + len(exits.closings),
        "probes_left": len(exits.probes or ()),
        # What waits to be told with a step that never comes.
        "told_left": len(exits.drain_outcomes()),
    }


if __name__ == "__main__":
    main()
