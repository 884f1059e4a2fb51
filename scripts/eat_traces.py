"""Traces EAT along whole thoughts of the tiny reasoner, on a real engine; prints a table.

    python -P scripts/eat_traces.py [--count N] [--seed N] [--out DIR] [--again]

Thoughts are probed every few tokens to their ends, and nothing is closed. Where the last step of
the first pass is solved is read off the thoughts' lines. Writes trace.jsonl, texts.json and
eat-traces.png into DIR.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

from meridian_patch.bench.exit_trace import TracedThought, read_trace
from meridian_patch.bench.exit_trace_plot import plot_thoughts
from meridian_patch.bench.served.plan import find_model
from meridian_patch.demo.offline import generate
from meridian_patch.demo.problems import Problem, make_problems
from meridian_patch.envs import environment

THINK_END = "</think>"
TEXTS = "texts.json"
# Thoughts below which a row says nothing.
LEAST = 3
# Rows for the ends of passes, in order; the last takes all that follow.
PASS_NAMES = ("at the first pass's end", "at the second's", "at later ones'")
# Steps of problems that are told apart.
SIZES = ((2, 3), (4, 6), (7, 10))
# Dense probes, and no verdict: EAT is never warm.
SETTINGS = {
    "MODE": "observe",
    "OBSERVED_AT_A_TIME": "1000",
    "EAT_WARMUP_PROBES": "1000000",
    "RPDI": "false",
    "PROBE_MIN_GAP_TOKENS": "1",
    "PROBE_MAX_GAP_TOKENS": "3",
    "PROBE_EVERY_STEPS": "1",
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


def pass_ends(text: str) -> frozenset[int]:
    """Think tokens at which a pass is over: behind each blank line, and at the thought's end."""
    thought = text.partition(THINK_END)[0]
    blank = [match.end() for match in re.finditer(r"\n\n", thought)]
    return frozenset([*blank, len(thought)])


def row(name: str, groups: Sequence[Sequence[float]]) -> str:
    """Each thought's mean; their mean, median and spread."""
    means = sorted(statistics.fmean(group) for group in groups if group)
    if len(means) < LEAST:
        return f"| {name} | {len(means)} | {sum(map(len, groups))} | | | | |"
    deciles = statistics.quantiles(means, n=10)
    spread = f"{statistics.stdev(means):.3f} | {deciles[0]:.3f}..{deciles[-1]:.3f}"
    middle = f"{statistics.fmean(means):.3f} | {statistics.median(means):.3f}"
    return f"| {name} | {len(means)} | {sum(map(len, groups))} | {middle} | {spread} |"


def table(
    thoughts: Sequence[TracedThought],
    marks: Mapping[str, int],
    ends: Mapping[str, AbstractSet[int]],
) -> str:
    """Entropies in nats before and after the last step is solved, as Markdown."""
    before, ended, within = [], [], []
    by_pass: list[list[list[float]]] = [[] for _ in PASS_NAMES]
    for thought in thoughts:
        # The value itself and the line's end stand at the mark: neither before nor behind it.
        mark, over = marks[thought.name], ends[thought.name]
        probes = [(p["think_tokens"], p["entropy_nats"]) for p in thought.probes]
        before.append([nats for place, nats in probes if place < mark])
        after = [(place, nats) for place, nats in probes if place > mark + 1]
        ended.append([nats for place, nats in after if place in over])
        within.append([nats for place, nats in after if place not in over])
        numbers = {place: number for number, place in enumerate(sorted(over))}
        passes: list[list[float]] = [[] for _ in PASS_NAMES]
        for place, nats in after:
            if place in over:
                passes[min(numbers[place], len(passes) - 1)].append(nats)
        for groups, group in zip(by_pass, passes, strict=True):
            groups.append(group)
    pairs = [(b, [*e, *w]) for b, e, w in zip(before, ended, within, strict=True) if b and (e or w)]
    fell = sum(statistics.fmean(b) > statistics.fmean(a) for b, a in pairs)
    moves = [[statistics.pstdev(each)] for each in ended if len(each) > 1]
    later = [[statistics.pstdev(e)] for e in map(list.__add__, *by_pass[1:]) if len(e) > 1]
    rows = [
        "| entropy, nats | thoughts | probes | mean | median | SD over thoughts | p10..p90 |",
        "|---|---|---|---|---|---|---|",
        row("before the last step is solved", before),
        row("after it, at ends of passes", ended),
        *(row(name, groups) for name, groups in zip(PASS_NAMES, by_pass, strict=True)),
        row("after it, within passes", within),
        row("SD within a thought, at ends of passes", moves),
        row("the same, from the second pass on", later),
        "",
        f"Lower after than before, by the thought's mean: {fell} of {len(pairs)} thoughts.",
    ]
    return "\n".join(rows)


def rank(thought: TracedThought, ends: AbstractSet[int]) -> tuple[int, float]:
    """How many ends of passes were probed, and how densely the whole was."""
    probed = sum(probe["think_tokens"] in ends for probe in thought.probes)
    return probed, len(thought.probes) / max(ends)


def think(problems: Sequence[Problem], folder: Path) -> None:
    """Let the tiny reasoner answer, with an engine in a process of its own."""
    questions, texts = folder / "questions.json", folder / TEXTS
    questions.write_text(json.dumps([problem.question for problem in problems]))
    settings = {**SETTINGS, "TRACE": str((folder / "trace.jsonl").resolve())}
    env = {f"MERIDIAN_PATCH_SET_EXIT__{name}": value for name, value in settings.items()}
    subprocess.run(
        [sys.executable, "-P", __file__, "--answer", questions, texts],
        env={**environment()} | env | {"VLLM_PLUGINS": "meridian_patch"},
        check=True,
    )


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
    parser.add_argument("--again", action="store_true", help="only read what DIR holds")
    parser.add_argument("--answer", type=Path, nargs=2, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.answer:
        answer(*parsed.answer)
        return
    parsed.out.mkdir(parents=True, exist_ok=True)
    trace = parsed.out / "trace.jsonl"
    problems = make_problems(parsed.count, parsed.seed)
    if not parsed.again:
        trace.unlink(missing_ok=True)
        think(problems, parsed.out)
    texts = json.loads((parsed.out / TEXTS).read_text())
    found = {str(n): solved_at(p, t) for n, (p, t) in enumerate(zip(problems, texts, strict=True))}
    marks = {name: mark for name, mark in found.items() if mark is not None}
    thoughts = [t for t in read_trace(trace) if t.name in marks and t.probes and t.end]
    print(f"{len(thoughts)} thoughts of {parsed.count} problems; the others lack the last step\n")
    ends = {str(n): pass_ends(text) for n, text in enumerate(texts)}
    print(table(thoughts, marks, ends))
    chosen = []
    for first, last in SIZES:
        group = [t for t in thoughts if first <= len(problems[int(t.name)].steps) <= last]
        print(f"\n{first} to {last} steps:\n\n{table(group, marks, ends)}")
        # Of those that end by themselves, the one with most ends of passes probed; densely, then.
        whole = [t for t in group if t.end and t.end["reason"]]
        chosen.append(max(whole, key=lambda t: rank(t, ends[t.name])))
    caption = f"tiny reasoner, temperature 1; panels are named by problem of seed {parsed.seed}"
    picture = plot_thoughts(chosen, caption, {"last step solved": marks}, {"end of a pass": ends})
    (parsed.out / "eat-traces.png").write_bytes(picture)


if __name__ == "__main__":
    main()
