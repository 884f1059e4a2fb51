"""``meridian bench exit``: what ending thoughts early saves and costs, and what it never does."""

import argparse
import shlex
import sys
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meridian_patch.bench.interrupts import EXIT_INTERRUPTED, end_like_ctrl_c
from meridian_patch.bench.options import read_whole
from meridian_patch.errors import BenchError

if TYPE_CHECKING:
    from meridian_patch.bench.exit.arms import Stage
    from meridian_patch.bench.exit.run import ExitArmRun

EXIT_BROKEN = 1
BUDGETS = "64,128,192,256,320,384,448,512"
PROFILE = "profiles/tiny_reasoner_exit.yaml"
STAGES = "exits,bounds,second,ngram,pressed"
# A second set of problems has a seed of its own.
_SECOND_SEED = 1


def add_exit(benches: Any) -> None:
    """Add ``exit`` to the benches of the ``meridian`` command."""
    bench = benches.add_parser(
        "exit",
        help="early exit on the tiny reasoner: think tokens and accuracy against fixed budgets",
        description="Lets the tiny reasoner solve fresh problems on the real engine, ends its "
        "thoughts in several ways, and checks every output for what must never happen.",
    )
    bench.add_argument("--problems", default="1200", help="in each of two sets (default: 1200)")
    bench.add_argument(
        "--few", default="300", help="under ngram speculation and KV pressure (default: 300)"
    )
    bench.add_argument("--seed", default="52001", help="of the problems; the second set: one more")
    bench.add_argument("--budgets", default=BUDGETS, help=f"think tokens (default: {BUDGETS})")
    bench.add_argument("--blocks", default="60", help="KV blocks of the engine under pressure")
    bench.add_argument("--stages", default=STAGES, help=f"comma list (default: {STAGES})")
    bench.add_argument(
        "--profile",
        type=Path,
        help="configuration with the thresholds (default: that of the tiny reasoner)",
    )
    bench.add_argument("--out", type=Path, default=Path("out/bench/exit"), help="folder")
    bench.set_defaults(run=run_exit)


def run_exit(parsed: argparse.Namespace) -> int:
    """Run the comparison; 1 when an output broke a rule that ours must keep, 130 on Ctrl-C.

    Raises:
        BenchError: a wrong argument, or an engine that ended.
    """
    from rich.console import Console

    from meridian_patch.bench.exit.arm_figures import all_figures
    from meridian_patch.bench.exit.arms import plan_stages
    from meridian_patch.bench.exit.report import ExitOrigin, exit_table, write_exit_report
    from meridian_patch.bench.machine import describe_machine
    from meridian_patch.config.load import load_config

    count, few = read_whole("--problems", parsed.problems), read_whole("--few", parsed.few)
    seed = read_whole("--seed", parsed.seed)
    budgets = [read_whole("--budgets", text) for text in parsed.budgets.split(",")]
    profile = parsed.profile or Path(str(files("meridian_patch.configs").joinpath(PROFILE)))
    config = load_config({"MERIDIAN_PATCH_CONFIG": str(profile)}).config
    stages = plan_stages(budgets, config.exit.rpdi_lambda, read_whole("--blocks", parsed.blocks))
    names = parsed.stages.split(",")
    unknown = set(names) - {stage.name for stage in stages}
    if unknown or "exits" not in names:
        raise BenchError(
            f"--stages is {parsed.stages!r}, expected exits and any others of {STAGES}"
        )
    sets = {
        "main": {"problems": count, "seed": seed},
        "second": {"problems": count, "seed": seed + _SECOND_SEED},
        "few": {"problems": few, "seed": seed},
    }
    parsed.out.mkdir(parents=True, exist_ok=True)
    console = Console(markup=False, emoji=False)
    origin = ExitOrigin(
        datetime.now().astimezone().isoformat(timespec="seconds"),
        shlex.join(["meridian", *sys.argv[1:]]),
        describe_machine(),
        sets,
        config.exit.model_dump(mode="json"),
    )
    console.print(str(origin.machine), highlight=False)
    end_like_ctrl_c()
    runs: list[ExitArmRun] = []
    code = 0
    try:
        _play(runs, [stage for stage in stages if stage.name in names], sets, profile, parsed.out)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
        console.print("interrupted", style="red")
    if not runs:
        return code
    figures = all_figures(runs, {stage.name: stage.problems for stage in stages})
    violations = [each for run in runs for each in run.violations]
    console.print(exit_table(figures, f"early exit, {origin.machine.how}"))
    for each in violations:
        if each.is_ours:
            words = f"{each.rule}: {each.arm}: {each.key}: {each.shown!r}"
            console.print(words, highlight=False, soft_wrap=True)
    for path in write_exit_report(parsed.out, figures, violations, origin):
        console.print(str(path), highlight=False)
    return code or (EXIT_BROKEN if any(each.is_ours for each in violations) else 0)


def _play(
    runs: "list[ExitArmRun]",
    stages: "list[Stage]",
    sets: dict[str, dict[str, int]],
    profile: Path,
    folder: Path,
) -> None:
    from rich.console import Console

    from meridian_patch.bench.exit.run import ExitBench
    from meridian_patch.bench.progress import progress_bars
    from meridian_patch.demo.problems import make_problems

    model = Path(str(files("meridian_patch.demo").joinpath("tiny-reasoner")))
    with progress_bars(Console(markup=False, emoji=False)) as progress:
        tasks: dict[str, Any] = {}

        def show(stage: str, arm: str, done: int, total: int) -> None:
            name = f"{stage}: {arm}"
            if name not in tasks:
                for started in tasks.values():
                    progress.update(started, completed=progress.tasks[started].total)
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        bench = ExitBench(model, profile, folder, show)
        for stage in stages:
            of_set = sets[stage.problems]
            problems = make_problems(of_set["problems"], of_set["seed"])
            bench.run(stage, problems, of_set["seed"] * 1_000_000, runs)
