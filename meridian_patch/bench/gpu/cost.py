"""A cost model of the machine, fitted to timed steps of a stock engine."""

from collections.abc import Callable
from pathlib import Path

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.gpu.suite import Context, Record, SkippedError
from meridian_patch.bench.simulated.fit_command import (
    burst_plays,
    engine_arguments,
    fit_bursts,
    write_cost,
)
from meridian_patch.bench.simulated.timed import run_timed_engine
from meridian_patch.replay.types import ReplayArm

_SEED = 1
_ROUNDS, _REHEARSED_ROUNDS = 4, 2
_REHEARSED_LONGEST = 64
_REHEARSED = ("max_num_seqs=4", "max_model_len=256")
_SECONDS = ("fixed_s", "prefill_s", "row_s", "weights_s", "kv_read_s_per_token", "token_s")


def run_fit(context: Context, record: Record, _remaining_s: Callable[[], float]) -> str:
    """Time steps of many shapes and fit a cost model, which the replay bench takes.

    Raises:
        BenchError: the engine failed, or no cost model fits.
        SkippedError: the model is not a directory.
    """
    if not isinstance(context.model, Path):
        raise SkippedError(f"the model is {context.model!r}, expected a directory on this machine")
    texts = list(_REHEARSED) if context.rehearse else []
    if context.is_tiny and context.accelerator:
        texts += ["dtype=bfloat16", "enforce_eager=false"]
    if context.is_dummy:
        texts.append("load_format=dummy")
    arguments = engine_arguments(None if context.is_tiny else context.model, texts)
    longest = _REHEARSED_LONGEST if context.rehearse else arguments["max_model_len"]
    rounds = _REHEARSED_ROUNDS if context.rehearse else _ROUNDS
    run = run_timed_engine(
        arguments,
        burst_plays(arguments, rounds, _SEED, longest),
        ReplayArm(STOCK),
        context.folder / "cost.engine",
    )
    model = context.model.name
    cost = fit_bursts([run], "gpu-suite", model)
    write_cost(context.folder / "cost.yaml", cost)
    for name in _SECONDS:
        record.add(name, "s", [getattr(cost, name)])
    record.notes.append(cost.derivation)
    return f"cost.yaml, {cost.provenance}"
