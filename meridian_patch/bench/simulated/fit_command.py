"""``meridian bench fit-cost``: a cost model from timed steps of a real engine."""

import argparse
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from meridian_patch.bench.arms import STOCK
from meridian_patch.bench.interrupts import EXIT_INTERRUPTED
from meridian_patch.bench.options import read_whole
from meridian_patch.config.validate import shown
from meridian_patch.config.yaml_file import Dumper, parse_value
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from meridian_patch.bench.simulated.timed import TimedRun
    from meridian_patch.replay.cost import CostModel

_WIDTH = 98
BURST = "burst"
WARM_UP = "warm-up"
_WARM_UP_SEED = 0
DEFAULT_ROUNDS = "8"
# Sizes that the tiny reasoner is served with; a real model is fitted with its own.
SIZES = {"max_num_seqs": 40, "max_num_batched_tokens": 512, "max_model_len": 2048}
TINY_ENGINE: dict[str, Any] = {"dtype": "float32", "block_size": 32, "enforce_eager": True}


def add_fit_cost(benches: Any) -> None:
    """Add ``fit-cost`` to the benches of the ``meridian`` command."""
    fit = benches.add_parser(
        "fit-cost",
        help="a cost model from timed steps of a real engine",
        description="Runs a model on a stock engine in its own process, times steps of many "
        "shapes, and fits a cost model to them.",
    )
    fit.add_argument("--model", type=Path, help="directory (default: the tiny reasoner)")
    fit.add_argument("--out", type=Path, required=True, metavar="FILE.yaml", help="cost model")
    fit.add_argument("--name", help="of the cost model (default: the file's)")
    fit.add_argument("--rounds", default=DEFAULT_ROUNDS, help="of bursts of 1 to 2 x max_num_seqs")
    fit.add_argument(
        "--longest",
        help="tokens of the longest request (default: max_model_len); a fit is best where the "
        "requests that are to be replayed have the same range",
    )
    fit.add_argument("--seed", default="1", help="of prompts and lengths (default: 1)")
    fit.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of vllm.LLM, such as max_num_seqs=256 or load_format=dummy",
    )
    fit.set_defaults(run=run_fit_cost)


def run_fit_cost(parsed: argparse.Namespace) -> int:
    """Time, fit and write; 130 on Ctrl-C.

    Raises:
        BenchError: a wrong argument, or the engine failed.
    """
    from rich.console import Console

    from meridian_patch.bench.interrupts import end_like_ctrl_c
    from meridian_patch.bench.simulated.timed import run_timed_engine
    from meridian_patch.replay.cost import SUFFIX
    from meridian_patch.replay.types import ReplayArm

    rounds, seed = read_whole("--rounds", parsed.rounds), read_whole("--seed", parsed.seed)
    arguments = engine_arguments(parsed.model, parsed.engine)
    if parsed.out.suffix != SUFFIX:
        raise BenchError(f"--out is {parsed.out}, expected a file that ends in {SUFFIX}")
    end_like_ctrl_c()
    console = Console(markup=False, emoji=False)
    longest = read_whole("--longest", parsed.longest or str(arguments["max_model_len"]))
    if longest > arguments["max_model_len"]:
        raise BenchError(
            f"--longest is {longest}, expected at most max_model_len, {arguments['max_model_len']}"
        )
    plays = burst_plays(arguments, rounds, seed, longest)
    try:
        with console.status("timing an engine") as status:
            run = run_timed_engine(
                arguments,
                plays,
                ReplayArm(STOCK),
                parsed.out.parent / f"{parsed.out.stem}.engine",
                lambda waited: status.update(f"timing an engine, {waited:.0f} s"),
            )
    except KeyboardInterrupt:
        print("meridian: interrupted, nothing was written", file=sys.stderr)
        return EXIT_INTERRUPTED
    cost = fit_bursts([run], parsed.name or parsed.out.stem, Path(arguments["model"]).name)
    write_cost(parsed.out, cost)
    console.print(f"{cost.provenance}. {cost.derivation}\n{parsed.out}", highlight=False)
    return 0


def engine_arguments(model: Path | None, texts: Sequence[str]) -> dict[str, Any]:
    """Arguments of ``vllm.LLM``.

    Args:
        model: directory, or None for the tiny reasoner.
        texts: ``NAME=VALUE`` with values as in YAML; they override the defaults.

    Raises:
        BenchError: no such directory, or a text of another form.
        ConfigError: a value that is no YAML.
    """
    if model is not None and not (model / "config.json").is_file():
        raise BenchError(f"--model {model}: no config.json in it; give the directory of a model")
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise BenchError(f"--engine is {text!r}, expected NAME=VALUE such as max_num_seqs=256")
        given[name] = parse_value(value, f"--engine {name}")
    for name in SIZES:
        size = given.get(name, 1)
        # A bool is an int in Python.
        if type(size) is not int or size < 1:
            raise BenchError(f"--engine {name} is {shown(size)}, expected a whole number above 0")
    if model is not None:
        return {"model": str(model), **SIZES, **given}
    # Late: it imports vLLM.
    from meridian_patch.replay.scheduler import replay_model

    return {"model": str(replay_model()), **SIZES, **TINY_ENGINE, **given}


def burst_plays(
    arguments: Mapping[str, Any], rounds: int, seed: int, longest: int
) -> dict[str, list[dict[str, Any]]]:
    """Bursts that time steps of many shapes, by name, after a warm-up.

    Args:
        arguments: of ``vllm.LLM``.
        rounds: number of times that all bursts are played.
        seed: of the first round.
        longest: upper bound of the tokens of a request.
    """
    from meridian_patch.bench.simulated.timed import bursts

    at_once = arguments["max_num_seqs"]
    plays = {WARM_UP: [r for burst in bursts(at_once, longest, _WARM_UP_SEED) for r in burst]}
    for number in range(seed, seed + rounds):
        for place, burst in enumerate(bursts(at_once, longest, number)):
            plays[f"{BURST} {number} {place}"] = burst
    return plays


def fit_bursts(runs: "Sequence[TimedRun]", name: str, model: str) -> "CostModel":
    """Fit a cost model to engines that played bursts, all on the same machine."""
    from meridian_patch.bench.machine import describe_machine
    from meridian_patch.bench.simulated.fit import fit_steps, residuals

    plays = [p for r in runs for title, p in r.plays.items() if title.startswith(BURST)]
    steps = [step for play in plays for step in play.steps]
    longest = max(len(r.prompt) + len(r.output) for play in plays for r in play.requests)
    fit = fit_steps(steps)
    found = residuals(fit, steps)
    machine = replace(describe_machine(), accelerator=runs[0].accelerator)
    where = machine.accelerator or f"{machine.cpu}, {machine.cores} cores"
    limits = runs[0].limits
    form = (
        "Memory and compute overlap."
        if fit.overlap
        else "Memory and compute are added up, for an overlap explains the steps no better; "
        "weights_s is within fixed_s."
    )
    derivation = (
        f"{model} on {machine.vllm}, stock, {'a' if runs[0].is_async else ''}synchronous "
        f"scheduling, at most {limits.max_num_seqs} sequences and {limits.max_num_batched_tokens} "
        f"tokens a step. Fitted to {len(steps)} steps of random requests of up to {longest} "
        "tokens, by non-negative least squares with Huber's loss of the relative error. A step "
        "lasts from one delivery to the next, so fixed_s and row_s hold scheduling, input "
        f"preparation and sampling. {form} Distance of a step from its prediction: p50 "
        f"{found.p50:.1%}, p90 {found.p90:.1%}; predicted over timed seconds of all steps: "
        f"{found.total:.3f}."
    )
    return fit.as_cost(name, f"measured on {where}", derivation)


def write_cost(path: Path, cost: "CostModel") -> None:
    """Write a cost model as ``load_cost`` reads it."""
    values = cost.model_dump(exclude_none=True)
    lines = textwrap.wrap(values.pop("derivation"), _WIDTH - 2)
    derivation = "\n  ".join(["derivation: >-", *lines])
    rest = yaml.dump(values, Dumper=Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{rest}{derivation}\n")
