"""Traces EAT along whole thoughts of the tiny reasoner, on a real engine; prints a table.

    python -P scripts/eat_traces.py [--count N] [--seed N] [--out DIR]

Thoughts are probed every few tokens to their ends, and nothing is closed. Where the last step of
the first pass is solved is read off the thoughts' lines. Writes trace.jsonl, texts.json and
eat-traces.png into DIR.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from meridian_patch.bench.exit_trace import TracedThought, read_trace
from meridian_patch.bench.exit_trace_plot import plot_thoughts
from meridian_patch.bench.serve_plan import find_model
from meridian_patch.demo.problems import Problem, make_problems
from meridian_patch.engine.offline import generate
from meridian_patch.envs import environment

THINK_END = "</think>"
PANELS = 6
# Dense probes, and no verdict: EAT is never warm.
SETTINGS = {
    "MODE": "observe",
    "EAT_WARMUP_PROBES": "1000000",
    "RPDI": "false",
    "PROBE_MIN_GAP_TOKENS": "1",
    "PROBE_MAX_GAP_TOKENS": "3",
    "PROBES_IN_FLIGHT": "16",
}


def solved_at(problem: Problem, text: str) -> int | None:
    """Think tokens with which the first pass has solved its last step; None: it is not there.

    A token is a character. A line's last character is the value that its step comes to.
    """
    lines = text.partition(THINK_END)[0].splitlines(keepends=True)[: len(problem.steps)]
    names = [line.partition("=")[0] for line in lines]
    if names != [step.name for step in problem.steps] or not lines[-1].endswith("\n"):
        return None
    return sum(map(len, lines)) - 1


def row(name: str, groups: Sequence[Sequence[float]]) -> str:
    """Mean over thoughts of each thought's mean, and how thoughts differ."""
    means = sorted(statistics.fmean(group) for group in groups if group)
    deciles = statistics.quantiles(means, n=10)
    spread = f"{statistics.stdev(means):.3f} | {deciles[0]:.3f}..{deciles[-1]:.3f}"
    probes = sum(map(len, groups))
    return f"| {name} | {len(means)} | {probes} | {statistics.fmean(means):.3f} | {spread} |"


def table(thoughts: Sequence[TracedThought], marks: dict[str, int]) -> str:
    """Entropy before and after the last step is solved, and variance, as Markdown."""
    before, at, after, last = [], [], [], []
    variance_before, variance_end = [], []
    for thought in thoughts:
        mark = marks[thought.name]
        sides: dict[int, list[dict]] = {-1: [], 0: [], 1: []}
        for probe in thought.probes:
            # The value itself and the line's end stand at the mark: neither before nor behind it.
            place = probe["think_tokens"] - mark
            sides[-1 if place < 0 else 0 if place <= 1 else 1].append(probe)
        before.append([probe["entropy_nats"] for probe in sides[-1]])
        at.append([probe["entropy_nats"] for probe in sides[0]])
        after.append([probe["entropy_nats"] for probe in sides[1]])
        last.append([probe["entropy_nats"] for probe in sides[1][-1:]])
        variance_before.append([probe["variance_nats2"] for probe in sides[-1][-1:]])
        variance_end.append([probe["variance_nats2"] for probe in sides[1][-1:]])
    rows = [
        "| EAT | thoughts | probes | mean | SD over thoughts | p10..p90 |",
        "|---|---|---|---|---|---|",
        row("entropy before the last step is solved, nats", before),
        row("entropy at its value and line end, nats", at),
        row("entropy after it, nats", after),
        row("entropy of the last probe, nats", last),
        row("variance, last probe before it, nats²", variance_before),
        row("variance, last probe of the thought, nats²", variance_end),
    ]
    return "\n".join(rows)


def think(problems: Sequence[Problem], folder: Path) -> list[str]:
    """What the tiny reasoner says, from an engine in a process of its own."""
    questions, texts = folder / "questions.json", folder / "texts.json"
    questions.write_text(json.dumps([problem.question for problem in problems]))
    settings = {**SETTINGS, "TRACE": str((folder / "trace.jsonl").resolve())}
    env = {f"MERIDIAN_PATCH_SET_EXIT__{name}": value for name, value in settings.items()}
    subprocess.run(
        [sys.executable, "-P", __file__, "--answer", questions, texts],
        env={**environment()} | env | {"VLLM_PLUGINS": "meridian_patch"},
        check=True,
    )
    return list(json.loads(texts.read_text()))


def answer(questions: Path, texts: Path) -> None:
    """The work of that process."""
    said = generate(
        find_model(None),
        json.loads(questions.read_text()),
        max_tokens=1500,
        temperature=1.0,
        max_model_len=2048,
        max_num_seqs=16,
        block_size=32,
    )
    texts.write_text(json.dumps(said))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=240, help="problems")
    parser.add_argument("--seed", type=int, default=77)
    parser.add_argument("--out", type=Path, default=Path("out/eat-traces"), help="folder")
    parser.add_argument("--answer", type=Path, nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.answer:
        answer(*parsed.answer)
        return
    parsed.out.mkdir(parents=True, exist_ok=True)
    trace = parsed.out / "trace.jsonl"
    trace.unlink(missing_ok=True)
    problems = make_problems(parsed.count, parsed.seed)
    texts = think(problems, parsed.out)
    found = {str(n): solved_at(p, t) for n, (p, t) in enumerate(zip(problems, texts, strict=True))}
    marks = {name: mark for name, mark in found.items() if mark is not None}
    thoughts = [t for t in read_trace(trace) if t.name in marks and t.probes and t.end]
    print(f"{len(thoughts)} thoughts of {parsed.count} problems; the others lack the last step\n")
    print(table(thoughts, marks))
    # One thought per size of problem, from the longest on.
    by_size = sorted(thoughts, key=lambda t: (-len(problems[int(t.name)].steps), int(t.name)))
    sizes = groupby(by_size, key=lambda t: len(problems[int(t.name)].steps))
    chosen = [next(group) for _, group in sizes][:PANELS]
    caption = f"tiny reasoner, temperature 1; panels are named by problem of seed {parsed.seed}"
    picture = plot_thoughts(chosen, caption, marks, "last step solved")
    (parsed.out / "eat-traces.png").write_bytes(picture)


if __name__ == "__main__":
    main()
