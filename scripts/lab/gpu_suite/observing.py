"""What observing early exit costs: the same batches on one engine, with and without it."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from gpu_suite.cost import fitted_arguments
from gpu_suite.suite import Context, Record
from meridian_patch.bench.arms import override
from meridian_patch.bench.simulated.timed import Play, TimedRun, run_timed_engine
from meridian_patch.errors import BenchError
from meridian_patch.replay.types import ReplayArm

# Per request; without a field the server's default holds, which observes a sample of the thoughts.
_OFF, _AGAIN, _DEFAULT, _ALL = "off", "off again", "default", "every thought"
_ASKED: dict[str, dict[str, str]] = {
    _OFF: {"meridian_exit": "off"},
    _AGAIN: {"meridian_exit": "off"},
    _DEFAULT: {},
    _ALL: {"meridian_exit": "observe"},
}
_ROWS, _REHEARSED_ROWS = (64, 256), (4,)
_PROMPT, _OUTPUT, _REHEARSED_OUTPUT = 128, 128, 96
# Random tokens have no paragraph's end, where a thought is probed by default.
_GAPS: dict[str, object] = {"exit.probe_min_gap_tokens": 32, "exit.probe_max_gap_tokens": 64}
_ROUNDS, _REHEARSED_ROUNDS = 4, 2
_TEXT_IDS = 64


def run_observing(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Decode batches of thoughts with early exit off, off again, at its default, and observing all.

    Raises:
        BenchError: the engine failed, or the tokenizer has no think markers.
    """
    rows = _REHEARSED_ROWS if context.rehearse else _ROWS
    rounds = _REHEARSED_ROUNDS if context.rehearse else _ROUNDS
    output = _REHEARSED_OUTPUT if context.rehearse else _OUTPUT
    start = _think_start(context)
    plays = {}
    for turn, number in itertools.product(range(-1, rounds), rows):
        # Another arm is first in each round; round -1 warms up.
        names = [*_ASKED] if turn >= 0 else [_ALL]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            plays[f"{turn} {number} {name}"] = list(_batch(number, output, start, turn, name))
    run = run_timed_engine(
        fitted_arguments(context),
        plays,
        ReplayArm("observing", True, override({"exit.mode": "observe", **_GAPS})),
        context.folder / "observing.engine",
        limit_s=remaining_s(),
    )
    for number in rows:
        _add_figures(run, record, number, rounds, output)
    record.notes.append(
        "All batches ran on one patched engine; off again over off is what two equal batches "
        "differ by. Stock is not among them."
    )
    return f"{len(run.plays)} of {len(plays)} batches on one engine"


def _add_figures(run: TimedRun, record: Record, number: int, rounds: int, output: int) -> None:
    """Figures of the rounds that were played to their end."""
    names = {turn: {name: f"{turn} {number} {name}" for name in _ASKED} for turn in range(rounds)}
    whole = [
        {name: run.plays[key] for name, key in of_turn.items()}
        for of_turn in names.values()
        if all(key in run.plays for key in of_turn.values())
    ]
    speeds = [
        {name: number * output / _seconds(play) for name, play in played.items()}
        for played in whole
    ]
    record.add(f"tokens per second, {number} rows, off", "1/s", [each[_OFF] for each in speeds])
    steps = [_median_step(played[_OFF]) for played in whole]
    record.add(f"median step, {number} rows, off", "s", steps)
    for name in (_AGAIN, _DEFAULT, _ALL):
        ratios = [each[name] / each[_OFF] for each in speeds]
        record.add(f"tokens per second, {number} rows, {name} over off", "", ratios)
    probes = [_more_rows(played[_ALL], number) for played in whole]
    record.add(f"rows of probes, {number} rows, {_ALL}", "", probes)


def _batch(
    number: int, output: int, start: Sequence[int], turn: int, name: str
) -> Iterator[dict[str, Any]]:
    rng = random.Random(number)
    for place in range(number):
        body = [rng.randrange(_TEXT_IDS) for _ in range(_PROMPT - len(start))]
        yield {
            "id": f"{turn}-{number}-{name}-{place}",
            "arrival_s": 0.0,
            "prompt": [*body, *start],
            "max_tokens": output,
            "ignore_eos": True,
            "extra_args": _ASKED[name],
        }


def _think_start(context: Context) -> list[int]:
    """Ids that open a thought, in the tokenizer of the sized model."""
    model = context.sized.model
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    if "<think>" not in ids:
        raise BenchError(f"{model / 'tokenizer.json'} has no added token <think>")
    return [ids["<think>"]]


def _seconds(play: Play) -> float:
    return max(request.token_s[-1] for request in play.requests)


def _median_step(play: Play) -> float:
    return median(seconds for work, seconds in play.steps if not work.prefill_tokens)


def _more_rows(play: Play, number: int) -> int:
    """Rows beside those of the batch, over all steps: each is a probe."""
    return sum(max(0, work.decode_seqs + work.prefill_seqs - number) for work, _ in play.steps)
