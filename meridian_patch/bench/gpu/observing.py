"""What observing early exit costs: the same batches on one engine, with and without it."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

from meridian_patch.bench.arms import override
from meridian_patch.bench.gpu.cost import fitted_arguments
from meridian_patch.bench.gpu.suite import Context, Record, SkippedError
from meridian_patch.bench.simulated.timed import Play, run_timed_engine
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
_PROMPT, _OUTPUT, _REHEARSED_OUTPUT = 128, 160, 48
_ROUNDS, _REHEARSED_ROUNDS = 4, 2
_TEXT_IDS = 64


def run_observing(context: Context, record: Record, _remaining_s: Callable[[], float]) -> str:
    """Decode batches of thoughts with early exit off, off again, at its default, and observing all.

    Raises:
        BenchError: the engine failed, or the tokenizer has no think markers.
        SkippedError: the model is not a directory.
    """
    rows = _REHEARSED_ROWS if context.rehearse else _ROWS
    rounds = _REHEARSED_ROUNDS if context.rehearse else _ROUNDS
    output = _REHEARSED_OUTPUT if context.rehearse else _OUTPUT
    start = _think_start(context)
    plays = {}
    for turn, number in itertools.product(range(-1, rounds), rows):
        # Another arm is first in each round; round -1 warms up.
        names = [*_ASKED]
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            plays[f"{turn} {number} {name}"] = list(_batch(number, output, start, turn, name))
    run = run_timed_engine(
        fitted_arguments(context),
        plays,
        ReplayArm("observing", True, override({"exit.mode": "observe"})),
        context.folder / "observing.engine",
    )
    for number in rows:
        tokens_per_s = {
            name: [
                number * output / _seconds(run.plays[f"{turn} {number} {name}"])
                for turn in range(rounds)
            ]
            for name in _ASKED
        }
        record.add(f"tokens per second, {number} rows, off", "1/s", tokens_per_s[_OFF])
        steps = [_median_step(run.plays[f"{turn} {number} {_OFF}"]) for turn in range(rounds)]
        record.add(f"median step, {number} rows, off", "s", steps)
        for name in (_AGAIN, _DEFAULT, _ALL):
            pairs = zip(tokens_per_s[name], tokens_per_s[_OFF], strict=True)
            ratios = [ours / off for ours, off in pairs]
            record.add(f"tokens per second, {number} rows, {name} over off", "", ratios)
    record.notes.append("off again over off is what two equal batches differ by.")
    return f"{len(rows)} batch sizes, {rounds} rounds on one engine"


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
    if isinstance(model, str):
        raise SkippedError(f"the model is {model!r}, expected a directory on this machine")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    ids = {each["content"]: each["id"] for each in tokenizer["added_tokens"]}
    if "<think>" not in ids:
        raise BenchError(f"{model / 'tokenizer.json'} has no added token <think>")
    return [ids["<think>"]]


def _seconds(play: Play) -> float:
    return max(request.token_s[-1] for request in play.requests)


def _median_step(play: Play) -> float:
    return median(seconds for work, seconds in play.steps if not work.prefill_tokens)
