"""Plays requests on real engines in child processes, and reads the times of their steps."""

import itertools
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.bench.child import Child, log_tail
from meridian_patch.bench.served.server import server_environment
from meridian_patch.errors import BenchError
from meridian_patch.replay.types import EngineLimits, ReplayArm, StepWork

_MODULE = "meridian_patch.replay.timed_engine"
_POLL_S = 0.25
_TERMINATE_S = 10.0
# Every vocabulary has more ids than this, and the special ids of the tiny reasoner are above it.
_BURST_IDS = 256
_BURST_OUTPUT = (4, 48)
_SHORTEST_PROMPT = 8
# Between requests that arrive one by one: some steps of a small model, one of a large model.
_MEAN_GAP_S = 0.02

Step = tuple[StepWork, float]
Plays = Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class TimedRequest:
    """One request as the engine had it; times in seconds from the start of the play.

    Attributes:
        prompt, output: token ids.
        token_s: when each output token was delivered.
    """

    id: str
    arrival_s: float
    max_tokens: int
    prompt: list[int]
    output: list[int]
    token_s: list[float]


@dataclass(frozen=True)
class Play:
    """What an engine did with one list of requests.

    Attributes:
        steps: work and seconds of each step.
        preemptions: number of preemptions.
    """

    steps: list[Step]
    requests: list[TimedRequest]
    preemptions: int


@dataclass(frozen=True)
class TimedRun:
    """One engine from start to end.

    Attributes:
        blocks: KV blocks that requests can use.
        accelerator: None on a CPU.
        plays: by name.
    """

    limits: EngineLimits
    blocks: int
    is_async: bool
    accelerator: str | None
    plays: dict[str, Play]


def run_timed_engine(
    arguments: Mapping[str, Any],
    plays: Plays,
    arm: ReplayArm,
    folder: Path,
    on_wait: Callable[[float], None] = lambda _: None,
    limit_s: float = math.inf,
) -> TimedRun:
    """Start an engine in its own process, play on it, and end it.

    Args:
        arguments: of ``vllm.LLM``.
        plays: by name, requests as ``meridian_patch.replay.timed_engine`` reads them.
        arm: stock, or the patch and its settings.
        folder: for the job, the result and the log.
        on_wait: called several times a second with the seconds waited so far.
        limit_s: when it is over, the engine is ended, and the plays so far count.

    Raises:
        BenchError: the engine failed, or no play has ended; the message holds the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    job, result, log = (folder / name for name in ("job.json", "result.json", "log.txt"))
    job.write_text(json.dumps({"engine": dict(arguments), "plays": plays}))
    result.unlink(missing_ok=True)
    # -P keeps the working directory off sys.path: see ServerSettings.arguments.
    command = [sys.executable, "-P", "-m", _MODULE, str(job), str(result)]
    with Child(command, _environment(arm), log, _TERMINATE_S) as engine:
        begin = time.monotonic()
        while engine.code is None and time.monotonic() - begin < limit_s:
            on_wait(time.monotonic() - begin)
            time.sleep(_POLL_S)
        is_over = engine.code is None
    found = json.loads(result.read_text()) if result.is_file() else None
    if found is None or (len(found["plays"]) < len(plays) and not is_over):
        what = f"the engine of arm {arm.name} ended with exit code {engine.code}"
        what = f"no play of arm {arm.name} ended within {limit_s:.0f} s" if is_over else what
        raise BenchError(f"{what} before it was done. {log_tail(log)}")
    return _read(found, arm)


def bursts(most_at_once: int, longest: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Lists of requests with random prompts: 1, 2, 4, ... requests, all at once and one by one.

    Requests at once give steps full of prompt tokens, then steps of many decodes. Requests one by
    one give the steps between: one prompt beside some decodes. The last number is twice what runs
    at once. Prompt lengths are log-uniform.

    Args:
        most_at_once: upper bound of the requests that run at once.
        longest: upper bound of the tokens of a request, prompt and output together.
        seed: of lengths and tokens.
    """
    rng = random.Random(seed)
    names = itertools.count()
    numbers = [2**power for power in range(most_at_once.bit_length())]
    for number, mean_gap_s in itertools.product([*numbers, 2 * most_at_once], (0.0, _MEAN_GAP_S)):
        burst = []
        arrival_s = 0.0
        for _ in range(number):
            arrival_s += mean_gap_s * rng.expovariate(1.0)
            output = rng.randint(*_BURST_OUTPUT)
            span = max(1.0, (longest - output) / _SHORTEST_PROMPT)
            prompt = int(_SHORTEST_PROMPT * span ** rng.random())
            burst.append(
                {
                    "id": f"{seed}-{next(names)}",
                    "arrival_s": arrival_s,
                    "prompt": [rng.randrange(_BURST_IDS) for _ in range(prompt)],
                    "max_tokens": output,
                    "ignore_eos": True,
                }
            )
        yield burst


def _environment(arm: ReplayArm) -> dict[str, str]:
    dropped = ("VLLM_PLUGINS", envs.PREFIX)
    base = {n: v for n, v in envs.environment().items() if not n.startswith(dropped)}
    # As in the replay that this is compared with.
    policy_only = {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_SET_EXIT__MODE": "off"}
    activation = {**policy_only, **arm.settings} if arm.is_patched else {}
    stock = {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""}
    # The engine core stays in the process, where its steps can be timed.
    core = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return server_environment(base) | core | (activation or stock)


def _read(result: dict[str, Any], arm: ReplayArm) -> TimedRun:
    facts = result["engine"]
    if facts["is_patched"] != arm.is_patched:
        raise BenchError(
            f"the engine of arm {arm.name} runs {'patched' if facts['is_patched'] else 'stock'}; "
            "run 'meridian status' to see what is loaded"
        )
    limits = EngineLimits(**{name: facts[name] for name in EngineLimits.__annotations__})
    plays = {
        name: Play(
            steps=[(StepWork(*work), seconds) for *work, seconds in play["steps"]],
            requests=[
                TimedRequest(**{name: request[name] for name in TimedRequest.__annotations__})
                for request in play["requests"]
            ],
            preemptions=play["preemptions"],
        )
        for name, play in result["plays"].items()
    }
    return TimedRun(limits, facts["blocks"], facts["is_async"], facts["accelerator"], plays)
