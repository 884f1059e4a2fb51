"""The workloads of the policy lab, drawn from a seed.

Lengths and arrivals are drawn from streams of their own: another rate or burstiness changes when
requests come, and nothing else.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from meridian_patch.bench.simulated import lengths
from meridian_patch.bench.simulated.conversations import (
    CONTEXT_TOKENS,
    TOOL_PAUSE_MEAN_S,
    History,
    Lengths,
    TurnsLoad,
    draw_conversations,
)
from meridian_patch.bench.simulated.lengths import Clients, Floats, draw_lengths
from meridian_patch.bench.simulated.trace import TEMPLATE_TOKENS, LabRequest
from meridian_patch.errors import BenchError

# The requests of one session in their order, before it is known when the first one comes.
Session = list[LabRequest]
Draw = Callable[[np.random.Generator, int, int], Iterator[Session]]

LONG_SHARE = 0.2
LONG_PROMPT = (16_384, 65_536)
AGENT_SYSTEMS = 4
AGENT_SYSTEM_TOKENS = (6_000, 12_000)
AGENT_USER_TURNS = (2, 4)
AGENT_ROUNDS_MEAN = 10.0
# TraceLab's humans wait for 92 % of a session; here it is less, or a trace would span hours.
AGENT_PAUSE_MEAN_S = 60.0
# With less, all of a trace comes at a few instants.
_SMALLEST_SHAPE = 0.01
# Means are taken over this many requests of a seed that is not replayed.
_MEAN_REQUESTS = 8_000
_MEAN_SEED = 0
# Tokens of s-turns are drawn and only counted; the tiny reasoner has this many plain ids, and with
# the same number the conversations are those of `meridian bench turns`.
_TURNS_CONTENT_IDS = 256


@dataclass(frozen=True)
class Workload:
    """What is drawn.

    Attributes:
        history: what its sessions do with earlier thoughts.
        burstiness: see ``draw_trace``.
        draw: from a generator, a number of requests and a seed to at least that many requests.
    """

    name: str
    description: str
    history: History
    burstiness: str | float
    draw: Draw

    @property
    def mean_output_tokens(self) -> float:
        """Thinking and answer tokens per request, from a large sample."""
        return _mean_output_tokens(self.name)


def draw_trace(
    workload: str,
    requests: int,
    rate_per_s: float,
    seed: int,
    burstiness: str | float | None = None,
) -> list[LabRequest]:
    """Draw a trace that depends on its arguments alone; each session's requests stand together.

    Args:
        workload: a key of ``WORKLOADS``.
        requests: how many, later turns of sessions included; the last session may be cut short.
        rate_per_s: requests per second, later turns included. The last arrival comes after
            ``requests / rate_per_s`` seconds; another rate stretches the same arrivals.
        seed: 0 or more; two seeds share nothing.
        burstiness: ``servegen`` (its clients), ``poisson``, or the shape of Gamma gaps as in
            ``vllm bench serve --burstiness``: 1 is Poisson, less comes in bursts. None: as usual
            for the workload.

    Raises:
        BenchError: an argument is wrong or no such workload is known.
    """
    chosen = find_workload(workload)
    if requests < 1 or seed < 0:
        raise BenchError(
            f"requests is {requests} and seed is {seed}, expected 1 or more and 0 or more"
        )
    if not 0 < rate_per_s < math.inf:
        raise BenchError(f"rate_per_s is {rate_per_s!r}, expected a number above 0")
    clients = _clients(chosen.burstiness if burstiness is None else burstiness)
    sessions: list[Session] = []
    missing = requests
    for session in chosen.draw(np.random.default_rng((seed, 1)), requests, seed):
        sessions.append(session[:missing])
        missing -= len(sessions[-1])
        if not missing:
            break
    arrivals = lengths.draw_arrivals(np.random.default_rng((seed, 0)), len(sessions), clients)
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


def _clients(burstiness: str | float) -> tuple[Clients, ...]:
    if burstiness == "servegen":
        return lengths.SERVEGEN_CLIENTS
    try:
        shape = 1.0 if burstiness == "poisson" else float(burstiness)
    except ValueError:
        shape = 0.0
    if not _SMALLEST_SHAPE <= shape < math.inf:
        raise BenchError(
            f"burstiness is {burstiness!r}, expected servegen, poisson or a number from "
            f"{_SMALLEST_SHAPE} up"
        )
    return (Clients(1, 1.0, shape**-0.5),)


@functools.cache
def _mean_output_tokens(name: str) -> float:
    trace = draw_trace(name, _MEAN_REQUESTS, 1.0, _MEAN_SEED, "poisson")
    return sum(request.think_tokens + request.answer_tokens for request in trace) / len(trace)


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


def _apart(prompt: Lengths, think: Lengths, answer: Lengths) -> Draw:
    """Single requests whose parts have nothing to do with each other."""

    def draw(rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
        prompts, thinks, answers = (
            draw_lengths(fit, rng, requests) for fit in (prompt, think, answer)
        )
        return _singles(prompts, np.maximum(thinks, 1), answers, seed)

    return draw


def _draw_plain(rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
    prompts = draw_lengths(lengths.INPUT, rng, requests)
    answers = draw_lengths(lengths.PLAIN_ANSWER, rng, requests)
    return _singles(prompts, np.zeros(requests), answers, seed)


def _singles(prompts: Floats, thinks: Floats, answers: Floats, seed: int) -> Iterator[Session]:
    """Requests that belong to no session; prompts are cut to what the context has room for."""
    columns = (np.rint(column).astype(int).tolist() for column in (prompts, thinks, answers))
    for number, (prompt, think, answer) in enumerate(zip(*columns, strict=True)):
        shown = max(1, answer)
        room = CONTEXT_TOKENS - think - shown
        yield [LabRequest(f"{seed}-{number}", 0.0, min(max(1, prompt), room), think, shown)]


def _draw_turns(_rng: np.random.Generator, requests: int, seed: int) -> Iterator[Session]:
    # No conversation has less than two requests, so that half as many are always enough.
    load = TurnsLoad(History.STRIPPED, requests // 2 + 1, 1.0)
    systems: dict[tuple[int, ...], str] = {}
    for number, conversation in enumerate(draw_conversations(load, seed, _TURNS_CONTENT_IDS)):
        shared = len(conversation.system)
        system = systems.setdefault(tuple(conversation.system), f"system-{len(systems)}")
        yield [
            LabRequest(
                id=f"{seed}-{number}-{turn}",
                arrival_s=None if turn else 0.0,
                prompt_tokens=len(exchange.given) + (0 if turn else shared),
                think_tokens=len(exchange.think),
                answer_tokens=len(exchange.answer),
                session=f"{seed}-{number}",
                turn=turn,
                pause_s=exchange.pause_s,
                shared_tokens=0 if turn else shared,
                system=system,
            )
            for turn, exchange in enumerate(conversation.exchanges)
        ]


def _draw_agents(rng: np.random.Generator, _requests: int, seed: int) -> Iterator[Session]:
    """Sessions without end; all of one is kept within the context, thoughts included."""
    systems = rng.integers(*AGENT_SYSTEM_TOKENS, AGENT_SYSTEMS, endpoint=True).tolist()
    for number in itertools.count():
        chosen = int(rng.integers(AGENT_SYSTEMS))
        room = CONTEXT_TOKENS - systems[chosen]
        session: Session = []
        for is_tool_result, pause_s in _agent_rounds(rng):
            turn = len(session)
            new, think, answer = (
                round(float(draw_lengths(fit, rng, 1)[0]))
                for fit in (lengths.AGENT_NEW, lengths.AGENT_THINK, lengths.AGENT_ANSWER)
            )
            room -= new + think + answer + TEMPLATE_TOKENS
            if room < 0:
                break
            session.append(
                LabRequest(
                    id=f"{seed}-{number}-{turn}",
                    arrival_s=None if turn else 0.0,
                    prompt_tokens=new + (0 if turn else systems[chosen]),
                    think_tokens=think,
                    answer_tokens=answer,
                    session=f"{seed}-{number}",
                    turn=turn,
                    pause_s=pause_s if turn else 0.0,
                    shared_tokens=0 if turn else systems[chosen],
                    system=f"agent-{chosen}",
                    is_tool_result=is_tool_result,
                )
            )
        yield session


def _agent_rounds(rng: np.random.Generator) -> Iterator[tuple[bool, float]]:
    """Whether a round answers a tool call, and the pause before it."""
    for _ in range(rng.integers(*AGENT_USER_TURNS, endpoint=True)):
        yield False, float(rng.exponential(AGENT_PAUSE_MEAN_S))
        for _ in range(rng.geometric(1 / AGENT_ROUNDS_MEAN) - 1):
            yield True, float(rng.exponential(TOOL_PAUSE_MEAN_S))


_ALL = (
    Workload(
        "s-prod",
        "production requests: ServeGen's DeepSeek-R1 lengths and clients",
        History.STRIPPED,
        "servegen",
        _draw_prod,
    ),
    Workload(
        "s-chat",
        "PASCAL's chats: think median about 500, answer mean about 690",
        History.STRIPPED,
        "poisson",
        _apart(lengths.CHAT_PROMPT, lengths.CHAT_THINK, lengths.CHAT_ANSWER),
    ),
    Workload(
        "s-hard",
        "hard problems: think mean 4 k with a tail to 32 k",
        History.STRIPPED,
        "poisson",
        _apart(lengths.HARD_PROMPT, lengths.HARD_THINK, lengths.HARD_ANSWER),
    ),
    Workload(
        "s-mixed",
        "s-prod, a fifth of it with prompts of 16 to 64 k",
        History.STRIPPED,
        "servegen",
        _draw_mixed,
    ),
    Workload(
        "s-turns",
        "conversations of 2 to 8 turns with shared system prompts",
        History.STRIPPED,
        "poisson",
        _draw_turns,
    ),
    Workload(
        "s-agent",
        "agents: long tool loops, contexts a quarter of TraceLab's",
        History.TOOL_LOOP,
        "poisson",
        _draw_agents,
    ),
    Workload(
        "s-plain",
        "no thinking at all: s-prod's prompts, answers as in Azure's conversations",
        History.PLAIN,
        "servegen",
        _draw_plain,
    ),
)
WORKLOADS: Mapping[str, Workload] = {workload.name: workload for workload in _ALL}
