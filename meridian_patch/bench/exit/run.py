"""Runs the stages, and finds thought and answer in each reply."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meridian_patch import envs
from meridian_patch.bench.child import EngineChild
from meridian_patch.bench.exit.arms import ExitArm, Stage
from meridian_patch.bench.exit.checks import ThinkTokens, Violation, find_violations
from meridian_patch.demo.problems import Problem, grade
from meridian_patch.demo.tokenizer import THINK_END, THINK_START
from meridian_patch.errors import BenchError

_ENGINE = "meridian_patch.bench.exit.engine:ExitEngine"
MAX_MODEL_LEN = 1536
MAX_TOKENS = 1400
# The longest prompt has about 110 tokens: one step takes the prompts of a whole batch.
ENGINE = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 128,
    "max_num_batched_tokens": 16_384,
    "block_size": 32,
    "disable_log_stats": False,
    "seed": 0,
}

# Seats left for probes. Without a free seat a probe waits while its thought goes on, which is then
# closed in the middle of its next words.
PROBE_SEATS = 16

# Called with stage, arm, requests that are done, and requests in all.
OnProgress = Callable[[str, str, int, int], None]


class Result(NamedTuple):
    """What came of one problem.

    Attributes:
        think_tokens: up to the boundary, it included; all where the thought did not end.
        is_right: the answer is.
        reason: what ended the thought, as the caller is told; empty: nothing, or not followed.
    """

    think_tokens: int
    is_right: bool
    reason: str


@dataclass(frozen=True)
class ExitArmRun:
    """One arm on one engine.

    Attributes:
        stage: the engine's name.
        results: in the problems' order.
        totals: events in the engine.
        violations: of what must never happen.
        seconds: from first request to last reply.
    """

    stage: str
    arm: ExitArm
    results: Sequence[Result]
    totals: Mapping[str, int]
    violations: Sequence[Violation]
    seconds: float


class ExitBench:
    """The comparison on one model.

    Args:
        model: directory of the tiny reasoner.
        profile: configuration with a section ``exit``.
        folder: takes the engines' logs.
        on_progress: called as replies come.
    """

    def __init__(self, model: Path, profile: Path, folder: Path, on_progress: OnProgress) -> None:
        self._model = model
        self._profile = profile
        self._folder = folder
        self._on_progress = on_progress
        # Takes seconds, and who reads results does not need it.
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._markers = ThinkTokens(
            *self._tokenizer.convert_tokens_to_ids([THINK_START, THINK_END])
        )

    def run(
        self, stage: Stage, problems: Sequence[Problem], seed: int, runs: list[ExitArmRun]
    ) -> None:
        """All arms of a stage.

        Args:
            stage: engine and arms.
            problems: one request each, for every arm.
            seed: of the first problem's sampling, where the stage has seeds.
            runs: takes each arm when it has ended.

        Raises:
            BenchError: the engine did not start, or ended.
        """
        prompts = [self._prompt(problem) for problem in problems]
        log = self._folder / f"engine-{stage.name}.log"
        reasoning = (THINK_START, THINK_END) if stage.needs_budget else None
        self._on_progress(stage.name, "starting", 0, len(problems))
        arguments: dict[str, Any] = {"model": str(self._model), **ENGINE, **stage.engine}
        concurrency = arguments["max_num_seqs"] - PROBE_SEATS
        job = {"engine": arguments, "reasoning": reasoning, "concurrency": concurrency}
        variables = _variables(stage.settings, self._profile)
        with EngineChild(_ENGINE, job, variables, log, BenchError) as engine:
            runs.extend(
                self._run_arm(engine, stage, arm, problems, prompts, seed) for arm in stage.arms
            )

    def _run_arm(
        self,
        engine: EngineChild,
        stage: Stage,
        arm: ExitArm,
        problems: Sequence[Problem],
        prompts: Sequence[list[int]],
        seed: int,
    ) -> ExitArmRun:
        requests = [
            {
                "key": str(number),
                "prompt": prompt,
                "params": self._params(stage, arm, seed + number),
            }
            for number, prompt in enumerate(prompts)
        ]
        results: dict[int, Result] = {}
        violations: list[Violation] = []
        started = time.monotonic()
        engine.send({"requests": requests})
        for _ in requests:
            reply = engine.receive()
            number = int(reply["key"])
            results[number], broken = self._read(stage, arm, problems[number], reply)
            violations += broken
            self._on_progress(stage.name, arm.name, len(results), len(requests))
        seconds = time.monotonic() - started
        totals = engine.receive()["totals"]
        ordered = [results[number] for number in range(len(requests))]
        return ExitArmRun(stage.name, arm, ordered, totals, violations, seconds)

    def _read(
        self, stage: Stage, arm: ExitArm, problem: Problem, reply: Mapping[str, Any]
    ) -> tuple[Result, list[Violation]]:
        ids, end = reply["ids"], self._markers.end
        think_tokens = ids.index(end) + 1 if end in ids else len(ids)
        answer = None
        if end in ids:
            answer = self._tokenizer.decode(ids[think_tokens:], skip_special_tokens=True)
        violations = find_violations(
            f"{stage.name}: {arm.name}",
            problem.question,
            ids,
            reply["forced"],
            answer,
            self._markers,
            is_cut=reply["finish_reason"] == "length",
        )
        is_right = answer is not None and grade(answer, problem.answer)
        return Result(think_tokens, is_right, reply["told"].get("exit_reason", "")), violations

    def _params(self, stage: Stage, arm: ExitArm, seed: int) -> dict[str, Any]:
        params = {"temperature": stage.temperature, "max_tokens": MAX_TOKENS, **arm.params}
        return params | ({"seed": seed} if stage.is_seeded else {})

    def _prompt(self, problem: Problem) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids


def _variables(settings: Mapping[str, str], profile: Path) -> dict[str, str]:
    """Environment of a patched engine; ``settings`` of section ``exit`` replace the profile's."""
    own = {f"{envs.OVERRIDE_PREFIX}EXIT__{name.upper()}": v for name, v in settings.items()}
    return own | {
        "MERIDIAN_PATCH": "1",
        "MERIDIAN_PATCH_CONFIG": str(profile.resolve()),
        "VLLM_PLUGINS": envs.PLUGIN_NAME,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads of a second OpenMP worker spin against whatever else runs.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
