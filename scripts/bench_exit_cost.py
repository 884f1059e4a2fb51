"""What early exit costs a real engine that closes nothing: `observe` against `off` and stock.

    python -P scripts/bench_exit_cost.py [--block-size 32] [--requests 16,64] [--rounds 9]

Engines of all arms are started first. Then each round plays the same requests on each arm in turn,
the others stopped; every request makes the same number of tokens on all of them. A round gives
ratios of tokens per second; printed are their medians, p20 and p80, and the extremes. What an API
server does beside the engine is not part of it, so that a server's share is smaller. Defaults are
those of the product, the policy's too. Nothing else should run.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.bench.server import server_environment
from meridian_patch.demo.problems import make_problems
from meridian_patch.engine.cores import keep_to_the_engines_core
from meridian_patch.engine.timed_engine import TimedEngine

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "meridian_patch" / "demo" / "tiny-reasoner"
STOCK = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}
ARMS = {
    "observe": {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_SET_EXIT__MODE": "observe"},
    # Every thought, not a sample.
    "all": {
        "MERIDIAN_PATCH": "1",
        "MERIDIAN_PATCH_SET_EXIT__MODE": "observe",
        "MERIDIAN_PATCH_SET_EXIT__OBSERVED_AT_A_TIME": "1000",
    },
    "off": {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_SET_EXIT__MODE": "off"},
    "stock": STOCK,
}
# Of a step, in order; the last is the model.
CALLS = ("schedule", "update_from_output", "sample_tokens", "execute_model")
THINK_END = 257
# The longest problems, so that most tokens are thinking.
STEPS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-size", type=int, default=32, help="of the KV cache, in tokens")
    parser.add_argument("--requests", default="16,64", help="that run at once")
    parser.add_argument("--tokens", type=int, default=600, help="of each request's output")
    parser.add_argument("--rounds", type=int, default=9, help="after one to warm up")
    parser.add_argument("--json", type=Path, help="where to write every round")
    parsed = parser.parse_args()
    sizes = [int(text) for text in parsed.requests.split(",")]
    longest = parsed.tokens + 256
    engine = {
        "model": str(MODEL),
        "dtype": "float32",
        "enforce_eager": True,
        "seed": 0,
        "block_size": parsed.block_size,
        "max_model_len": longest,
        "max_num_seqs": max(sizes),
        # All fit, and a probe's block for each.
        "num_gpu_blocks_override": max(sizes) * (longest // parsed.block_size + 2),
    }
    rounds: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        engines = {name: Engine(name, env, engine, Path(folder)) for name, env in ARMS.items()}
        try:
            for size in sizes:
                rounds[str(size)] = played = _rounds(engines, size, parsed.tokens, parsed.rounds)
                _print(size, parsed.block_size, played)
        finally:
            for each in engines.values():
                each.end()
    if parsed.json:
        parsed.json.write_text(json.dumps({"engine": engine, "rounds": rounds}, indent=1))


class Engine:
    """An engine in a process of its own, stopped while it has nothing to play."""

    def __init__(
        self, name: str, env: Mapping[str, str], arguments: Mapping[str, Any], folder: Path
    ) -> None:
        dropped = ("VLLM_PLUGINS", envs.PREFIX)
        base = {n: v for n, v in envs.environment().items() if not n.startswith(dropped)}
        core = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._answers = folder / f"{name}.jsonl"
        self._answers.touch()
        self._log = (folder / f"{name}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, "--child", str(self._answers), json.dumps(arguments)],
            env=server_environment(base) | core | env,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        self._num_answers = 0
        facts = self._answer()
        if facts["is_patched"] != (env is not STOCK):
            raise SystemExit(f"the engine of {name} is not what it should be: {facts}")
        os.killpg(self._process.pid, signal.SIGSTOP)

    def play(self, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Play to the end; see ``_child`` for what comes back."""
        os.killpg(self._process.pid, signal.SIGCONT)
        assert self._process.stdin
        self._process.stdin.write(json.dumps(requests) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        os.killpg(self._process.pid, signal.SIGSTOP)
        return answer

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _answer(self) -> dict[str, Any]:
        while True:
            lines = self._answers.read_text().splitlines(keepends=True)
            if len(lines) > self._num_answers and lines[-1].endswith("\n"):
                self._num_answers += 1
                return dict(json.loads(lines[-1]))
            if self._process.poll() is not None:
                tail = Path(self._log.name).read_text(errors="replace")[-3000:]
                raise SystemExit(f"an engine ended; the end of its log:\n{tail}")
            time.sleep(0.05)


def _rounds(
    engines: Mapping[str, Engine], size: int, tokens: int, number: int
) -> list[dict[str, Any]]:
    requests = [
        {
            "id": f"r{index}",
            "arrival_s": 0.0,
            "messages": [{"role": "user", "content": problem.question}],
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        for index, problem in enumerate(make_problems(size, seed=1, steps=STEPS))
    ]
    played = []
    for turn in range(number + 1):
        first = turn % len(engines)
        names = [*list(engines)[first:], *list(engines)[:first]]
        played.append({name: engines[name].play(requests) for name in names})
    return played[1:]


def _print(size: int, block_size: int, played: list[dict[str, Any]]) -> None:
    speeds = {name: [each[name]["tokens_per_s"] for each in played] for name in ARMS}
    think = statistics.mean(each["observe"]["think_share"] for each in played)
    probes = played[-1]["observe"]["counted"].get("probe:measured", 0)
    print(f"{size} requests, blocks of {block_size}, {len(played)} rounds; thinking {think:.0%} of")
    print(f"the tokens, {probes} probes per round")
    for name, values in speeds.items():
        print(f"  {name:9} {statistics.median(values):8.0f} tokens/s")
    _print_calls(played)
    for one, other in combinations(ARMS, 2):
        ratios = sorted(a / b for a, b in zip(speeds[one], speeds[other], strict=True))
        cuts = statistics.quantiles(ratios, n=5, method="inclusive")
        print(
            f"  {one}/{other}: {statistics.median(ratios):.4f} (p20..p80 {cuts[0]:.4f}.."
            f"{cuts[-1]:.4f}, all {ratios[0]:.4f}..{ratios[-1]:.4f})"
        )
    sys.stdout.flush()


def _print_calls(played: Sequence[Mapping[str, Any]]) -> None:
    """What a step's calls take, which other work on the machine blurs less than a whole play."""
    median = statistics.median
    for name in ARMS:
        calls = {call: median(each[name]["p50_us"][call] for each in played) for call in CALLS}
        beside = [sum(each[name]["p50_us"][call] for call in CALLS[:-1]) for each in played]
        before = [sum(each["off"]["p50_us"][call] for call in CALLS[:-1]) for each in played]
        step = [sum(each["off"]["p50_us"].values()) for each in played]
        more = median((a - b) / c for a, b, c in zip(beside, before, step, strict=True))
        said = ", ".join(f"{call} {value:.0f}" for call, value in calls.items())
        print(f"  {name:9} p50 of a step's calls, us: {said}; beside the model {more:+.1%} of off")


class Timed:
    """Times every call of one method of an object."""

    def __init__(self, target: Any, method: str) -> None:
        self.seconds: list[float] = []
        inner = getattr(target, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)
            return result

        setattr(target, method, call)

    def drain_p50_us(self) -> float:
        seconds, self.seconds = self.seconds, []
        return statistics.median(seconds) * 1e6


def _child(answers: Path, arguments: dict[str, Any]) -> None:
    """Play what comes on standard input and write what it took, a line each."""
    keep_to_the_engines_core(envs.environment())
    engine = TimedEngine(arguments)
    scheduler = engine._core.scheduler
    executor = engine._core.model_executor
    owners = (scheduler, scheduler, executor, executor)
    timed = {call: Timed(owner, call) for owner, call in zip(owners, CALLS, strict=True)}
    counted: dict[str, int] = {}
    with answers.open("a") as sink:
        print(json.dumps(engine.facts), file=sink, flush=True)
        for line in sys.stdin:
            gc.collect()
            begin, cpu = time.perf_counter(), time.process_time()
            played = engine.play(json.loads(line))
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            outputs = [request["output"] for request in played["requests"]]
            tokens = sum(map(len, outputs))
            before = counted
            counted = dict(getattr(scheduler, "phase_counters", _Nothing).totals)
            answer = {
                "tokens_per_s": tokens / seconds,
                "tokens": tokens,
                "cpu_s": cpu,
                "p50_us": {call: each.drain_p50_us() for call, each in timed.items()},
                "steps": len(played["steps"]),
                "preemptions": played["preemptions"],
                "think_share": sum(map(_think_tokens, outputs)) / tokens,
                "counted": {name: n - before.get(name, 0) for name, n in counted.items()},
            }
            print(json.dumps(answer), file=sink, flush=True)


class _Nothing:
    totals: Mapping[str, int] = {}


def _think_tokens(output: list[int]) -> int:
    return output.index(THINK_END) + 1 if THINK_END in output else len(output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(Path(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
