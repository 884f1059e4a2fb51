"""A cost model of the machine, fitted to timed steps of a stock engine."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpu_suite.suite import Context, Record
from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.simulated.fit_command import (
    BURST,
    WARM_UP,
    engine_arguments,
    fit_bursts,
    write_cost,
)
from meridian_patch.bench.simulated.timed import run_timed_engine
from meridian_patch.replay.types import ReplayArm

_SEED = 1
_TEXT_IDS = 64
_OUTPUT, _REHEARSED_OUTPUT = 32, 24
# Sequences that decode at once, and the context of each: they fit into the KV pool of an 80 GB GPU.
# What a fit needs most comes first.
_GRID = (
    *((8, 128), (32, 256), (256, 64), (64, 512), (8, 2048)),
    *((128, 1024), (256, 512), (16, 8192), (8, 16384)),
)
_REHEARSED_GRID = ((1, 16), (2, 64), (4, 16), (4, 96), (4, 200))
# Prompts that are computed alone, and beside sequences that decode.
_CHUNKS, _REHEARSED_CHUNKS = (64, 128, 256, 512, 1024, 2048), (32, 128, 224)
_BESIDE, _REPEATS = 32, 4
_CHUNK_GAP_S = 0.06
_BUDGET, _SEQUENCES, _LONGEST = 8192, 256, 16896
# Fewer than vLLM's 51, which take a minute of each start.
_GRAPHS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
# Of all servers of a shape. Engines have the same, so that one finds what another has compiled.
SIZES_OF_SHAPES = (
    *("--max-num-batched-tokens", str(_BUDGET), "--max-num-seqs", str(_SEQUENCES)),
    *("--max-model-len", str(_LONGEST), "--cudagraph-capture-sizes", *map(str, _GRAPHS)),
)
_REHEARSED = ("max_num_seqs=4", "max_model_len=256")
_SECONDS = ("fixed_s", "prefill_s", "row_s", "weights_s", "kv_read_s_per_token", "token_s")

Requests = list[dict[str, Any]]


def run_fit(context: Context, record: Record, remaining_s: Callable[[], float]) -> str:
    """Time steps of many shapes and fit a cost model, which the replay bench takes.

    Raises:
        BenchError: the engine failed, or no cost model fits.
    """
    arguments = fitted_arguments(context)
    plays = grid_plays(rehearse=context.rehearse, longest=arguments["max_model_len"])
    folder = context.folder / "cost.engine"
    run = run_timed_engine(arguments, plays, ReplayArm(STOCK), folder, limit_s=remaining_s())
    cost = fit_bursts([run], "gpu-suite", Path(arguments["model"]).name)
    write_cost(context.folder / "cost.yaml", cost)
    for name in _SECONDS:
        record.add(name, "s", [getattr(cost, name)])
    record.add("KV pool", "tokens", [run.blocks * run.limits.block_size])
    for rows, length in _REHEARSED_GRID if context.rehearse else _GRID:
        play = run.plays.get(f"{BURST} {rows} x {length}")
        steps = play.steps if play else []
        times = [seconds for work, seconds in steps if work.decode_seqs == rows]
        record.add(f"step of {rows} rows with {length} tokens each", "s", times)
    record.notes.append(cost.derivation)
    return f"cost.yaml, {cost.provenance}, {len(run.plays)} of {len(plays)} plays"


def fitted_arguments(context: Context) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` for an engine whose steps are timed."""
    served = context.sized
    texts = [f"max_num_seqs={_SEQUENCES}", f"max_num_batched_tokens={_BUDGET}"]
    if served.is_dummy:
        texts += [f"max_model_len={_LONGEST}", f"cudagraph_capture_sizes={[*_GRAPHS]}"]
    texts = list(_REHEARSED) if context.rehearse else texts
    if context.accelerator:
        texts += ["dtype=bfloat16", f"enforce_eager={str(context.is_eager).lower()}"]
    if served.is_dummy:
        texts.append("load_format=dummy")
    return engine_arguments(None if served.is_tiny else served.model, texts)


def grid_plays(*, rehearse: bool, longest: int) -> dict[str, Requests]:
    """Requests that time decode steps over rows and contexts, and prompts of many sizes.

    Args:
        rehearse: tiny sizes.
        longest: most tokens of a request.
    """
    rng = random.Random(_SEED)
    output = _REHEARSED_OUTPUT if rehearse else _OUTPUT
    grid = _REHEARSED_GRID if rehearse else _GRID
    plays = {WARM_UP: _at_once("warm-up", rng, 4, 16, output)}
    for beside in (0, 1 if rehearse else _BESIDE):
        name = f"{BURST} prompts beside {beside}"
        plays[name] = [*_prompts(name, rng, beside, longest, rehearse=rehearse)]
    for rows, length in grid:
        if length + output <= longest:
            name = f"{BURST} {rows} x {length}"
            plays[name] = _at_once(name, rng, rows, length, output)
    return plays


def _at_once(name: str, rng: random.Random, rows: int, length: int, output: int) -> Requests:
    return [_request(f"{name} {place}", rng, 0.0, length, output) for place in range(rows)]


def _prompts(
    name: str, rng: random.Random, beside: int, longest: int, *, rehearse: bool
) -> Iterator[dict[str, Any]]:
    """Prompts of one token of output each, one by one, while some sequences decode."""
    chunks = [size for size in (_REHEARSED_CHUNKS if rehearse else _CHUNKS) if size < longest]
    lasts = _REPEATS * len(chunks)
    # They decode as long as prompts come: a step lasts some milliseconds.
    decoding = min(longest - 128, int(lasts * _CHUNK_GAP_S / 0.008))
    for place in range(beside):
        yield _request(f"{name} decoding {place}", rng, 0.0, 64, max(decoding, 8))
    for place, size in enumerate(chunks * _REPEATS):
        yield _request(f"{name} {place}", rng, 0.2 + place * _CHUNK_GAP_S, size, 1)


def _request(
    name: str, rng: random.Random, arrival_s: float, length: int, output: int
) -> dict[str, Any]:
    return {
        "id": name,
        "arrival_s": arrival_s,
        "prompt": [rng.randrange(_TEXT_IDS) for _ in range(length)],
        "max_tokens": output,
        "ignore_eos": True,
    }
