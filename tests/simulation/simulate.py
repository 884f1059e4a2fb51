"""The command behind ``scripts/simulate``."""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(1, str(Path(__file__).resolve().parent.parent / "support" / "drivers"))

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from simulator.axes import draw
from simulator.campaign import Campaign, line_of, run_all
from simulator.open_findings import is_open
from simulator.report import page
from simulator.run import run_case
from simulator.shrink import shrink

STEPS = 250


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many seeds")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="this seed alone, told at length")
    parser.add_argument("--steps", type=int, default=STEPS, help="requests arrive during so many")
    parser.add_argument("--most-steps", type=int, help="begin no seed after so many steps in all")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--no-shrink", action="store_true", help="leave failing cases as they are")
    parser.add_argument("--mutants", action="store_true", help="change our code on purpose")
    parser.add_argument("--only", nargs="*", default=[], help="of the mutants, these")
    parser.add_argument("--page", type=Path, help="write what was met there, as Markdown")
    return parser.parse_args(arguments)


def main() -> int:
    options = parse(sys.argv[1:])
    if options.mutants:
        import mutants

        return mutants.main(options.only, options.workers, options.page)
    if options.seed is not None:
        return one(options.seed, options.steps, shrinks=not options.no_shrink)
    return many(options)


def one(seed: int, steps: int, *, shrinks: bool) -> int:
    result = run_case(draw(seed, steps))
    print(f"seed {seed}, {result.steps} steps: {result.case.describe()}")
    print(f"counts: {result.counts}")
    print(f"digest: {result.digest}")
    if result.is_void:
        print(f"void: {result.message}\n{result.where}")
        return 0
    for name, text in result.failures.items():
        print(f"{name}: {text}")
    print(result.where)
    if result.failures and shrinks:
        print(line_of(result, shrink(result)))
    return bool(result.failures)


def many(options: argparse.Namespace) -> int:
    console = Console(stderr=True)
    began = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        steps = failures = 0

        def told(result) -> None:
            nonlocal steps, failures
            steps += result.steps
            failures += bool(result.failures)
            text = f"{steps:,} steps, {failures} failures"
            progress.update(task, advance=1, description=text)
            if result.failures:
                progress.console.print(line_of(result, result), highlight=False)

        campaign: Campaign = run_all(
            seeds,
            options.steps,
            options.workers,
            shrinks=not options.no_shrink,
            told=told,
            most_steps=options.most_steps,
        )
    known = [pair for pair in campaign.failed if is_open(pair[0], STEPS)]
    campaign.failed = [pair for pair in campaign.failed if pair not in known]
    arguments = " ".join(["scripts/simulate", *sys.argv[1:]])
    text = page(campaign, time.monotonic() - began, arguments)
    if known:
        rows = [f"- {line_of(*pair)}" for pair in known]
        text += "\n".join(["", "Known, and not mended yet:", "", *rows]) + "\n"
    if options.page:
        options.page.write_text(text)
    print(text)
    return bool(campaign.failed or not campaign.cases)


if __name__ == "__main__":
    sys.exit(main())
