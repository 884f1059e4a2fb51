"""Plays an arm on a workload in a worker process, and keeps what the page of arms needs."""

import ast
import hashlib
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import meridian_patch
from arms.base import build_arm
from arms.facts import Facts, Lengths
from arms.registry import ARMS, sources
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.figure_table import Figures
from meridian_patch.bench.simulated.arms import named_arm
from meridian_patch.bench.simulated.run import Offer, ReplayJob, run_job
from meridian_patch.bench.simulated.trace import TraceRequest
from meridian_patch.replay.cost import DEFAULT_COST, load_cost
from meridian_patch.replay.scheduler import MAX_BATCHED_TOKENS, read_template_tokens
from meridian_patch.replay.types import ReplayArm

# A request is served well if its TTFAT slowdown and the p99 of its own answer gaps, over the p99 of
# the run's steps that only decode, stay within these.
MAX_SLOWDOWN = 5.0
MAX_DECODE_STEPS = 1.25
# Thinkers that count as the longest.
LONGEST_SHARE = 0.01
_PACKAGE = Path(meridian_patch.__file__).parent
# What decides how a replay goes, beside the arm.
_LAB = ("replay/*.py", *(f"bench/simulated/{name}.py" for name in (
    "arms", "cost", "lengths", "metrics", "run", "source", "trace", "workloads",
)))  # fmt: skip
# Ours depends on these, too.
_OURS = ("config/**/*.py", "engine/**/*.py", "exit/**/*.py", "phase/**/*.py", "policy/**/*.py")


class Key(NamedTuple):
    """One replay; a line of the results is found by it."""

    workload: str
    pool: int
    rate: float
    seed: int
    requests: int
    arm: str
    settings: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Line:
    """The result of one replay.

    Attributes:
        code: digest of the sources that decide it.
        figures: of the whole replay, by name.
        slowdown, steps: by request in the order of ids; ``steps`` is the p99 of its answer gaps
            over a step that only decodes.
        wall_s: real time.
    """

    key: Key
    code: str
    figures: Figures
    slowdown: list[float]
    steps: list[float]
    wall_s: float


def play(job: tuple[Key, str]) -> Line:
    """Replay one arm on one seed.

    Args:
        job: what to replay, and the digest of the arm's code.

    Raises:
        BenchError: the arm or the workload is unknown, or the pool too small.
    """
    key, code = job
    replay = ReplayJob(
        Offer(key.workload, key.requests), key.seed, _arm(key), key.rate, key.pool, DEFAULT_COST
    )
    trace = replay.trace()
    if key.arm in ARMS:
        entry = ARMS[key.arm]
        build = partial(
            build_arm,
            mixin=entry.mixin,
            facts=_facts(trace, key.seed),
            settings={**entry.settings, **dict(key.settings)},
        )
        replay = replace(replay, arm=replace(replay.arm, build_scheduler=build))
    run = run_job(replay)
    requests, decode_s = run.requests, run.figures["decode_only_step_p99_s"] or np.inf
    steps = requests.answer_itl_p99_s / decode_s
    is_well = (requests.slowdown <= MAX_SLOWDOWN) & (steps <= MAX_DECODE_STEPS)
    thoughts = {request.id: request.think_tokens for request in trace}
    longest = np.argsort([-thoughts[name] for name in requests.ids], kind="stable")
    count = max(1, round(LONGEST_SHARE * len(requests.ids)))
    figures = {
        **run.figures,
        "ok_share": float(is_well.mean()),
        "longest_slowdown": float(requests.slowdown[longest[:count]].mean()),
    }
    rounded = (np.round(values, 4).tolist() for values in (requests.slowdown, steps))
    return Line(key, code, figures, *rounded, round(run.wall_s, 2))


@cache
def digest(arm: str) -> str:
    """Of the code that an arm's replays depend on: results of other code are not used.

    Comments, docstrings and layout do not count.
    """
    patterns = _LAB if arm in (STOCK, *ARMS) else (*_LAB, *_OURS)
    files = [path for pattern in patterns for path in sorted(_PACKAGE.glob(pattern))]
    files.append(Path(__file__))
    settings = ""
    if arm in ARMS:
        files += sources(ARMS[arm].mixin)
        settings = repr(sorted(ARMS[arm].settings.items()))
    text = "".join(map(_code, files)) + settings
    return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _code(path: Path) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.dump(tree)


def _arm(key: Key) -> ReplayArm:
    return ReplayArm(key.arm) if key.arm in ARMS else named_arm(key.arm)


def _facts(trace: list[TraceRequest], seed: int) -> Facts:
    cost, template = load_cost(DEFAULT_COST), read_template_tokens()
    # The boundary belongs to the thought, and the stop token to the answer.
    lengths = {
        each.id: Lengths(each.think_tokens + bool(each.think_tokens), each.answer_tokens + 1)
        for each in trace
    }
    return Facts(cost.step_seconds, MAX_BATCHED_TOKENS, template.think_end, seed, lengths)
