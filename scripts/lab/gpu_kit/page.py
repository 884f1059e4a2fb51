"""Makes a page of figures of what trips brought back, and a cost model for the replay bench.

    scripts/gpu_kit page FOLDER... [--out FILE.md] [--cost FILE.yaml]

A folder is what $OUT held: a report.json per part, and a cost.yaml where one was fitted. A trip
that ended early is a page, too.
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prepare import ROOT

from meridian_patch.bench.simulated.fit_command import write_cost
from meridian_patch.replay.cost import load_cost

BENCHMARKS = ROOT / "docs" / "benchmarks"
COSTS = ROOT / "configs" / "cost"


def lines_of(reports: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """A page in Markdown."""
    all_reports = list(reports)
    yield "# Figures of a GPU"
    yield ""
    hows = sorted({report["how"] for report in all_reports})
    yield f"`{'`, `'.join(hows)}`. Made by `scripts/gpu_kit`; see [the GPU suite](../gpu-suite.md)."
    for report in all_reports:
        yield ""
        yield f"## {', '.join(part['name'] for part in report['parts'])}"
        yield ""
        # A directory's name: its place says nothing of the model.
        told = report | {"model": report["model"].rpartition("/")[2]}
        for name in ("date", "machine", "model", "commit"):
            yield f"- {name}: `{told[name]}`"
        yield f"- versions: {', '.join(f'{n} {v}' for n, v in report['versions'].items())}"
        for gpu in report["gpus"]:
            yield f"- GPU: {gpu}"
        for surprise in report["surprises"]:
            yield f"- surprise: {surprise}"
        for part in report["parts"]:
            yield from part_lines(part)


def part_lines(part: Mapping[str, Any]) -> Iterator[str]:
    yield ""
    yield f"### {part['name']}: {part['verdict']}"
    yield ""
    yield f"{part['shows'].capitalize()}? {in_one_line(part['reason'])} ({part['seconds']:.0f} s)"
    for note in part["notes"]:
        yield ""
        yield in_one_line(note)
    if part["figures"]:
        yield ""
        yield "| figure | median | lowest | highest | values | unit |"
        yield "|---|---|---|---|---|---|"
    for figure in part["figures"]:
        spread = figure["spread"]
        values = [f"{spread[name]:.4g}" for name in ("median", "low", "high")]
        cells = [figure["name"], *values, str(spread["count"]), figure["unit"]]
        yield f"| {' | '.join(cells)} |"


def in_one_line(text: str) -> str:
    """The first line, without the machine's paths and what Markdown would read as marks."""
    first = re.sub(r"\S*/meridian-gpu-kit/", "", text.partition("\n")[0])
    return first.replace("|", "\\|").replace("<", "&lt;")


def read_reports(folder: Path) -> dict[Path, dict[str, Any]]:
    """Each report below the folder, by where it lies."""
    paths = sorted(folder.rglob("report.json"))
    if not paths:
        sys.exit(f"gpu_kit: no report.json in {folder}; give a folder that a trip has filled")
    try:
        return {path.parent: json.loads(path.read_text()) for path in paths}
    except (OSError, ValueError) as error:
        sys.exit(f"gpu_kit: cannot read a report in {folder}: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/gpu_kit page", description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--out", type=Path, help="(default: docs/benchmarks/DATE-gpu.md)")
    parser.add_argument("--cost", type=Path, help="(default: configs/cost/GPU-8b-measured.yaml)")
    args = parser.parse_args()
    reports = {at: report for folder in args.folders for at, report in read_reports(folder).items()}
    date = min(report["date"] for report in reports.values())[:10]
    out = args.out or BENCHMARKS / f"{date}-gpu.md"
    out.write_text("\n".join(lines_of(reports.values())) + "\n")
    print(f"gpu_kit: {out}")
    for folder, report in reports.items():
        fitted = folder / "cost.yaml"
        if not fitted.is_file():
            continue
        gpu = "h200" if "H200" in report["how"] else "h100" if "H100" in report["how"] else "other"
        path = args.cost or COSTS / f"{gpu}-8b-measured.yaml"
        write_cost(path, load_cost(str(fitted)).model_copy(update={"name": path.stem}))
        print(f"gpu_kit: {path}")


if __name__ == "__main__":
    main()
