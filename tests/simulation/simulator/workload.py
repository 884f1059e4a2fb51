"""The requests of a seed: who comes when, and what each will say."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from short_thoughts import BY_TOKENS

from meridian_patch.phase.boundaries import Boundaries
from simulator.axes import Case
from simulator.build import MAX_LORAS
from simulator.grammar import write_rules
from simulator.oracle import NEWLINE, STOP_TOKEN, Script, boundaries_of, words

MIN64, MAX64 = -(2**63), 2**63 - 1
# Of fields of ours, what is taken.
MOST = 2**53
ADAPTERS = 4
# Requests that come at once where there are many: so many, and where all may run, so many more.
CROWD, MORE = 300, 50


@dataclass
class Ask:
    """One request, or one chunk of a streaming session.

    Attributes:
        chain: name of the conversation it belongs to.
        thinks: whether the prompt ends within a thought.
        images: offset, length and identity of each.
        session: None for an ordinary request; else whether further chunks follow this one.
        sampling: further fields of its sampling parameters.
        is_embedded: its prompt comes as embeddings, and no token of it is known.
    """

    name: str
    prompt: list[int]
    script: Script
    max_tokens: int
    chain: str = ""
    thinks: bool = False
    priority: int = 0
    extra: dict[str, Any] = field(default_factory=dict)
    adapter: int = 0
    images: list[tuple[int, int, str]] = field(default_factory=list)
    session: bool | None = None
    salt: str | None = None
    stops: tuple[int, ...] = ()
    grammar_delay: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    is_embedded: bool = False


class Workload:
    """Draws the requests of a case; equal for stock and for ours.

    Args:
        case: the configuration.
        pool_tokens: of the KV pool.
    """

    def __init__(self, case: Case, pool_tokens: int) -> None:
        self._case = case
        self._rng = random.Random(f"workload {case.seed}")
        self.boundaries = boundaries_of(case.boundary, case.history)
        self._pool_tokens = pool_tokens
        self._length = case.length
        self._number = 0
        self._num_sessions = 0
        # What comes, by tick: a step of mean length, see ``mean_tick``.
        self.arrivals: dict[int, list[Ask]] = {}
        # Further turns of conversations, by the request that they follow.
        self._turns_left: dict[str, int] = {}
        self._draw_all()

    @property
    def next_tick(self) -> int | None:
        """The tick of the next arrival known so far."""
        return min(self.arrivals, default=None)

    def mean_tick(self, seconds: Callable[[int], float]) -> float:
        """Seconds of a step of mean length, with what has been drawn so far.

        Args:
            seconds: what a step of so many tokens takes.
        """
        asks = [ask for each in self.arrivals.values() for ask in each]
        seats, budget = min(self._case.seats, 8), self._case.budget
        prompts = sum(len(ask.prompt) for ask in asks) / budget
        decodes = sum(_length_of(ask) for ask in asks) / seats
        total_s = prompts * seconds(budget) + decodes * seconds(seats)
        return total_s / (prompts + decodes)

    def next_turn(self, ask: Ask, output: list[int], tick: int) -> None:
        """A request ended by itself; what its client says to that."""
        left = self._turns_left.pop(ask.name, 0)
        if not left:
            return
        rng = random.Random(f"turn {self._case.seed} {ask.name}")
        said = _answer_of(output, self.boundaries) if rng.random() < 0.6 else output
        history = ask.prompt + said
        if len(history) + 40 > self._length:
            return
        # A name that stock's has, too, whichever conversation goes on first there.
        kind, name = "agents" if left > 1 else "conversations", f"{ask.name}.{left}"
        follow = self._ask(rng, kind, history=history, name=name)
        follow.adapter, follow.chain = ask.adapter, ask.chain
        self._turns_left[follow.name] = left - 1
        self.arrivals.setdefault(tick + rng.randrange(1, 25), []).append(follow)

    def _draw_all(self) -> None:
        rng, steps = self._rng, self._case.steps
        tick = 1
        # Some tokens per tick keep an engine of this size busy, or leave it idle at times.
        load = rng.choice((0.3, 0.7, 1.5))
        if self._case.scale in {"wide", "deep"}:
            number = max(CROWD, self._case.seats + MORE)
            self.arrivals[tick] = [self._brief(rng) for _ in range(number)]
        while tick < steps:
            kind = self._case.traffic
            if kind == "mixed" or rng.random() < 0.4:
                kind = rng.choices(
                    ("thinkers", "plain", "agents", "conversations", "sessions", "runaways",
                     "pool_prompts", "hostile", "siblings"),
                    weights=(6, 3, 2, 2, 1, 1, 1, 1, 1),
                )[0]  # fmt: skip
                if self._case.traffic == "plain":
                    kind = "plain"
            if kind == "sessions":
                most = {"starving": 0, "tight": 1, "ample": 4}[self._case.pool]
                # Load-bearing: vLLM 0.32 fails where drafts stand behind a session's stop. What was
                # sampled ahead of one is computed again with the next chunk, which vLLM's worker
                # side of routed experts takes for an error.
                is_served = self._case.connector == "none" and not self._case.drafts
                is_served &= not self._case.experts
                if not is_served or self._num_sessions >= most:
                    kind = "thinkers"
                self._num_sessions += kind == "sessions"
            asks = self._draw(rng, kind, tick)
            for ask in asks:
                self.arrivals.setdefault(tick, []).append(ask)
            weight = sum(len(a.prompt) / self._case.budget + _length_of(a) for a in asks)
            seats = min(self._case.seats, 8)
            mean = weight / seats / load
            tick += int(rng.expovariate(1 / max(mean, 0.5)))

    def _brief(self, rng: random.Random) -> Ask:
        """One of many: a short prompt, and few tokens."""
        ask = self._ask(rng, rng.choice(("thinkers", "plain")))
        ask.prompt = ask.prompt[-rng.randrange(8, 40) :]
        _shorten(ask, rng.randrange(1, 30))
        ask.images, ask.sampling = [], {}
        return ask

    def _draw(self, rng: random.Random, kind: str, tick: int) -> list[Ask]:
        if kind == "siblings":
            first = self._ask(rng, "thinkers")
            return [first, *(self._sibling(rng, first) for _ in range(rng.randrange(1, 4)))]
        if kind == "sessions":
            return self._session(rng, tick)
        ask = self._ask(rng, kind)
        if kind in {"agents", "conversations"}:
            ask.chain = ask.name
            self._turns_left[ask.name] = rng.randrange(1, 5)
        return [ask]

    def _sibling(self, rng: random.Random, first: Ask) -> Ask:
        other = self._ask(rng, "thinkers")
        other.prompt, other.thinks = list(first.prompt), first.thinks
        other.images, other.adapter, other.salt = first.images, first.adapter, first.salt
        other.is_embedded = first.is_embedded
        _shorten(other, self._length - len(other.prompt))
        return other

    def _session(self, rng: random.Random, tick: int) -> list[Ask]:
        """The first chunk of a session; the others come later, be it finished then or not."""
        chunks = rng.randrange(2, 5)
        room = self._length // chunks - 2
        name = self._name()
        asks = []
        for index in range(chunks):
            ask = self._ask(rng, "thinkers" if rng.random() < 0.7 else "plain", name=name)
            ask.prompt = ask.prompt[-max(room // 2, 8) :]
            ask.max_tokens = max(room - len(ask.prompt) - 4, 4)
            ask.session = index + 1 < chunks
            ask.images, ask.extra, ask.stops, ask.sampling = [], {}, (), {}
            ask.is_embedded = False
            ask.script = replace(ask.script, rules=None, binds_within=False)
            ask.priority, ask.adapter, ask.salt = 0, 0, None
            asks.append(ask)
        for later in asks[1:]:
            tick += rng.randrange(1, 60)
            self.arrivals.setdefault(tick, []).append(later)
        # The client hangs up.
        over = Ask(name, [1], Script(0, ((0, 0),)), 1, session=False)
        self.arrivals.setdefault(tick + rng.randrange(1, 80), []).append(over)
        asks[-1].session = True
        return asks[:1]

    def _name(self) -> str:
        self._number += 1
        return f"r{self._number}"

    def _ask(
        self, rng: random.Random, kind: str, history: list[int] | None = None, name: str = ""
    ) -> Ask:
        length = self._length
        thinks = kind != "plain" and self.boundaries is not None and rng.random() < 0.9
        prompt = self._prompt(rng, kind, history)
        if thinks:
            assert self.boundaries is not None
            prompt += rng.choice(self.boundaries.start)
        prompt = prompt[-(length - 2) :]
        room = length - len(prompt)
        scale = min(length // 2, 600)
        turns = tuple(
            (1 + int(rng.expovariate(3 / scale)), int(rng.expovariate(6 / scale)))
            for _ in range(2 if rng.random() < 0.1 and kind != "plain" else 1)
        )
        if kind == "runaways":
            turns = ((10**9, 0),)
        seed = rng.randrange(10**6)
        loops = self._case.strategy in BY_TOKENS and seed % 3
        ask = Ask(
            name or self._name(),
            prompt,
            Script(seed, turns, period=3 + seed % 12 if loops else 0),
            room if rng.random() < 0.5 or kind == "runaways" else rng.randrange(1, room + 1),
            thinks=thinks,
        )
        self._decorate(rng, ask, kind)
        return ask

    def _prompt(self, rng: random.Random, kind: str, history: list[int] | None) -> list[int]:
        if history is not None:
            return history + words(rng, rng.randrange(1, 30))
        longest = self._length - 8
        if kind == "pool_prompts":
            return words(rng, min(self._pool_tokens, longest) - rng.randrange(3))
        common = words(random.Random(rng.randrange(4)), longest // 2)
        shared = common[: rng.randrange(len(common))] if rng.random() < 0.6 else []
        own = words(rng, 1 + min(int(rng.expovariate(8 / longest)), longest // 2 - 2))
        if self._case.stuffed and self.boundaries is not None and rng.random() < 0.5:
            # A user's text that is full of markers, and of beginnings of markers.
            own = [*own, *self._markers(rng, len(own) // 2)][-longest // 2 :]
        if rng.random() < 0.1 and self.boundaries is not None:
            # An earlier turn's thought in the prompt.
            thought = [*self.boundaries.start[0], 65, NEWLINE, *self.boundaries.end[0], 97]
            shared = [*shared, *thought]
        return [*shared, *own]

    def _markers(self, rng: random.Random, number: int) -> list[int]:
        assert self.boundaries is not None
        known = [*self.boundaries.start, *self.boundaries.end]
        found: list[int] = []
        while len(found) < number:
            marker = rng.choice(known)
            found += marker[: rng.randrange(1, len(marker) + 1)] * rng.randrange(1, 9)
        # Whole ones come in pairs, so that the text ends as it began.
        return [*found, *rng.choice(self.boundaries.end), 97]

    def _decorate(self, rng: random.Random, ask: Ask, kind: str) -> None:
        case = self._case
        if case.queue == "priority":
            ask.priority = rng.randrange(3)
        if case.lora != "none" and rng.random() < 0.7:
            ask.adapter = rng.randrange(1, _num_adapters(case) + 1)
        if rng.random() < 0.05:
            ask.salt = f"salt{rng.randrange(2)}"
        if rng.random() < 0.05:
            ask.stops = (STOP_TOKEN, NEWLINE if rng.random() < 0.2 else STOP_TOKEN)
        if case.grammar != "never" and rng.random() < 0.4:
            rules = write_rules(rng.randrange(1, 30), rng.randrange(9))
            ask.script = replace(
                ask.script,
                turns=ask.script.turns[:1],
                rules=rules,
                binds_within=case.grammar == "within",
            )
            ask.stops = ()
            ask.grammar_delay = rng.choice((0, 0, 1, 5, 60))
        if case.images != "none" and rng.random() < 0.5:
            self._add_images(rng, ask)
        self._vary(rng, ask)
        if rng.random() < 0.15:
            ask.extra = self._wishes(rng)
        if kind == "hostile":
            ask.extra = self._hostile(rng)
            if case.queue == "priority":
                ask.priority = rng.choice((MIN64, MAX64))

    def _hostile(self, rng: random.Random) -> dict[str, Any]:
        return rng.choice((
            {"meridian_itl_ms": 1e-9}, {"meridian_itl_ms": 5.0},
            {"meridian_priority": -MOST}, {"meridian_priority": MOST},
            {"meridian_max_think_tokens": 1}, {"meridian_eat_delta": 1e300},
            {"meridian_min_think_tokens": MOST}, {"meridian_rpdi_lambda": 1.0000001},
            {"meridian_exit_patterns": [[70]]}, {"meridian_loop_min_count": MOST},
            {"meridian_loop_min_pattern_size": 0}, {"meridian_answer_reserve": MOST},
        ))  # fmt: skip

    def _wishes(self, rng: random.Random) -> dict[str, Any]:
        return rng.choice((
            {"meridian_exit": rng.choice(("off", "observe", "enforce"))},
            {"meridian_itl_ms": rng.choice((1.0, 20.0, 500.0))},
            {"meridian_priority": rng.randrange(-3, 4)},
            {"meridian_max_think_tokens": rng.randrange(8, 200)},
            {"meridian_min_think_tokens": rng.randrange(8, 200)},
            {"meridian_answer_reserve": rng.choice((1, 20, 200, 0.25, 0.9))},
            {"meridian_history": rng.choice(("strip", "keep", "keep_in_tool_loop"))},
        ))  # fmt: skip

    def _vary(self, rng: random.Random, ask: Ask) -> None:
        if self._case.fields == "plain" or ask.script.rules:
            return
        if rng.random() < 0.2:
            ask.sampling["min_tokens"] = least = rng.randrange(1, ask.max_tokens + 1)
            ask.script = replace(ask.script, least=least, stops=ask.stops)
        if rng.random() < 0.1:
            ask.sampling["ignore_eos"] = True
        if rng.random() < 0.2:
            # Such a request reads no cached prefix.
            ask.sampling["prompt_logprobs"] = 1
        if rng.random() < 0.3:
            ask.sampling["seed"] = rng.randrange(9)
        if rng.random() < 0.1 and not ask.images:
            ask.prompt, ask.thinks, ask.is_embedded = [0] * len(ask.prompt), False, True

    def _add_images(self, rng: random.Random, ask: Ask) -> None:
        length = rng.randrange(4, 17)
        at = rng.randrange(max(len(ask.prompt) - length - 4, 1))
        if at + length + 4 < len(ask.prompt):
            ask.images = [(at, length, f"image{rng.randrange(5)}-{length}")]


def _shorten(ask: Ask, most: int) -> None:
    """Let a request have no more tokens; vLLM refuses one that must have more than it may."""
    ask.max_tokens = min(ask.max_tokens, most)
    least = ask.sampling.get("min_tokens", 0)
    if least > ask.max_tokens:
        ask.sampling["min_tokens"] = ask.max_tokens
        ask.script = replace(ask.script, least=ask.max_tokens)


def _length_of(ask: Ask) -> float:
    thought, answer = ask.script.turns[0]
    return min(ask.max_tokens, (thought if ask.thinks else 0) + answer)


def _answer_of(output: list[int], boundaries: Boundaries | None) -> list[int]:
    """What a chat template keeps of an output: what stands behind the last end of a thought."""
    for end in range(len(output), 0, -1):
        for each in boundaries.end if boundaries else ():
            if tuple(output[end - len(each) : end]) == each:
                return output[end:]
    return output


def _num_adapters(case: Case) -> int:
    """How many adapters there are; the slots are fewer where vLLM keeps to them.

    Load-bearing: vLLM 0.32 counts the adapters of scheduled requests alone. With drafts scheduled
    ahead, a request that they may end sits a step out: another adapter comes in, and vLLM fails by
    an assertion when all of them are scheduled again.
    """
    return MAX_LORAS if case.is_async and case.drafts else ADAPTERS
