"""``benches.py validate``: the same traces on a real engine and in replay."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.interrupts import EXIT_INTERRUPTED
from meridian_patch.bench.options import read_positive, read_seeds, read_whole
from meridian_patch.bench.simulated.fit_command import (
    SIZES,
    TINY_ENGINE,
    burst_plays,
    engine_arguments,
    fit_bursts,
)
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from meridian_patch.bench.simulated.timed import TimedRun
    from meridian_patch.replay.cost import CostModel
    from meridian_patch.replay.types import ReplayArm
    from validation.replays import ReplayComparison, ValidationLoad

# Seeds of the bursts that the cost model is fitted to; no trace is drawn from them.
_BURST_SEED = 1001
_WARM_UP_SEED = 1000
# vLLM refuses a pool that does not hold the longest request; one block holds no tokens.
_FEWEST_BLOCKS = SIZES["max_model_len"] // TINY_ENGINE["block_size"] + 1
# With these shares 1 step in 50 computes a prompt. With fewer, the p99 of answer gaps would lie
# between the steps with prompts and those without, and would describe neither.
_HISTORY_SHARE = 0.5
_HARD_SHARE = 0.1
# Prompts of the drawn problems, and what a preempted request computes again, are seldom longer.
_LONGEST_BURST = 512


def add_validate(benches: Any) -> None:
    """Add ``validate`` to the subcommands of ``benches.py``."""
    validate = benches.add_parser(
        "validate",
        help="the same traces on a real engine and in replay",
        description="Times a real engine on drawn problems of the tiny reasoner, replays what it "
        "did token for token with a cost model, and reports how far the figures are apart.",
    )
    validate.add_argument("--arms", default="stock,latency", help="stock, or policies")
    validate.add_argument("--seeds", default="11-13", help="of the traces (default: 11-13)")
    validate.add_argument("--requests", default="120", help="per trace (default: 120)")
    validate.add_argument("--rate", default="6", help="mean arrivals per second (default: 6)")
    validate.add_argument("--max-tokens", default="1024", help="per request (default: 1024)")
    validate.add_argument("--blocks", default="129", help="KV blocks of 32 (default: 129)")
    validate.add_argument("--rounds", default="2", help="engines per arm (default: 2)")
    validate.add_argument("--bursts", default="2", help="rounds of bursts to fit per trace")
    validate.add_argument("--cost", help="cost model (default: fitted to stock in the same run)")
    validate.add_argument("--out", type=Path, default=Path("out/bench/validate"), help="folder")
    validate.set_defaults(run=run_validate)


def run_validate(parsed: argparse.Namespace) -> int:
    """Time, replay, compare and write the results; 1 if an engine failed, 130 on Ctrl-C.

    Raises:
        BenchError: a wrong argument, or nothing can be compared.
    """
    from rich.console import Console

    from meridian_patch.bench.simulated.timed import run_timed_engine
    from meridian_patch.replay.cost import load_cost
    from validation.replays import (
        ValidationLoad,
        ratio_table,
        validation_report,
        validation_table,
    )

    load = ValidationLoad(
        read_seeds(parsed.seeds),
        read_whole("--requests", parsed.requests),
        read_positive("--rate", parsed.rate),
        read_whole("--max-tokens", parsed.max_tokens),
    )
    arms = _arms(parsed.arms)
    given = load_cost(parsed.cost) if parsed.cost else None
    if given is None and STOCK not in {arm.name for arm in arms}:
        raise BenchError(f"--arms {parsed.arms}: without --cost, {STOCK!r} is needed for the fit")
    blocks = read_whole("--blocks", parsed.blocks)
    if blocks < _FEWEST_BLOCKS:
        raise BenchError(
            f"--blocks is {blocks}, expected at least {_FEWEST_BLOCKS}, which hold one request of "
            f"{SIZES['max_model_len']} tokens"
        )
    arguments = engine_arguments(None, [f"num_gpu_blocks_override={blocks}"])
    rounds = read_whole("--rounds", parsed.rounds)
    bursts = read_whole("--bursts", parsed.bursts)
    console = Console(markup=False, emoji=False)
    # Every second round in reverse order, so that a change of the machine's speed hits all arms.
    order = [(n, arm) for n in range(rounds) for arm in (arms if n % 2 == 0 else arms[::-1])]
    runs: list[tuple[int, ReplayArm, TimedRun]] = []
    code = 0
    try:
        with console.status("") as status:
            for place, (number, arm) in enumerate(order):
                label = f"engine {place + 1} of {len(order)}, {arm.name}"
                folder = parsed.out / f"{arm.name}-{number}"
                run = run_timed_engine(
                    arguments,
                    _plays(load, arguments, arm, bursts),
                    arm,
                    folder,
                    lambda waited, label=label: status.update(f"{label}: {waited:.0f} s"),  # type: ignore[misc]
                )
                runs.append((number, arm, run))
    except KeyboardInterrupt:
        print("benches: interrupted", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except BenchError as error:
        print(f"benches: {error}", file=sys.stderr)
        code = 1
    stock = [run for _, arm, run in runs if arm.name == STOCK]
    if not runs or (given is None and not stock):
        print("benches: nothing was written", file=sys.stderr)
        return code
    cost = given or fit_bursts(stock, "measured", "tiny-reasoner")
    with console.status("replaying"):
        comparisons = _compare(runs, load.seeds, cost)
    console.print(
        validation_table(comparisons), f"cost: {cost.provenance}. {cost.derivation}", sep="\n"
    )
    over_stock = ratio_table(comparisons, STOCK)
    if over_stock is not None:
        console.print(over_stock)
    path = parsed.out / "validation.json"
    path.write_text(
        json.dumps(validation_report(comparisons, cost, load, arguments), indent=1) + "\n"
    )
    console.print(str(path), highlight=False)
    return code


def _arms(names: str) -> "list[ReplayArm]":
    from meridian_patch.bench.simulated.arms import arm_settings, named_arm
    from meridian_patch.bench.simulated.trace import History

    arms = [named_arm(name) for name in dict.fromkeys(names.split(","))]
    return [replace(arm, settings=arm_settings(arm, History.STRIPPED)) for arm in arms]


def _plays(
    load: "ValidationLoad", arguments: dict[str, Any], arm: "ReplayArm", rounds: int
) -> dict[str, list[dict[str, Any]]]:
    """A trace to warm up, then all others; on stock also bursts, to which the cost model is fitted.

    Other arms play no bursts: a policy would learn from them that thoughts are short, and the
    replay would not.
    """
    from meridian_patch.bench.served.workload import Mix, make_trace

    plays: dict[str, list[dict[str, Any]]] = {}
    mix = Mix(
        load.requests,
        load.rate_per_s,
        history_share=_HISTORY_SHARE,
        hard_share=_HARD_SHARE,
        max_tokens=load.max_tokens,
    )
    for place, seed in enumerate([_WARM_UP_SEED, *load.seeds]):
        if place and not arm.is_patched:
            seed_of_bursts = _BURST_SEED + place * rounds
            plays |= burst_plays(arguments, rounds, seed_of_bursts, _LONGEST_BURST)
        plays[_trace_name(seed)] = [
            {
                "id": request.id,
                "arrival_s": request.arrival_s,
                "messages": list(request.messages),
                "max_tokens": request.max_tokens,
            }
            for request in make_trace(mix, seed)
        ]
    return plays


def _trace_name(seed: int) -> str:
    return f"trace {seed}"


def _compare(
    runs: "Sequence[tuple[int, ReplayArm, TimedRun]]", seeds: Sequence[int], cost: "CostModel"
) -> "list[ReplayComparison]":
    from validation.replays import compare

    names = {seed: _trace_name(seed) for seed in (_WARM_UP_SEED, *seeds)}
    return [c for number, arm, run in runs for c in compare(run, names, arm, cost, number)]
