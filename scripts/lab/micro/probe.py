"""``probe-micro``: what one probe adds to a step's CPU time, by its context."""

import pickle
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.signals import MeasuredSignals
from meridian_patch.exit.actions import Probe
from meridian_patch.replay.scheduler import build_scheduler, read_template_tokens
from meridian_patch.replay.types import EngineLimits, ReplayArm
from micro.timing import (
    Rounds,
    Seconds,
    column,
    make_table,
    take_rounds,
    write_figures,
)

# What is timed; the last is what either model runner does with a new request's tokens.
CALLS = ("schedule", "pickle", "unpickle", "update_from_output", "token row")
PLAIN, PROBED = "plain", "probed"
RUNNERS = {"v1": False, "v2": True}
_SETTINGS = {
    "EXIT__MODE": "observe",
    # No probe but those that are asked for here.
    "EXIT__PROBE_MIN_GAP_TOKENS": "1000000",
    "EXIT__PROBE_MAX_GAP_TOKENS": "1000000",
    "EXIT__PROBE_EVERY_STEPS": "1",
    "POLICY__TIME_BUDGET_US": "10000000",
}
_SETTLING_STEPS = 5
# A word, which ends nothing.
_WORD = 65


def run_probe_micro(contexts: list[int], probes: int, out: Path) -> int:
    """Measure ``probes`` probes of each context; print a table and write ``probe-micro.json``."""
    rows: list[dict[str, Any]] = []
    for runner, is_v2 in RUNNERS.items():
        micro = ProbeMicro(max(contexts), is_v2=is_v2)
        for context in contexts:
            row = {"runner": runner, "context": context}
            rows.append(row | _added_ms(micro.measure(context, probes)))
    headings = ("runner", "context", *CALLS, "all")
    console = Console(markup=False, emoji=False)
    console.print(make_table("CPU time that a probe adds, ms", headings, map(_cells, rows)))
    write_figures(console, out / "probe-micro.json", {"rounds": probes, "rows": rows})
    return 0


def _added_ms(seen: Rounds) -> dict[str, Any]:
    """The median of steps with a probe less that of steps without: by call, and their sum."""
    probed, plain = seen[PROBED], seen[PLAIN]
    added = {
        call: float(np.median(column(probed, call)) - np.median(column(plain, call))) / 1e3
        for call in CALLS
    }
    return {"added_ms": added, "all_ms": sum(added.values())}


def _cells(row: dict[str, Any]) -> list[str]:
    figures = [*row["added_ms"].values(), row["all_ms"]]
    return [row["runner"], f"{row['context']:,}", *(f"{ms:.2f}" for ms in figures)]


class ProbeMicro:
    """One thinker on a scheduler of its own, probed in every second step.

    Args:
        most_tokens: longest context that will be measured.
        is_v2: the scheduler speaks to model runner V2.
    """

    def __init__(self, most_tokens: int, *, is_v2: bool) -> None:
        self._row = np.zeros(2 * most_tokens, np.int32)
        limits = EngineLimits(max_model_len=2 * most_tokens, max_num_batched_tokens=2 * most_tokens)
        self._hasher = get_request_block_hasher(limits.block_size, sha256)
        settings = {f"MERIDIAN_PATCH_SET_{name}": value for name, value in _SETTINGS.items()}
        arm = ReplayArm("probed", is_patched=True, settings=settings)
        blocks = 4 * most_tokens // limits.block_size
        self._scheduler = build_scheduler(arm, blocks, is_async=True, limits=limits)
        self._scheduler.use_v2_model_runner = is_v2

    def measure(self, context_tokens: int, probes: int) -> Rounds:
        """CPU seconds of each call, of steps without a probe and of the next ones, with it."""
        scheduler = self._scheduler
        thinker = self._thinker(context_tokens)
        scheduler.add_request(thinker)
        for _ in range(_SETTLING_STEPS):
            self._step()

        def round_of_two() -> Iterator[tuple[str, Seconds]]:
            yield PLAIN, self._step()
            watched = scheduler.early_exit.requests[thinker.request_id]
            scheduler.early_exit.probes.ask(watched, Probe(1, 1), thinker.num_tokens - 1)
            yield PROBED, self._step()

        seen = take_rounds(round_of_two, probes, lambda: None)
        scheduler.finish_requests(thinker.request_id, RequestStatus.FINISHED_ABORTED)
        self._step()
        return seen

    def _thinker(self, tokens: int) -> Request:
        rng, markers = random.Random(tokens), read_template_tokens()
        prompt = [rng.randrange(60, 120) for _ in range(tokens - 1)]
        parameters = SamplingParams(temperature=0, max_tokens=tokens)
        parameters.update_from_generation_config({}, markers.turn_end)
        return Request(
            f"thinker{tokens}",
            [*prompt, markers.think_start],
            parameters,
            None,
            block_hasher=self._hasher,
        )

    def _step(self) -> Seconds:
        seconds: Seconds = {}

        def timed(call: str, function: Callable[..., Any], *args: Any) -> Any:
            start = time.thread_time()
            result = function(*args)
            seconds[call] = time.thread_time() - start
            return result

        output = timed("schedule", self._scheduler.schedule)
        sent = timed("pickle", pickle.dumps, output, pickle.HIGHEST_PROTOCOL)
        timed("unpickle", pickle.loads, sent)
        timed("token row", self._write_rows, output)
        timed("update_from_output", self._scheduler.update_from_output, output, _answer(output))
        return seconds

    def _write_rows(self, output: Any) -> None:
        for new in output.scheduled_new_reqs:
            self._row[: len(new.prompt_token_ids)] = new.prompt_token_ids


def _answer(output: Any) -> ModelRunnerOutput:
    names = list(output.num_scheduled_tokens)
    index = {name: number for number, name in enumerate(names)}
    answer = ModelRunnerOutput(names, index, sampled_token_ids=[[_WORD] for _ in names])
    plan = getattr(output, wire.PLAN, None)
    if plan is not None:
        values = np.ones((len(plan.request_ids), 4), np.float32)
        setattr(answer, wire.SIGNALS, MeasuredSignals(plan.request_ids, None, values))
    return answer
