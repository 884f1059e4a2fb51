"""``meridian bench served-turns``: conversations with real servers, arm after arm."""

import argparse
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meridian_patch import envs
from meridian_patch.bench.interrupts import end_like_ctrl_c
from meridian_patch.bench.options import read_positive, read_seeds, read_whole
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from rich.console import Console

    from meridian_patch.bench.served.conversation_arms import ServedRun, Stage
    from meridian_patch.bench.served.conversation_script import Conversation

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
HISTORIES = ("stripped", "kept", "plain")
ARMS = "ample,stock,tiers-off,meridian"

Scripts = Mapping[int, "Sequence[Conversation]"]


def add_served_turns(benches: Any) -> None:
    """Add ``served-turns`` to the benches of the ``meridian`` command."""
    served = benches.add_parser(
        "served-turns",
        help="prefix hits over conversations, on real servers with the tiny reasoner",
        description="Holds conversations of 2 to 6 turns with real vLLM servers, one per "
        "arm, and compares what the prefix cache hits.",
    )
    served.add_argument("--history", default="stripped", help=", ".join(HISTORIES))
    served.add_argument("--arms", default=ARMS, help=f"comma list (default: {ARMS})")
    served.add_argument("--seeds", default="1", help="for example 1,2 or 1-3")
    served.add_argument("--conversations", default="24", help="per run")
    served.add_argument("--rate", default="0.7", help="conversations that start per second")
    served.add_argument("--pause", default="4", help="mean seconds from answer to next question")
    served.add_argument("--blocks", default="224", help="KV pool of each server, in blocks of 32")
    served.add_argument("--ample-blocks", default="4096", help="KV pool of the arm ample")
    served.add_argument("--out", type=Path, default=Path("out/bench/served-turns"), help="folder")
    served.set_defaults(run=run_served_turns)


def run_served_turns(parsed: argparse.Namespace) -> int:
    """Run the comparison; 1 when a run failed, 130 on Ctrl-C; results are written in any case.

    Raises:
        BenchError: a wrong argument.
    """
    from rich.console import Console

    from meridian_patch.bench.machine import describe_machine
    from meridian_patch.bench.served.conversation_arms import Stage
    from meridian_patch.bench.served.conversation_report import (
        ServedOrigin,
        served_tables,
        write_served_report,
    )
    from meridian_patch.bench.served.conversation_script import (
        ServedHistory,
        ServedLoad,
        draw_conversations,
    )

    if parsed.history not in HISTORIES:
        raise BenchError(f"--history is {parsed.history!r}, known: {', '.join(HISTORIES)}")
    arms = _arms(parsed.arms)
    load = ServedLoad(
        conversations=read_whole("--conversations", parsed.conversations),
        rate_per_s=read_positive("--rate", parsed.rate),
        pause_mean_s=read_positive("--pause", parsed.pause),
    )
    stage = Stage(
        model=Path(str(files("meridian_patch.demo").joinpath("tiny-reasoner"))),
        history=ServedHistory(parsed.history),
        kv_blocks=read_whole("--blocks", parsed.blocks),
        ample_blocks=read_whole("--ample-blocks", parsed.ample_blocks),
        max_tokens=load.max_tokens,
    )
    _check_pool(stage)
    scripts = {seed: draw_conversations(load, seed) for seed in read_seeds(parsed.seeds)}
    parsed.out.mkdir(parents=True, exist_ok=True)
    console = Console()
    date = datetime.now().astimezone().isoformat(timespec="seconds")
    command = shlex.join(["meridian", *sys.argv[1:]])
    origin = ServedOrigin(date, command, describe_machine(), stage, load)
    console.print(str(origin.machine), highlight=False)
    runs: list[ServedRun] = []
    end_like_ctrl_c()
    try:
        code = _play(runs, stage, scripts, arms, parsed.out, console)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        console.print("interrupted", style="red")
    if not any(run.records for run in runs):
        return code
    runs.sort(key=lambda run: arms.index(run.arm))
    title = f"s-turns, served, {origin.how}, history {stage.history}, seeds {parsed.seeds}"
    console.print(*served_tables(runs, title), sep="\n")
    for path in write_served_report(parsed.out, runs, origin):
        console.print(str(path), highlight=False)
    return code


def _play(
    runs: "list[ServedRun]",
    stage: "Stage",
    scripts: Scripts,
    arms: Sequence[str],
    folder: Path,
    console: "Console",
) -> int:
    """Start all servers, then run all arms of a seed, then of the next seed.

    Each seed begins with another arm.
    """
    from meridian_patch.bench.progress import progress_bars
    from meridian_patch.bench.served.conversation_arms import ServedRun, run_served, serve_arm

    code = 0
    with progress_bars(console) as progress, ExitStack() as up:
        starting = progress.add_task("starting servers", total=len(arms))
        served = []
        for name in arms:
            log = folder / f"server-{name}.log"
            served.append(up.enter_context(serve_arm(name, stage, envs.environment(), log)))
            progress.advance(starting)
        for number, (seed, conversations) in enumerate(scripts.items()):
            first = number % len(arms)
            for arm in (*served[first:], *served[:first]):
                run = ServedRun(arm.name, seed)
                runs.append(run)
                total = sum(len(conversation.turns) for conversation in conversations)
                task = progress.add_task(f"seed {seed}, {arm.name}", total=total)
                try:
                    run_served(
                        run, arm, stage.history, conversations, partial(progress.advance, task)
                    )
                except BenchError as error:
                    run.error = str(error)
                    code = EXIT_FAILED
                    progress.console.print(f"{arm.name}: {error}", style="red", highlight=False)
                except KeyboardInterrupt:
                    run.error = "interrupted"
                    raise
    return code


def _check_pool(stage: "Stage") -> None:
    from meridian_patch.bench.served.conversation_arms import STOCK

    settings = stage.settings(STOCK)
    needed = settings.least_blocks or 0
    for option, blocks in (("--blocks", stage.kv_blocks), ("--ample-blocks", stage.ample_blocks)):
        if blocks < needed:
            raise BenchError(
                f"{option} is {blocks}, expected at least {needed}: one request of "
                f"{settings.max_model_len} tokens must fit into the KV pool"
            )


def _arms(text: str) -> list[str]:
    from meridian_patch.bench.served.conversation_arms import served_arm_names

    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in served_arm_names():
            raise BenchError(
                f"--arms: unknown arm {name!r}; known: {', '.join(served_arm_names())}"
            )
    return names
