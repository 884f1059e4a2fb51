"""What early exit costs a real engine that closes nothing: `observe` against `off`.

    python -P scripts/bench_exit_cost.py [--requests 16,64] [--rounds 20] [--json FILE]

One engine plays requests that think to their ends, and has early exit off and on in turn, for a
few steps at a time: processes of the same code differ by more than what is looked for, and so does
one process from second to second. Each block of steps is compared with those around it that have
it off; a step brings as many tokens either way, so that this is the ratio of tokens per second.
Probes that become due while it is off are made when it is on again: of what the steps with probes
take longer than the others, half is counted.
Played with the thoughts that are observed as shipped, a sample, and with every one. Printed are
medians over the rounds with 95 % bootstrap intervals, and what the calls of a step take. What an
API server does beside the engine is not part of it, so that a server's share is smaller, nor is
the first block of a round, with the prompts. Defaults are those of the product, the policy's too.
Nothing else should run.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from meridian_patch import envs
from meridian_patch.bench.served.plan import find_model
from meridian_patch.bench.served.server import server_environment
from meridian_patch.demo.problems import make_problems

# What requests of each kind of play ask for; without a wish they are as configured.
PLAYS: Mapping[str, Mapping[str, str]] = {
    "observe": {},
    "all": {"meridian_exit": "observe"},
}
# Of a step, in order; the last is the model.
CALLS = ("schedule", "update_from_output", "sample_tokens", "execute_model")
# Steps between one switch and the next.
BLOCK_STEPS = 32
# That users leave free for probes.
SEATS = 16
# The longest problems, so that most tokens are thinking.
STEPS = 10
RESAMPLES = 2000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--block-size", type=int, default=32, help="of the KV cache, in tokens")
    parser.add_argument("--requests", default="16,64", help="that run at once")
    parser.add_argument("--tokens", type=int, default=800, help="of each request's output")
    parser.add_argument("--rounds", type=int, default=20, help="after one to warm up")
    parser.add_argument("--json", type=Path, help="where to write every round")
    parser.add_argument("--is-child", action="store_true", help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.is_child:
        _measure(parsed)
        return
    base = {n: v for n, v in envs.environment().items() if not n.startswith(envs.PREFIX)}
    own = {
        "MERIDIAN_PATCH": "1",
        "MERIDIAN_PATCH_SET_EXIT__MODE": "observe",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    command = [sys.executable, "-P", __file__, *sys.argv[1:], "--is-child"]
    sys.exit(subprocess.run(command, env=server_environment(base) | own, check=False).returncode)


def _measure(parsed: argparse.Namespace) -> None:
    sizes = [int(text) for text in parsed.requests.split(",")]
    longest = parsed.tokens + 256
    engine = Engine(
        {
            "model": str(find_model(None)),
            "dtype": "float32",
            "enforce_eager": True,
            "seed": 0,
            "block_size": parsed.block_size,
            "max_model_len": longest,
            # There are seats for probes, and all fit, with a probe's block for each.
            "max_num_seqs": max(sizes) + SEATS,
            "num_gpu_blocks_override": max(sizes) * (longest // parsed.block_size + 2),
        }
    )
    rounds = {}
    for size in sizes:
        plays = {name: _requests(size, parsed.tokens, wish) for name, wish in PLAYS.items()}
        numbers = track(range(parsed.rounds + 1), f"{size} requests", console=Console(stderr=True))
        # Every other round begins with it on.
        played = [
            {name: engine.play(requests, number % 2) for name, requests in plays.items()}
            for number in numbers
        ][1:]
        rounds[size] = played
        _print(size, parsed.block_size, played)
    if parsed.json:
        parsed.json.write_text(json.dumps(rounds, indent=1))


def _requests(size: int, tokens: int, wish: Mapping[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "id": f"r{index}",
            "arrival_s": 0.0,
            "messages": [{"role": "user", "content": problem.question}],
            "max_tokens": tokens,
            "ignore_eos": True,
            "extra_args": dict(wish),
        }
        for index, problem in enumerate(make_problems(size, seed=1, steps=STEPS))
    ]


def _print(size: int, block_size: int, played: Sequence[Mapping[str, Any]]) -> None:
    print(f"{size} requests, blocks of {block_size}, {len(played)} rounds")
    for name in PLAYS:
        of_play = [each[name] for each in played]
        speed = statistics.median(each["tokens_per_s"] for each in of_play)
        print(
            f"  {name}: {of_play[-1]['probes']} probes a round, {speed:.0f} tokens/s, "
            f"preemptions {of_play[-1]['preemptions']}"
        )
        print(f"    tokens/s, on/off: {_spread([1 / (1 + each['more']) for each in of_play])}")
        for call in (*CALLS, "outside"):
            off = statistics.median(each["off_us"][call] for each in of_play)
            print(f"    {call}: {off:.0f} us, on {_spread([e['more_us'][call] for e in of_play])}")
    sys.stdout.flush()


def _spread(values: Sequence[float]) -> str:
    """Their median with its 95 % bootstrap interval, and where most of them lie."""
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    p20, p80 = np.quantile(values, [0.2, 0.8])
    middle, low, high, p20, p80 = (
        f"{each:.4g}" for each in (np.median(values), low, high, p20, p80)
    )
    return f"{middle} ({low}..{high}), p20..p80 {p20}..{p80}"


class Clock:
    """Times one method of an object, call by call."""

    def __init__(self, target: Any, method: str) -> None:
        self.seconds = 0.0
        inner = getattr(target, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = inner(*args, **kwargs)
            self.seconds += time.perf_counter() - begin
            return result

        setattr(target, method, call)


class Switch:
    """Takes early exit out of a scheduler's steps and puts it back; requests go on meanwhile."""

    def __init__(self, scheduler: Any) -> None:
        self.is_on = True
        self._probes = scheduler.early_exit.probes
        self._due: dict[str, Any] = {}
        cls, busy = type(scheduler), type(scheduler)._busy_early_exit
        cls._busy_early_exit = property(lambda which: busy.fget(which) if self.is_on else None)

    def turn(self, is_on: bool) -> None:
        if is_on != self.is_on:
            self.is_on = is_on
            # The policy looks for probes that are due.
            self._due, self._probes._due = self._probes._due, self._due


class Engine:
    """A patched engine whose core is in this process, with clocks on the calls of a step."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        # Patches what is imported: only in the process that was given the environment for it.
        from meridian_patch.replay.cpu_affinity import keep_to_the_engines_core
        from meridian_patch.replay.timed_engine import TimedEngine

        keep_to_the_engines_core(envs.environment())
        self._engine = TimedEngine(arguments)
        core = self._engine.core
        self._scheduler = scheduler = core.scheduler
        if not self._engine.facts["is_patched"] or scheduler.early_exit.mode != "observe":
            raise SystemExit(f"the engine is not what it should be: {self._engine.facts}")
        owners = (scheduler, scheduler, core.model_executor, core.model_executor)
        self._clocks = {call: Clock(owner, call) for owner, call in zip(owners, CALLS, strict=True)}
        self._switch = Switch(scheduler)
        self._first = 0
        # By step: when it began, seconds of each call, and whether it had probes.
        self._steps: list[list[float]] = []
        self._step, core.step_fn = core.step_fn, self._timed_step

    def play(self, requests: list[dict[str, Any]], first: int) -> dict[str, Any]:
        """One play to its end.

        Args:
            requests: all there at once.
            first: 1: early exit is on in the first block of steps; 0: off.
        """
        gc.collect()
        self._first, self._steps = first, []
        before = self._scheduler.phase_counters.totals.get("probe:measured", 0)
        begin = time.perf_counter()
        played = self._engine.play(requests)
        seconds = time.perf_counter() - begin
        self._switch.turn(True)
        probes = self._scheduler.phase_counters.totals.get("probe:measured", 0) - before
        return self._compare() | {
            "tokens_per_s": sum(len(each["output"]) for each in played["requests"]) / seconds,
            "preemptions": played["preemptions"],
            "probes": probes,
        }

    def _timed_step(self) -> Any:
        number = len(self._steps)
        self._switch.turn((number // BLOCK_STEPS) % 2 != self._first)
        for clock in self._clocks.values():
            clock.seconds = 0.0
        begin = time.perf_counter()
        probes = self._scheduler.early_exit.probes
        before = probes.num_probes
        result = self._step()
        seconds = [clock.seconds for clock in self._clocks.values()]
        self._steps.append([begin, *seconds, probes.num_probes > before])
        return result

    def _compare(self) -> dict[str, Any]:
        """Blocks with early exit against the mean of those before and behind them.

        Returns:
            ``more``, the share of time that it adds; ``more_us`` of each call and of what is
            outside of them, a step; ``off_us``, the same without it.
        """
        steps = np.array(self._steps)
        last = (len(steps) - 1) // BLOCK_STEPS * BLOCK_STEPS
        whole = np.diff(steps[: last + 1, 0])
        calls = steps[:last, 1:-1]
        parts = np.column_stack([calls, whole - calls.sum(axis=1), whole])
        parts = parts.reshape(-1, BLOCK_STEPS, len(CALLS) + 2)
        has_probes = steps[:last, -1].reshape(-1, BLOCK_STEPS, 1).astype(bool)
        usual = np.median(parts, axis=1, keepdims=True)
        blocks = np.where(has_probes, (parts + usual) / 2, parts).mean(axis=1)
        is_on = np.arange(len(blocks)) % 2 != self._first
        # The first block has the prompts.
        inner = [i for i in range(2, len(blocks) - 1) if is_on[i]]
        on = np.array([blocks[i] for i in inner])
        off = np.array([(blocks[i - 1] + blocks[i + 1]) / 2 for i in inner])
        more, names = (on - off).mean(axis=0), (*CALLS, "outside")
        return {
            "more": more[-1] / off[:, -1].mean(),
            "more_us": dict(zip(names, (more[:-1] * 1e6).tolist(), strict=True)),
            "off_us": dict(zip(names, (off.mean(axis=0)[:-1] * 1e6).tolist(), strict=True)),
        }


if __name__ == "__main__":
    main()
