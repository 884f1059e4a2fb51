"""What each request says, known alone: the next token is a function of its own tokens.

The pretended model and the check of its output use the same function, each on its own record of
what was said; the scheduler under test stands between the two.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from meridian_patch.phase.boundaries import Boundaries
from simulator.grammar import GrammarState, grammar_rules

THINK_START, THINK_END, TURN_END, NEWLINE = 256, 257, 259, 10
STOP_TOKEN = 7
_FILLER = 98
# Tokens after which who may not open another thought ends the turn.
GIVES_UP = 12
WRAP_UP = "so.it.ends"
# The tiny reasoner's tokenizer has a token per character.
WRAP_UP_IDS = tuple(ord(letter) - ord("!") for letter in WRAP_UP)

_TOKEN = Boundaries("sim", ((THINK_START,),), ((THINK_END,),), (THINK_END,), probe=(THINK_END,))


def boundaries_of(kind: str, history: str) -> Boundaries | None:
    """Boundaries of one kind; None: nothing thinks."""
    if kind == "none":
        return None
    start: tuple[tuple[int, ...], ...] = ((THINK_START,),)
    end: tuple[tuple[int, ...], ...] = ((THINK_END,),)
    close: tuple[int, ...] = (THINK_END,)
    probe: tuple[int, ...] = (THINK_END,)
    if kind == "framed":
        close = probe = (NEWLINE, THINK_END, NEWLINE, NEWLINE)
    elif kind == "spelled":
        start, end = ((60, 33, 62),), ((60, 47, 33, 62),)
        close, probe = end[0], (NEWLINE, *end[0], NEWLINE)
    elif kind == "several":
        start, end = ((THINK_START,), (60, 33, 62)), ((THINK_END,), (60, 47, 62), (36, 36))
    elif kind == "overlapping":
        end = ((35, 35, 37, 35, 35),)
        close = probe = end[0]
    elif kind == "channel":
        start = ((60, 40, 41),)
        end = ((62, 60, 40, 42),)
        close = probe = end[0]
    elif kind == "unprobed":
        probe = ()
    return Boundaries("sim", start, end, close, history=history, tool_call=((38, 39),), probe=probe)


@dataclass(frozen=True)
class Script:
    """What a request says if nothing stops it.

    Attributes:
        seed: of its words.
        turns: lengths of thought and answer, alternating: a request that does not think begins with
            an empty first thought that is not there.
        ends: False for one that never ends by itself.
        rules: of its grammar, see ``grammar_rules``; None: none.
        binds_within: whether the grammar binds in the thought, too.
        period: tokens after which a thought says the same again; 0: never.
        least: tokens before which the sampler leaves out what would end the request.
        stops: tokens of its own that end it.
    """

    seed: int
    turns: tuple[tuple[int, int], ...]
    rules: str | None = None
    binds_within: bool = False
    period: int = 0
    least: int = 0
    stops: tuple[int, ...] = ()


class Speaker:
    """Follows the tokens of one request and says what comes next.

    Args:
        thinks: whether the output begins within a thought.
    """

    def __init__(self, script: Script, boundaries: Boundaries | None, *, thinks: bool) -> None:
        self._script = script
        self._starts = boundaries.start if boundaries else ()
        self._ends = boundaries.end if boundaries else ()
        self._begins_thinking = thinks
        self._grammar = GrammarState(grammar_rules(script.rules)) if script.rules else None
        self.reset()

    def reset(self) -> None:
        """Nothing was said yet."""
        self.said: list[int] = []
        self.is_thinking = self._begins_thinking
        self._turn = 0
        # Tokens since the phase began.
        self.in_phase = 0
        # Think tokens of all thoughts.
        self.think_tokens = 0
        self.has_ended = False
        if self._grammar is not None:
            self._grammar.reset()

    @property
    def is_bound(self) -> bool:
        """Whether the grammar binds the next token."""
        return self._grammar is not None and (self._script.binds_within or not self._waits)

    @property
    def _waits(self) -> bool:
        """Whether the grammar waits for the end of the first thought."""
        return self.is_thinking and not self.has_ended

    def follow(self, output: Sequence[int]) -> None:
        """The request's output is this now."""
        known = len(self.said)
        if len(output) < known or (known and output[known - 1] != self.said[-1]):
            self.reset()
            known = 0
        for token in output[known:]:
            self.hear(token)

    def hear(self, token: int) -> None:
        """One token more was said."""
        if self.is_bound:
            assert self._grammar is not None
            self._grammar.accept(token)
        self.said.append(token)
        self.in_phase += 1
        if self.is_thinking:
            self.think_tokens += 1
            if self._is_behind(self._ends):
                self.is_thinking, self.has_ended, self.in_phase = False, True, 0
        elif self._is_behind(self._starts):
            self.is_thinking, self.in_phase = True, 0
            self._turn += 1

    def next(self) -> int:
        """The next token."""
        wanted = self._wanted()
        if self.is_bound:
            assert self._grammar is not None
            allowed = self._grammar.allowed()
            if allowed is not None and wanted not in allowed:
                return min(allowed)
        return wanted

    def peek(self, number: int) -> Iterator[int]:
        """What the script would say next, as a draft model guesses it: grammars are not seen."""
        turn, in_phase, thinking = self._turn, self.in_phase, self.is_thinking
        for ahead in range(number):
            yield self._at(turn, in_phase + ahead, thinking=thinking)

    def _wanted(self) -> int:
        token = self._at(self._turn, self.in_phase, thinking=self.is_thinking)
        is_end = token == TURN_END or token in self._script.stops
        return _FILLER if is_end and len(self.said) < self._script.least else token

    def _at(self, turn: int, index: int, *, thinking: bool) -> int:
        turns = self._script.turns
        think_tokens, answer_tokens = turns[min(turn, len(turns) - 1)]
        if thinking:
            behind = index - think_tokens
            if behind >= 0 and self._ends:
                return self._ends[0][behind] if behind < len(self._ends[0]) else self._ends[0][0]
            period = self._script.period
            return _word(self._script.seed, index % period if period else index, 65)
        behind = index - answer_tokens
        if behind < 0:
            return _word(self._script.seed, index, 97)
        if turn + 1 < len(turns) and self._starts and behind < GIVES_UP:
            return self._starts[0][behind % len(self._starts[0])]
        return TURN_END

    def _is_behind(self, sequences: Sequence[Sequence[int]]) -> bool:
        length = len(self.said)
        return any(
            length >= len(each) and self.said[length - len(each) :] == list(each)
            for each in sequences
        )


def starts_thinking(tokens: Sequence[int], boundaries: Boundaries | None) -> bool:
    """Whether known tokens end within a thought: the boundary that ends last decides."""
    if boundaries is None:
        return False
    lasts = {each[-1] for each in (*boundaries.end, *boundaries.start)}
    for end in range(len(tokens), 0, -1):
        if tokens[end - 1] not in lasts:
            continue
        if any(tuple(tokens[end - len(each) : end]) == each for each in boundaries.end):
            return False
        if any(tuple(tokens[end - len(each) : end]) == each for each in boundaries.start):
            return True
    return False


def _word(seed: int, index: int, first: int) -> int:
    """Letters, in lines of some ten and paragraphs of some forty tokens."""
    number = (seed * 2654435761 + index * 40503) >> 4
    place = (index + seed) % 41
    if place in {39, 40} or place % 13 == 12:
        return NEWLINE
    return first + number % 26


def words(rng: random.Random, number: int) -> list[int]:
    """Prompt tokens of a user."""
    found: list[int] = []
    while len(found) < number:
        # What `randrange(97, 123)` does, without its checks: long prompts have 100,000 tokens.
        letter = rng.getrandbits(5)
        if letter < 26:
            found.append(97 + letter)
    return found
