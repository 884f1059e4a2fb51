"""The ``s-turns`` workload: conversations of several turns, drawn from a seed.

Lengths come from fits to ServeGen's DeepSeek-R1 production requests (Alibaba Cloud; two-component
fits by EM). Those are single requests: a thought and an answer are drawn per request from the
think and the answer fit. A fitted *input* is a whole prompt, history and system prompt included,
so a turn's user message is drawn from its two short components, and what the long third one stands
for is made by the conversation itself: a shared system prompt and the turns before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from meridian_patch.replay.types import Markers

TURNS = (2, 8)
LOOP_REQUESTS = (1, 6)
SYSTEM_PROMPTS = 12
# Set on seeds 1 to 3, so that stock hits about 75 % of all prompt tokens at 0.15 conversations per
# second and 100 k tokens of KV, and an infinite cache 81 %. Not to be touched for other seeds.
SYSTEM_TOKENS = (900, 1500)
PAUSE_MEAN_S = 15.0
# Results of tools come soon; their lengths are those of user messages.
TOOL_PAUSE_MEAN_S = 2.0
# What a conversation may come to with everything kept, so that every history mode holds it.
CONTEXT_TOKENS = 65_000
# More than any template adds to one request, a tool call's marker included.
_MARKERS_PER_EXCHANGE = 32


class History(StrEnum):
    """What of an earlier thought stands in a later prompt."""

    STRIPPED = "stripped"  # nothing
    KEPT = "kept"  # all of it
    TOOL_LOOP = "tool-loop"  # all of it until the next user message, then nothing
    PLAIN = "plain"  # there is no thinking


@dataclass(frozen=True)
class Lengths:
    """A mixture of log-normal lengths in tokens, as (weight, mu, sigma), cut at ``longest``."""

    parts: tuple[tuple[float, float, float], ...]
    longest: int

    def draw(self, rng: np.random.Generator) -> int:
        weights = np.array([weight for weight, _, _ in self.parts])
        _, mu, sigma = self.parts[rng.choice(len(self.parts), p=weights / weights.sum())]
        return int(np.clip(rng.lognormal(mu, sigma), 1, self.longest))


USER = Lengths(((0.348, 3.396, 0.718), (0.254, 5.600, 0.392)), 4096)
THINK = Lengths(((0.826, 6.011, 0.669), (0.174, 8.006, 0.804)), 8192)
# Within a tool loop thoughts are short: the think fit's first component alone.
LOOP_THINK = Lengths(THINK.parts[:1], THINK.longest)
ANSWER = Lengths(((0.304, 3.899, 1.558), (0.696, 5.690, 1.026)), 4096)


@dataclass(frozen=True)
class Exchange:
    """One request and what it is answered.

    Attributes:
        turn: number of the user turn; the requests of a tool loop share it.
        pause_s: from the end of the answer before (from the conversation's arrival).
        given: tokens of the user's message, or of a tool's result.
        is_tool_call: the answer calls a tool, and the turn goes on with its result.
    """

    turn: int
    pause_s: float
    given: list[int]
    think: list[int]
    answer: list[int]
    is_tool_call: bool

    @property
    def num_tokens(self) -> int:
        return len(self.given) + len(self.think) + len(self.answer) + _MARKERS_PER_EXCHANGE


@dataclass(frozen=True)
class Conversation:
    """One conversation; all of it is drawn beforehand, so that every arm replays the same."""

    arrival_s: float
    system: list[int]
    exchanges: tuple[Exchange, ...]


@dataclass(frozen=True)
class TurnsLoad:
    """What is drawn.

    Attributes:
        rate_per_s: conversations per second, Poisson. The conversations themselves do not depend
            on it: another rate stretches the same arrivals.
        think_factor: thoughts are this many times as long as those of ServeGen.
    """

    history: History
    conversations: int
    rate_per_s: float
    think_factor: float = 1.0


def draw_conversations(load: TurnsLoad, seed: int, content_ids: int) -> list[Conversation]:
    """Conversations in the order of their arrival; depends on the arguments alone.

    Args:
        load: how many of what.
        seed: two seeds share nothing.
        content_ids: tokens are drawn below this id, evenly, so that equal blocks are equal texts.

    Returns:
        Conversations that end before the first request that could not hold all before it.
    """
    shared = np.random.default_rng((seed, 0))
    systems = [
        _tokens(shared, int(shared.integers(*SYSTEM_TOKENS, endpoint=True)), content_ids)
        for _ in range(SYSTEM_PROMPTS)
    ]
    arrivals = np.cumsum(shared.exponential(1.0, load.conversations)) / load.rate_per_s
    conversations = []
    for number, arrival_s in enumerate(arrivals):
        rng = np.random.default_rng((seed, 1, number))
        system = systems[rng.integers(SYSTEM_PROMPTS)]
        exchanges = []
        room = CONTEXT_TOKENS - len(system)
        for exchange in _draw_exchanges(rng, load, content_ids):
            room -= exchange.num_tokens
            if room < 0:
                break
            exchanges.append(exchange)
        conversations.append(Conversation(float(arrival_s), system, tuple(exchanges)))
    return conversations


def without_pauses(conversation: Conversation) -> Conversation:
    """The same conversation, offered at once and never waiting for its user."""
    exchanges = tuple(replace(exchange, pause_s=0.0) for exchange in conversation.exchanges)
    return replace(conversation, arrival_s=0.0, exchanges=exchanges)


def build_prompt(
    conversation: Conversation, index: int, history: History, markers: Markers
) -> list[int]:
    """Prompt of the request ``index``, as the chat template would render it."""
    prompt = [markers.system, *conversation.system, markers.turn_end]
    now = conversation.exchanges[index]
    for earlier in conversation.exchanges[:index]:
        prompt += [markers.user, *earlier.given, markers.turn_end, markers.assistant]
        is_kept = history is History.KEPT or (
            history is History.TOOL_LOOP and earlier.turn == now.turn
        )
        if is_kept:
            prompt += [markers.think_start, *earlier.think, markers.think_end]
        prompt += [*_answer(earlier, markers), markers.turn_end]
    prompt += [markers.user, *now.given, markers.turn_end, markers.assistant]
    if history is not History.PLAIN:
        prompt.append(markers.think_start)
    return prompt


def build_output(exchange: Exchange, history: History, markers: Markers) -> tuple[list[int], int]:
    """The tokens that a request samples, and the index of the first answer token."""
    thought = [] if history is History.PLAIN else [*exchange.think, markers.think_end]
    return [*thought, *_answer(exchange, markers), markers.turn_end], len(thought)


def _answer(exchange: Exchange, markers: Markers) -> list[int]:
    call = markers.tool_call if exchange.is_tool_call else ()
    return [*call, *exchange.answer]


def _draw_exchanges(
    rng: np.random.Generator, load: TurnsLoad, content_ids: int
) -> Iterator[Exchange]:
    """One turn after the other; thoughts are drawn in every mode, so that modes share the rest."""
    has_loops = load.history is History.TOOL_LOOP
    think = LOOP_THINK if has_loops else THINK
    for turn in range(rng.integers(*TURNS, endpoint=True)):
        in_loop = 1
        if has_loops:
            in_loop = int(rng.integers(*LOOP_REQUESTS, endpoint=True))
        for step in range(in_loop):
            mean_s = TOOL_PAUSE_MEAN_S if step else PAUSE_MEAN_S
            pause_s = float(rng.exponential(mean_s))
            yield Exchange(
                turn,
                pause_s if turn or step else 0.0,
                _tokens(rng, USER.draw(rng), content_ids),
                _tokens(rng, round(think.draw(rng) * load.think_factor), content_ids),
                _tokens(rng, ANSWER.draw(rng), content_ids),
                is_tool_call=step + 1 < in_loop,
            )


def _tokens(rng: np.random.Generator, count: int, content_ids: int) -> list[int]:
    tokens: list[int] = rng.integers(0, content_ids, count).tolist()
    return tokens
