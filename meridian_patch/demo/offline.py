"""Generates texts with an engine of this process, for model cards and checks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def generate(
    model: Path, questions: Sequence[str], *, max_tokens: int, temperature: float, **engine: Any
) -> list[str]:
    """Answers of a model to single-turn questions, thinking included.

    Args:
        model: model directory.
        questions: one user message each.
        max_tokens: bound on each text.
        temperature: 0 is greedy.
        engine: further ``vllm.LLM`` arguments.

    Returns:
        One text per question, in order, without special tokens.
    """
    from vllm import LLM, SamplingParams

    llm = LLM(str(model), dtype="float32", enforce_eager=True, **engine)
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question in questions],
        SamplingParams(temperature=temperature, max_tokens=max_tokens),
    )
    return [output.outputs[0].text for output in outputs]
