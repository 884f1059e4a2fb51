"""Measures the tiny reasoner and writes its model card.

    python -P -m meridian_patch.demo.card MODEL_DIR

Accuracy and think lengths come from fresh problems at temperature 1 on vLLM; the EAT curves from
transformers, with ``</think>`` put after each line of chains the model wrote itself.
"""

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3ForCausalLM

from meridian_patch.demo.offline import generate
from meridian_patch.demo.problems import Problem, grade, make_problems
from meridian_patch.demo.tokenizer import THINK_END

CARD_SEED = 77_001
EAT_CHAINS = 60


def think_and_answer(text: str) -> tuple[str, str]:
    """The two halves of a generated text; an unfinished thought has no answer."""
    think, _, answer = text.partition(THINK_END)
    return think, answer


def accuracy_rows(problems: Sequence[Problem], texts: Sequence[str]) -> list[tuple[str, str, str]]:
    """``(steps, right of total, median think tokens)`` by number of steps, then over all."""
    groups: dict[int, list[tuple[bool, int]]] = defaultdict(list)
    for problem, text in zip(problems, texts, strict=True):
        think, answer = think_and_answer(text)
        groups[len(problem.steps)].append((grade(answer, problem.answer), len(think)))
    everything = [result for group in groups.values() for result in group]
    labelled = [(str(steps), groups[steps]) for steps in sorted(groups)]
    rows = []
    for label, group in [*labelled, ("all", everything)]:
        right = sum(is_right for is_right, _ in group)
        share = f"{right} of {len(group)} ({100 * right / len(group):.1f} %)"
        rows.append((label, share, f"{statistics.median(length for _, length in group):.0f}"))
    return rows


def think_histogram(texts: Sequence[str]) -> str:
    """Quantiles of the think length in tokens (a token is a character)."""
    lengths = sorted(len(think_and_answer(text)[0]) for text in texts)
    names = ((0.1, "p10"), (0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    quantiles = [f"{name} {lengths[int(q * (len(lengths) - 1))]}" for q, name in names]
    return ", ".join([*quantiles, f"max {lengths[-1]}"])


def eat_curve(model: Path, problems: Sequence[Problem], texts: Sequence[str]) -> list[list[float]]:
    """Entropy (nats) of the first answer token if thinking were cut after each line.

    Returns:
        One list per chain: before the first line, after it, after the second, and so on.
    """
    tokenizer = AutoTokenizer.from_pretrained(model)
    network = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    curves = []
    for problem, text in zip(problems, texts, strict=True):
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}],
            tokenize=False,
            add_generation_prompt=True,
        )
        lines = think_and_answer(text)[0].splitlines(keepends=True)
        curve = []
        for keep in range(len(lines) + 1):
            ids = tokenizer(prompt + "".join(lines[:keep]) + THINK_END, return_tensors="pt")
            with torch.inference_mode():
                logits = network(ids["input_ids"]).logits[0, -1].double()
            log_p = torch.log_softmax(logits, dim=-1)
            curve.append(float(-(log_p.exp() * log_p).sum()))
        curves.append(curve)
    return curves


def eat_row(problems: Sequence[Problem], curves: Sequence[Sequence[float]]) -> list[str]:
    """Median EAT before the last step of the first pass, after it, and at the end."""
    before: list[float] = []
    after: list[float] = []
    end: list[float] = []
    for problem, curve in zip(problems, curves, strict=True):
        solved = len(problem.steps)
        before += curve[: min(solved, len(curve))]
        after += curve[solved : solved + 1]
        end.append(curve[-1])
    return [f"{statistics.median(group):.3f}" for group in (before, after, end)]


def card(model: Path, problems: Sequence[Problem], texts: Sequence[str]) -> str:
    """The model card as Markdown."""
    training = json.loads((model / "training.json").read_text())
    few = slice(EAT_CHAINS)
    before, after, end = eat_row(problems[few], eat_curve(model, problems[few], texts[few]))
    table = "\n".join(f"| {' | '.join(row)} |" for row in accuracy_rows(problems, texts))
    stages = "\n".join(f"    {stage['command']}" for stage in training["stages"])
    return CARD.format(
        count=len(problems),
        seed=CARD_SEED,
        table=table,
        histogram=think_histogram(texts),
        chains=EAT_CHAINS,
        before=before,
        after=after,
        end=end,
        stages=stages,
    )


CARD = """\
---
license: apache-2.0
---

# tiny reasoner

A reasoning model small enough to ship with a test suite: Qwen3 architecture, 4 layers, width 128,
0.8 M parameters, one token per byte. It solves chains of one-digit arithmetic modulo ten, thinking
line by line; its first passes sometimes hold an error, which a later pass repairs.

    p=7, q=p+5, r=q*3. r?
    <think>
    q=p+5=7+5=2
    r=q*3=2*3=6
    </think>6
    From p=7, q=p+5, r=q*3 we get r=6.

It knows nothing else. It exists so that schedulers and early exit can be tested on a real engine.

## Measured

`python -P -m meridian_patch.demo.card MODEL_DIR` printed this page: {count} fresh problems (seed
{seed}), temperature 1, vLLM on CPU, float32.

| steps | right | median think tokens |
|---|---|---|
{table}

Think tokens: {histogram}.

Entropy of the first answer token when thinking is cut after a line (EAT, nats; median over {chains}
chains the model wrote): {before} before the last step of the first pass, {after} after it, {end} at
the natural end. A uniform digit has 2.303.

## Data and training

`meridian_patch/demo/problems.py` makes the problems, `thoughts.py` the chains (4 % of the first
passes' steps wrong in problems of more than three steps, always checked afterwards; 3 % of chains
derail for a while), `corpus.py` the examples: whole conversations, thoughts cut early with loss on
the answer only, histories with thinking stripped or kept, up to 4 096 tokens. The stages:

{stages}

`training.json` holds seeds, steps and loss curves. Without the cut thoughts the model is certain of
the last line's value when cut, right or wrong, and early exit cannot be tested on it.

Two chat templates: `chat_template.jinja` opens the thought and strips earlier thinking;
`chat_template_keep_thinking.jinja` keeps it.
"""


def main(argv: list[str] | None = None) -> None:
    """Measure and write ``MODEL_DIR/README.md``."""
    parser = argparse.ArgumentParser(prog="python -P -m meridian_patch.demo.card")
    parser.add_argument("model", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    args = parser.parse_args(argv)
    problems = make_problems(args.count, CARD_SEED)
    texts = generate(
        args.model,
        [problem.question for problem in problems],
        max_tokens=1500,
        temperature=1.0,
        max_model_len=2048,
        max_num_seqs=64,
    )
    text = card(args.model, problems, texts)
    (args.model / "README.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
