"""The workloads of ``replay`` and ``sweep``, drawn from a seed.

Lengths and arrivals have separate random streams: another rate stretches the arrivals and changes
no length.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meridian_patch.bench.simulated import lengths
from meridian_patch.bench.simulated.lengths import Clients, Floats, Lengths, draw_lengths
from meridian_patch.bench.simulated.trace import TEMPLATE_TOKENS, History, TraceRequest
from meridian_patch.errors import BenchError

# The requests of one session in order, before the arrival of the first is known.
Session = list[TraceRequest]
Draw = Callable[[np.random.Generator, int, int], Iterator[Session]]

# Upper bound of the tokens of a session with every thought kept, so that it fits in each history.
CONTEXT_TOKENS = 65_000
THINK_BUDGET = 2048
LONG_SHARE = 0.2
LONG_PROMPT = (16_384, 65_536)
TURNS = (2, 8)
LOOP_REQUESTS = (1, 6)
TURNS_SYSTEMS = 12
# Chosen on seeds 1 to 3: at 0.15 conversations per second and 100 k tokens of KV, stock hits about
# 75 % of all prompt tokens and a cache that never evicts 81 %. Do not tune it on other seeds.
TURNS_SYSTEM_TOKENS = (900, 1500)
TURNS_PAUSE_MEAN_S = 15.0
# Results of tools arrive soon; their lengths are those of user messages.
TOOL_PAUSE_MEAN_S = 2.0
AGENT_SYSTEMS = 4
AGENT_SYSTEM_TOKENS = (6_000, 12_000)
AGENT_USER_TURNS = (2, 4)
AGENT_ROUNDS_MEAN = 10.0
# TraceLab's users wait for 92 % of a session. Such a trace would take hours, so the pause is less.
AGENT_PAUSE_MEAN_S = 60.0


@dataclass(frozen=True)
class Workload:
    """How the requests of one kind are drawn.

    Attributes:
        history: which earlier thoughts later prompts contain.
        clients: arrival processes of the first requests of sessions.
        draw: from a generator, a number of requests and a seed to at least that many requests.
    """

    history: History
    clients: tuple[Clients, ...]
    draw: Draw


def draw_trace(workload: str, requests: int, rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Draw a trace that depends only on the arguments; each session's requests stand together.

    Args:
        workload: a key of ``WORKLOADS``.
        requests: number of requests, later turns included; the last session may be cut short.
        rate_per_s: requests per second, later turns included. The last session arrives after
            ``requests / rate_per_s`` seconds; another rate stretches the same arrivals.
        seed: 0 or more; traces of two seeds are independent.

    Raises:
        BenchError: an argument is wrong or the workload is unknown.
    """
    chosen = find_workload(workload)
    if requests < 1 or seed < 0:
        raise BenchError(
            f"requests is {requests} and seed is {seed}, expected 1 or more and 0 or more"
        )
    if not 0 < rate_per_s < math.inf:
        raise BenchError(f"rate_per_s is {rate_per_s!r}, expected a number above 0")
    sessions: list[Session] = []
    missing = requests
    for session in chosen.draw(np.random.default_rng((seed, 1)), requests, seed):
        sessions.append(session[:missing])
        missing -= len(sessions[-1])
        if not missing:
            break
    rng = np.random.default_rng((seed, 0))
    arrivals = lengths.draw_arrivals(rng, len(sessions), chosen.clients)
    arrivals *= requests / len(sessions) / rate_per_s
    trace = []
    for arrival_s, (first, *later) in zip(arrivals, sessions, strict=True):
        trace += [replace(first, arrival_s=float(arrival_s)), *later]
    return trace


def find_workload(name: str) -> Workload:
    """The workload of that name.

    Raises:
        BenchError: there is none.
    """
    if name not in WORKLOADS:
        raise BenchError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    return WORKLOADS[name]


def _draw_prod(rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
    prompts, outputs = _prompts_and_outputs(rng, requests)
    return _thinkers(rng, prompts, outputs, seed)


def _draw_mixed(rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
    prompts, outputs = _prompts_and_outputs(rng, requests)
    is_long = rng.random(requests) < LONG_SHARE
    shortest, longest = map(math.log, LONG_PROMPT)
    longs = np.exp(rng.uniform(shortest, longest, requests))
    return _thinkers(rng, np.where(is_long, longs, prompts), outputs, seed)


def _prompts_and_outputs(rng: np.random.Generator, requests: int) -> tuple[Floats, Floats]:
    return lengths.pair_by_rank(
        rng,
        draw_lengths(lengths.INPUT, rng, requests),
        draw_lengths(lengths.OUTPUT, rng, requests),
        lengths.INPUT_OUTPUT_RANK_CORRELATION,
    )


def _thinkers(
    rng: np.random.Generator, prompts: Floats, outputs: Floats, seed: int
) -> Iterator[Session]:
    thinks = outputs * lengths.draw_think_shares(rng, outputs)
    return _singles(prompts, np.maximum(thinks, 1), outputs - thinks, seed)


def _independent(
    prompt: Lengths, think: Lengths, answer: Lengths, budget: float = math.inf
) -> Draw:
    """Single requests whose prompt, thought and answer are drawn independently.

    Thoughts end at a budget of think tokens.
    """

    def draw(rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
        prompts, thinks, answers = (
            draw_lengths(fit, rng, requests) for fit in (prompt, think, answer)
        )
        return _singles(prompts, np.clip(thinks, 1, budget), answers, seed)

    return draw


def _draw_plain(rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
    prompts = draw_lengths(lengths.INPUT, rng, requests)
    answers = draw_lengths(lengths.PLAIN_ANSWER, rng, requests)
    return _singles(prompts, np.zeros(requests), answers, seed)


def _singles(prompts: Floats, thinks: Floats, answers: Floats, seed: int) -> Iterator[Session]:
    """Requests without a session; prompts are cut so that each request fits in the context."""
    columns = (np.rint(column).astype(int).tolist() for column in (prompts, thinks, answers))
    for number, (prompt, think, answer) in enumerate(zip(*columns, strict=True)):
        shown = max(1, answer)
        room = CONTEXT_TOKENS - think - shown
        yield [TraceRequest(f"{seed}-{number}", 0.0, min(max(1, prompt), room), think, shown)]


def _turns(history: History) -> Draw:
    """Conversations with shared system prompts; those of a seed differ only in their thoughts."""

    def draw(_rng: np.random.Generator, _requests: int, seed: int) -> Iterator[Session]:
        rng = np.random.default_rng((seed, 0))
        systems = []
        for _ in range(TURNS_SYSTEMS):
            systems.append(int(rng.integers(*TURNS_SYSTEM_TOKENS, endpoint=True)))
            _skip_ids(rng, systems[-1])
        for number in itertools.count():
            rng = np.random.default_rng((seed, 1, number))
            system = int(rng.integers(TURNS_SYSTEMS))
            rounds = _turn_rounds(rng, has_loops=history is History.TOOL_LOOP)
            session = _session(f"{seed}-{number}", f"system-{system}", systems[system], rounds)
            is_plain = history is History.PLAIN
            yield [replace(r, think_tokens=0) for r in session] if is_plain else session

    return draw


# What a session's next request holds: whether it brings the result of a tool, the pause before it
# in seconds, and the tokens that are new in its prompt, that it thinks and that it answers.
Round = tuple[bool, float, int, int, int]


def _turn_rounds(rng: np.random.Generator, *, has_loops: bool) -> Iterator[Round]:
    think = lengths.LOOP_THINK if has_loops else lengths.TURN_THINK
    for _ in range(rng.integers(*TURNS, endpoint=True)):
        requests = int(rng.integers(*LOOP_REQUESTS, endpoint=True)) if has_loops else 1
        for number in range(requests):
            pause_s = float(rng.exponential(TOOL_PAUSE_MEAN_S if number else TURNS_PAUSE_MEAN_S))
            tokens = []
            for fit in (lengths.TURN_USER, think, lengths.TURN_ANSWER):
                tokens.append(int(draw_lengths(fit, rng, 1)[0]))
                _skip_ids(rng, tokens[-1])
            new, thought, answer = tokens
            yield number > 0, pause_s, new, thought, answer


def _skip_ids(rng: np.random.Generator, count: int) -> None:
    """Draw ``count`` token ids and drop them.

    Conversations were once drawn with their tokens. Without this a seed would give others, and
    published figures could not be compared with new ones.
    """
    rng.integers(0, 256, count)


def _draw_agents(rng: np.random.Generator, _requests: int, seed: int) -> Iterator[Session]:
    """Sessions of tool loops, without end."""
    systems = rng.integers(*AGENT_SYSTEM_TOKENS, AGENT_SYSTEMS, endpoint=True).tolist()
    for number in itertools.count():
        system = int(rng.integers(AGENT_SYSTEMS))
        rounds = _agent_rounds(rng)
        yield _session(f"{seed}-{number}", f"agent-{system}", systems[system], rounds)


def _agent_rounds(rng: np.random.Generator) -> Iterator[Round]:
    def draw(mean_s: float, *, is_tool_result: bool) -> Round:
        pause_s = float(rng.exponential(mean_s))
        new, think, answer = (
            round(float(draw_lengths(fit, rng, 1)[0]))
            for fit in (lengths.AGENT_NEW, lengths.AGENT_THINK, lengths.AGENT_ANSWER)
        )
        return is_tool_result, pause_s, new, think, answer

    for _ in range(rng.integers(*AGENT_USER_TURNS, endpoint=True)):
        yield draw(AGENT_PAUSE_MEAN_S, is_tool_result=False)
        for _ in range(rng.geometric(1 / AGENT_ROUNDS_MEAN) - 1):
            yield draw(TOOL_PAUSE_MEAN_S, is_tool_result=True)


def _session(name: str, system: str, system_tokens: int, rounds: Iterable[Round]) -> Session:
    """The rounds as requests, up to the first that would not fit in the context."""
    room = CONTEXT_TOKENS - system_tokens
    session: Session = []
    for turn, (is_tool_result, pause_s, new, think, answer) in enumerate(rounds):
        room -= new + think + answer + TEMPLATE_TOKENS
        if room < 0:
            break
        shared = 0 if turn else system_tokens
        session.append(
            TraceRequest(
                id=f"{name}-{turn}",
                arrival_s=None if turn else 0.0,
                prompt_tokens=shared + new,
                think_tokens=think,
                answer_tokens=answer,
                session=name,
                turn=turn,
                pause_s=pause_s if turn else 0.0,
                shared_tokens=shared,
                system=system,
                is_tool_result=is_tool_result,
            )
        )
    return session


_SERVEGEN = lengths.SERVEGEN_CLIENTS
_POISSON = lengths.POISSON
_CHAT = _independent(lengths.CHAT_PROMPT, lengths.CHAT_THINK, lengths.CHAT_ANSWER)
_HARD = (lengths.HARD_PROMPT, lengths.HARD_THINK, lengths.HARD_ANSWER)
# docs/workloads.md describes each of them.
WORKLOADS: Mapping[str, Workload] = {
    "s-prod": Workload(History.STRIPPED, _SERVEGEN, _draw_prod),
    "s-chat": Workload(History.STRIPPED, _POISSON, _CHAT),
    "s-hard": Workload(History.STRIPPED, _POISSON, _independent(*_HARD)),
    "s-budget": Workload(History.STRIPPED, _POISSON, _independent(*_HARD, THINK_BUDGET)),
    "s-mixed": Workload(History.STRIPPED, _SERVEGEN, _draw_mixed),
    "s-turns": Workload(History.STRIPPED, _POISSON, _turns(History.STRIPPED)),
    "s-turns-kept": Workload(History.KEPT, _POISSON, _turns(History.KEPT)),
    "s-turns-loop": Workload(History.TOOL_LOOP, _POISSON, _turns(History.TOOL_LOOP)),
    "s-turns-plain": Workload(History.PLAIN, _POISSON, _turns(History.PLAIN)),
    "s-agent": Workload(History.TOOL_LOOP, _POISSON, _draw_agents),
    "s-plain": Workload(History.PLAIN, _SERVEGEN, _draw_plain),
}
