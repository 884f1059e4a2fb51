"""Training examples for the tiny reasoner: token ids and which of them carry loss.

Four kinds: whole conversations (loss on thought and answer), cut thoughts (the thought is ended
early and only the answer carries loss, so that the model learns what it knows so far and not to
stop early), recoveries (a chain has derailed, and only what follows carries loss, so that the model
finds back but does not derail more often), and conversations with a history, a few of them as long
as the context.
"""

import random
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from meridian_patch.demo.problems import make_problem
from meridian_patch.demo.tokenizer import chat_template
from tiny_reasoner.thoughts import DERAIL_RATE, Thought, make_thought

MAX_TOKENS = 4096
CUT_PHRASE = "Enough.\n"
SYSTEM_SHARE = 0.3
KEPT_THINKING_SHARE = 0.3
FRESH_SHARE = 0.8
# Of the conversations with a history, this share has one to three earlier turns.
SHORT_HISTORY_SHARE = 0.93
CUT_INSIDE_LINE_SHARE = 0.25
CUT_PHRASE_SHARE = 0.25
_WORDS = (  # noqa: SIM905 - prose reads better than 40 quoted words
    "you are a careful helper that works modulo ten and shows every step of the chain "
    "answer with one digit first then say why keep the order of the names do not guess "
    "tools rules policy context memory table note user today please never always check"
).split()


@dataclass(frozen=True)
class Example:
    """One training sequence; ``first_loss`` is the index of the first id that carries loss."""

    ids: list[int]
    first_loss: int


class Corpus:
    """Draws examples from a seed.

    Args:
        tokenizer: from ``build_tokenizer``.
        seed: fixes the whole stream of examples.
        cut_share: share of examples whose thought is cut, 0 to 1.
        recovery_share: share of problems that are recoveries where they can be, 0 to 1.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        seed: int,
        cut_share: float,
        recovery_share: float = 0.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._cut_share = cut_share
        self._recovery_share = recovery_share
        self._keep_template = chat_template(keep_thinking=True)

    def draw(self) -> Example:
        """The next example."""
        rng = self._rng
        problem = make_problem(rng)
        is_recovery = self._recovery_share > 0 and rng.random() < self._recovery_share
        thought = make_thought(problem, rng, 1.0 if is_recovery else DERAIL_RATE)
        prompt = self._prompt(problem.question)
        end = "<|end|>"
        if is_recovery and thought.derailed_lines:
            lost = thought.cut(thought.derailed_lines)
            found = thought.text.removeprefix(lost)
            return self._example(prompt + lost, f"{found}</think>{problem.answer_text}{end}")
        if rng.random() < self._cut_share:
            seen = prompt + _cut(thought, rng) + "</think>"
            return self._example(seen, problem.answer_text + end)
        return self._example(prompt, f"{thought.text}</think>{problem.answer_text}{end}")

    def _example(self, seen: str, learnt: str) -> Example:
        seen_ids = self._tokenizer.encode(seen)
        return Example((seen_ids + self._tokenizer.encode(learnt))[:MAX_TOKENS], len(seen_ids))

    def _prompt(self, question: str) -> str:
        rng = self._rng
        messages: list[dict[str, str]] = []
        if rng.random() < SYSTEM_SHARE:
            messages.append({"role": "system", "content": _prose(rng, rng.randrange(2, 80))})
        keeps = rng.random() < KEPT_THINKING_SHARE
        for _ in range(_earlier_turns(rng)):
            earlier = make_problem(rng)
            answer = earlier.answer_text
            if keeps:
                answer = f"<think>\n{make_thought(earlier, rng).text}</think>{answer}"
            messages.append({"role": "user", "content": earlier.question})
            messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": question})
        prompt = self._tokenizer.apply_chat_template(
            messages,
            tokenize=False,
            add_generation_prompt=True,
            chat_template=self._keep_template if keeps else None,
        )
        assert isinstance(prompt, str)
        return prompt if len(prompt) < MAX_TOKENS - 1200 else prompt[-(MAX_TOKENS - 1200) :]


def _earlier_turns(rng: random.Random) -> int:
    if rng.random() < FRESH_SHARE:
        return 0
    is_short = rng.random() < SHORT_HISTORY_SHARE
    return rng.randrange(1, 4) if is_short else rng.randrange(4, 30)


def _prose(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(words)).capitalize() + "."


def _cut(thought: Thought, rng: random.Random) -> str:
    if rng.random() < CUT_INSIDE_LINE_SHARE:
        return thought.text[: rng.randrange(len(thought.text))]
    text = thought.cut(rng.randrange(len(thought.lines) + 1))
    return text + CUT_PHRASE if rng.random() < CUT_PHRASE_SHARE else text
