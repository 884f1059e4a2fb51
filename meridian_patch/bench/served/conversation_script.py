"""What users of a served comparison say: conversations drawn from a seed, and their prompts.

A user asks arithmetic problems, one per turn, below a system prompt that some other users have
too. The answers come from the served model, so a later prompt is known only when it is due.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from meridian_patch.demo.problems import MAX_STEPS, make_problem

# The words of the tiny reasoner's training: it has seen system prompts made of them.
_WORDS = (  # noqa: SIM905 - prose reads better than 30 quoted words
    "you are a careful helper that works modulo ten and shows every step of the chain answer with "
    "one digit first then say why keep the order of the names do not guess"
).split()
# More than the chat template adds to one message, in tokens of the tiny reasoner.
_MARKERS_PER_MESSAGE = 6

Message = dict[str, str]


class ServedHistory(StrEnum):
    """What of an earlier thought stands in a later prompt."""

    STRIPPED = "stripped"  # nothing
    KEPT = "kept"  # all of it
    PLAIN = "plain"  # there is no thinking


@dataclass(frozen=True)
class ServedLoad:
    """What is drawn.

    Attributes:
        conversations: how many.
        rate_per_s: conversations that start per second, Poisson.
        turns: fewest and most of one conversation.
        pause_mean_s: from the end of an answer to the next question, exponential.
        system_prompts: how many there are to share.
        system_tokens: length of each.
        hard_share: share of problems with the most steps, whose thoughts are the longest.
        max_tokens: of one request, thought and answer together.
    """

    conversations: int
    rate_per_s: float
    turns: tuple[int, int] = (2, 6)
    pause_mean_s: float = 4.0
    system_prompts: int = 6
    system_tokens: int = 400
    hard_share: float = 0.7
    max_tokens: int = 800


@dataclass(frozen=True)
class Turn:
    """One question.

    Attributes:
        pause_s: from the end of the answer before it; 0 for the first.
        question: text of the user's message.
        expected: the right answer, for grading.
    """

    pause_s: float
    question: str
    expected: str


@dataclass(frozen=True)
class Conversation:
    """One user's questions; ``arrival_s`` counts from the start of the run."""

    id: str
    arrival_s: float
    system: str
    turns: tuple[Turn, ...]


class Exchange(NamedTuple):
    """A question and what the model said, as its client got it."""

    question: str
    thought: str
    answer: str


def draw_conversations(load: ServedLoad, seed: int) -> list[Conversation]:
    """Conversations in the order of their arrival; depends on the arguments alone."""
    rng = random.Random(seed)
    systems = [_prose(rng, load.system_tokens) for _ in range(load.system_prompts)]
    arrival_s = 0.0
    conversations = []
    for number in range(load.conversations):
        arrival_s += rng.expovariate(load.rate_per_s)
        turns = []
        for turn in range(rng.randint(*load.turns)):
            problem = make_problem(rng, MAX_STEPS if rng.random() < load.hard_share else None)
            pause_s = rng.expovariate(1 / load.pause_mean_s)
            turns.append(Turn(pause_s if turn else 0.0, problem.question, problem.answer))
        system = rng.choice(systems)
        conversations.append(Conversation(f"{seed}-{number}", arrival_s, system, tuple(turns)))
    return conversations


def build_messages(
    system: str, past: Sequence[Exchange], question: str, history: ServedHistory
) -> list[Message]:
    """Messages of the next request: the system prompt, what was said, the question.

    Thoughts go into the field ``reasoning``, where vLLM's chat templates look for them.
    """
    messages: list[Message] = [{"role": "system", "content": system}]
    for exchange in past:
        messages.append({"role": "user", "content": exchange.question})
        answer = {"role": "assistant", "content": exchange.answer}
        if history is ServedHistory.KEPT:
            answer["reasoning"] = exchange.thought
        messages.append(answer)
    messages.append({"role": "user", "content": question})
    return messages


def most_prompt_tokens(messages: Sequence[Message]) -> int:
    """At least as many tokens as the tiny reasoner's prompt for the messages: one per byte."""
    texts = (message[key] for message in messages for key in message if key != "role")
    markers = _MARKERS_PER_MESSAGE * (1 + len(messages))
    return sum(len(text.encode()) for text in texts) + markers


def _prose(rng: random.Random, num_tokens: int) -> str:
    text = ""
    while len(text) < num_tokens:
        text += rng.choice(_WORDS) + " "
    return text[:num_tokens].strip().capitalize() + "."
