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
import traceback
from dataclasses import asdict
from pathlib import Path

import cpu_engine
import request_kinds
import sampler_watch
from engine_watch import SchedulerWatch, left_behind, totals
from kv_listener import KVListener
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
# Fewer are the choice of a request, not the whole of what a token was drawn from.
ALL_LOGITS = 100


def main() -> None:
    if JOB["ray_workers"]:
        cpu_engine.start_ray(JOB["ray_workers"])
    result = {"pid": os.getpid(), "stages": {}}
    for stage in JOB["stages"]:
        run = try_stage if stage.get("may_fail") else run_stage
        result["stages"][stage["name"]] = run(stage)
    Path(sys.argv[2]).write_text(json.dumps(result))


def try_stage(stage: dict) -> dict:
    """Run a stage; what it fails with is its report, and the stages behind it are run."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    try:
        return run_stage(stage)
    except Exception as error:
        traceback.print_exc()
        report = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    cleanup_dist_env_and_memory()
    gc.collect()
    return report


def run_stage(stage: dict) -> dict:
    """Start one engine, make its runs, stop it."""
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    llm = _start(stage)
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    watch = signals = entropies = listener = None
    if "listens" in stage:
        listener = KVListener(stage["listens"])
    report = {"runs": {}}
    if stage.get("samples_entropies"):
        # Only in a job that is told not to be patched by this.
        from meridian_patch.calibrate.sampled_entropies import SampledEntropies

        entropies = SampledEntropies(llm)
    if core is not None and hasattr(core, "scheduler"):
        tokenizer = llm.get_tokenizer()
        ids = tokenizer.convert_tokens_to_ids([THINK_START, THINK_END])
        watch = SchedulerWatch(core.scheduler, *ids)
        report["scheduler"] = [cls.__name__ for cls in type(core.scheduler).__mro__]
        report["runner"], *_ = llm.collective_rpc(runner_module)
        if any("measures" in run for run in stage["runs"]):
            signals = SignalWatch(core.scheduler, ids[1])
    _ask_sampler(stage, llm, sampler_watch.watch)
    for run in stage["runs"]:
        if signals is not None:
            signals.restart(is_on=run["measures"])
        if "beams" in run:
            report["runs"][run["name"]] = request_kinds.beam_search(llm, watch, run)
            continue
        report["runs"][run["name"]] = outcome = Run(llm, watch, run, entropies).drive()
        if signals is not None:
            [names] = llm.collective_rpc(tapped)
            outcome["signals"] = signals.report() | {"tapped": names}
    report["sampler"] = _ask_sampler(stage, llm, sampler_watch.seen)
    report["status"] = read_status()
    if listener is not None:
        report["kv_events"] = listener.report(core.scheduler)
    llm.llm_engine.engine_core.shutdown()
    del llm, core, watch, signals, entropies
    cleanup_dist_env_and_memory()
    gc.collect()
    return report


def _start(stage: dict):
    from vllm import LLM

    llm = LLM(**request_kinds.engine_arguments(stage["engine"]))
    if stage.get("profiles"):
        llm.collective_rpc(cpu_engine.profile)
    return llm


def _ask_sampler(stage: dict, llm, what):
    """What model runner V2's sampler says; None where the stage does not watch it."""
    return llm.collective_rpc(what)[0] if stage.get("watches_sampler") else None


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
        counted = totals(self._watch.scheduler) if self._watch else {}
        step = 0
        while self._requests or self._has_events() or self._engine.has_unfinished_requests():
            for request in _take_due(self._requests, step):
                self._add(request)
            for event in _take_due(self._events, step):
                self._fire(event)
            self._fire_conditional()
            for output in self._engine.step():
                self._take_in(output)
            step += 1
        report = {
            "outputs": {name: _listed(output) for name, output in self._outputs.items()},
            "events": self._fired,
            "unfired": self._events,
        }
        if self._watch is not None:
            report |= asdict(seen) | left_behind(self._watch.scheduler)
            now = totals(self._watch.scheduler)
            report["counted"] = {n: v - counted.get(n, 0) for n, v in now.items()}
        return report

    def _add(self, request: dict) -> None:
        prompt = self._tokenizer.apply_chat_template(
            request["messages"],
            tokenize=False,
            add_generation_prompt=True,
            **request.get("template", {}),
        )
        if self._entropies is not None:
            self._entropies.measure(request["name"])
        self._engine.add_request(
            request["name"],
            request_kinds.prompt(prompt, request),
            request_kinds.params(request),
            lora_request=request_kinds.lora(request.get("lora")),
            priority=request.get("priority", 0),
        )

    def _take_in(self, output) -> None:
        from vllm.outputs import PoolingRequestOutput

        """Keep the newest of each sample: with n > 1 they come one at a time."""
        kept = self._outputs.setdefault(output.request_id, {"samples": {}})
        kept["finished"] = output.finished
        kept["cached_tokens"] = output.num_cached_tokens
        kept["prompt_tokens"] = len(output.prompt_token_ids)
        if isinstance(output, PoolingRequestOutput):
            kept["pooled"] = output.outputs.data.tolist()
            return
        if output.prompt_logprobs is not None:
            kept["prompt_logprobs"] = request_kinds.plain_logprobs(output.prompt_logprobs)
        for sample in output.outputs:
            kept["samples"][sample.index] = {
                "ids": list(sample.token_ids),
                "text": sample.text,
                "finish_reason": sample.finish_reason,
                "meridian": dict(getattr(sample, "meridian", {})),
            }
            if output.finished and sample.logprobs:
                rows = zip(sample.token_ids, sample.logprobs, strict=True)
                chosen = [logprobs[token_id].logprob for token_id, logprobs in rows]
                kept["samples"][sample.index]["logprobs"] = chosen
            progress = getattr(sample, "meridian_progress", None)
            if progress is not None:
                counted = progress.reasoning_tokens(len(sample.token_ids))
                kept["samples"][sample.index]["reasoning_tokens"] = counted
            if output.finished and sample.logprobs and len(sample.logprobs[0]) >= ALL_LOGITS:
                boundary_id = self._tokenizer.convert_tokens_to_ids(THINK_END)
                rows = [signals_of(logits, boundary_id) for logits in sample.logprobs]
                kept["samples"][sample.index]["signals"] = rows
        if output.finished and self._entropies is not None:
            number = len(kept["samples"][0]["ids"])
            kept["samples"][0]["entropies"] = self._entropies.take(output.request_id, number)

    def _has_events(self) -> bool:
        """Those that wait for something to happen may wait in vain."""
        return any("when" not in event for event in self._events)

    def _fire_conditional(self) -> None:
        for event in [event for event in self._events if "when" in event]:
            if self._watch.has(event["when"]):
                self._events.remove(event)
                self._fire(event)

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
            case "sleep":
                engine.sleep(event["level"], event["mode"])
            case "wake":
                engine.wake_up(event.get("tags"))
            case "reset_prefix_cache":
                result = engine.reset_prefix_cache(event["reset_running_requests"])
            case "switch":
                core = engine.engine_core.engine_core
                result = core.meridian_switch(event["policy"], event["exit"])
            case "observe":
                pass
        samples = [s for output in self._outputs.values() for s in output["samples"].values()]
        produced = sum(len(sample["ids"]) for sample in samples)
        self._fired.append(event | {"result": result, "produced": produced})


def _take_due(entries: list[dict], step: int) -> list[dict]:
    due = [e for e in entries if "when" not in e and e.get("at_step", 0) <= step]
    entries[:] = [entry for entry in entries if entry not in due]
    return due


def _listed(output: dict) -> dict:
    return output | {"samples": [sample for _, sample in sorted(output["samples"].items())]}


if __name__ == "__main__":
    main()
