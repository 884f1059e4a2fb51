"""Fitted distributions of lengths and arrivals, and functions that draw from them.

The ServeGen fits describe the DeepSeek-R1 requests of ServeGen (Alibaba Cloud, one day, 1.38
million requests, two-component EM). An output is split by **output length times think share, with
the share drawn by output length**, because that keeps the quantiles of all four figures and their
dependence. Thinking and answer drawn independently would give outputs with a p25 that is 20 % too
long and shares with a p10 that is 21 % too low.

Each field has its own random numbers. (ServeGen's own sampler uses one uniform number per request
for all fields, so that the longest input has the longest output and the highest share.)
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lengths:
    """Log-normal lengths in tokens.

    Attributes:
        parts: components of the mixture as (weight, mu, sigma).
        longest: longer draws are cut to this.
    """

    parts: tuple[tuple[float, float, float], ...]
    longest: int


INPUT = Lengths(((0.348, 3.396, 0.718), (0.254, 5.600, 0.392), (0.398, 6.594, 1.737)), 57_284)
OUTPUT = Lengths(((0.768, 6.441, 0.704), (0.232, 7.874, 0.910)), 32_768)
# Between inputs and outputs: short prompts have longer outputs.
INPUT_OUTPUT_RANK_CORRELATION = -0.38

# Thinking of PASCAL's chats has a median of about 500 tokens: the short and the long thoughts of
# ServeGen have it too, 485. The mean of an answer, 690, is that of R1 on Arena-Hard, whose prompts
# PASCAL replays; the prompts' lengths and the spread of answers are assumed.
CHAT_PROMPT = Lengths(((1.0, 4.7, 1.0),), 4096)
CHAT_THINK = Lengths(((0.826, 6.011, 0.669), (0.174, 8.006, 0.804)), 32_768)
CHAT_ANSWER = Lengths(((1.0, 6.357, 0.6),), 8192)

# Hard problems: MLPerf's R1 set has a mean output of 3886 to 4043 tokens and goes up to 32 k. The
# mean is met with the tail cut; the spread, prompts and answers are assumed.
HARD_PROMPT = Lengths(((1.0, 5.0, 0.6),), 4096)
HARD_THINK = Lengths(((1.0, 7.81, 1.0),), 32_000)
HARD_ANSWER = Lengths(((1.0, 6.0, 0.6),), 8192)

# A conversation's user messages are the two short components of a fitted input. The long third one
# stands for system prompt and history, which the conversation has itself.
TURN_USER = Lengths(INPUT.parts[:2], 4096)
TURN_THINK = Lengths(CHAT_THINK.parts, 8192)
# Thoughts within a tool loop are short: the first component alone.
LOOP_THINK = Lengths(CHAT_THINK.parts[:1], 8192)
TURN_ANSWER = Lengths(((0.304, 3.899, 1.558), (0.696, 5.690, 1.026)), 4096)

# Azure's conversations of 2023 answer with 211 tokens in the mean, 129 in the median and 601 at
# p99; the mixture meets the three, its shape between them is assumed.
PLAIN_ANSWER = Lengths(((0.62, 4.174, 0.8), (0.38, 5.979, 0.2)), 4096)

# An agent's round after TraceLab: about 860 tokens come in, about 250 go out, the median of each.
# How the 250 divide into thinking and call, and all spreads, are assumed.
AGENT_NEW = Lengths(((1.0, 6.754, 1.0),), 16_384)
AGENT_THINK = Lengths(((1.0, 4.7, 0.9),), 4096)
AGENT_ANSWER = Lengths(((1.0, 4.6, 0.8),), 4096)


@dataclass(frozen=True)
class Clients:
    """A group of clients with the same arrival process.

    Attributes:
        count: number of clients.
        share: share of all requests that each client sends.
        cv: coefficient of variation of each client's gaps.
    """

    count: int
    share: float
    cv: float


# ServeGen has 73 clients; the top 1, 5 and 10 send 28.6, 52.5 and 67.7 % of the requests. Gaps,
# weighted by rate: CV p25 0.94, p50 1.02, p75 1.86, p90 5.56, mean 2.28. Which client has which CV
# is not published, so each size has a mix of them.
SERVEGEN_CLIENTS = (
    Clients(1, 0.286, 1.0),
    Clients(1, 0.06, 1.0),
    Clients(30, 0.0051, 1.0),
    Clients(2, 0.06, 1.9),
    Clients(2, 0.0304, 1.9),
    Clients(20, 0.0051, 1.9),
    Clients(1, 0.06, 5.6),
    Clients(3, 0.0304, 5.6),
    Clients(13, 0.0051, 5.6),
)


POISSON = (Clients(1, 1.0, 1.0),)


def draw_lengths(fit: Lengths, rng: np.random.Generator, count: int) -> Floats:
    """Draw ``count`` lengths in tokens, not rounded, from 1 to ``fit.longest``."""
    weights, mus, sigmas = np.array(fit.parts).T
    part = rng.choice(len(weights), count, p=weights / weights.sum())
    lengths: Floats = np.clip(rng.lognormal(mus[part], sigmas[part]), 1, fit.longest)
    return lengths


def pair_by_rank(
    rng: np.random.Generator, first: Floats, second: Floats, rank_correlation: float
) -> tuple[Floats, Floats]:
    """Pair two samples of one size by a Gaussian copula; the samples' values stay the same."""
    # Pearson's conversion from a rank correlation to that of normal variables.
    normal = 2 * np.sin(np.pi * rank_correlation / 6)
    pairs = rng.multivariate_normal((0, 0), ((1, normal), (normal, 1)), len(first))
    ranks = pairs.argsort(axis=0).argsort(axis=0)
    return np.sort(first)[ranks[:, 0]], np.sort(second)[ranks[:, 1]]


# Edges of the bins of output lengths, in tokens. In each bin some outputs are "half thought", with
# a share around 0.38, and the others are "mostly thought". The weights follow from the published
# mean share of each bin (.751 .690 .600 .769 .832). The fitted 0.79 cannot reach the mean of the
# last bin, so that bin has its own first parameter.
_SHARE_EDGES = (500, 1000, 2000, 5000)
_HALF_THOUGHT = np.array((0.095, 0.244, 0.465, 0.051, 0.0))
_HALF_BETA = (16.5, 26.8)
_MOSTLY_BETA_A = np.array((4.43, 4.43, 4.43, 4.43, 5.84))
_MOSTLY_BETA_B = 1.18


def draw_think_shares(rng: np.random.Generator, outputs: Floats) -> Floats:
    """Draw the share of thinking of each output by its length; between 0 and 1."""
    edge = np.searchsorted(_SHARE_EDGES, outputs, side="right")
    is_half = rng.random(len(outputs)) < _HALF_THOUGHT[edge]
    half = rng.beta(*_HALF_BETA, len(outputs))
    mostly = rng.beta(_MOSTLY_BETA_A[edge], _MOSTLY_BETA_B)
    return np.where(is_half, half, mostly)


def draw_arrivals(rng: np.random.Generator, count: int, clients: tuple[Clients, ...]) -> Floats:
    """Draw arrival times of independent Gamma renewal clients, in rising order.

    Each client starts at a random point of a gap, not at an arrival: with a CV of 5.6 a start at
    an arrival would add 15 requests.

    Returns:
        ``count`` times, scaled so that the last is ``count`` and one request arrives per unit of
        time. Without the scaling a bursty sample of 1000 would be up to 10 % too fast or too slow.
    """
    total = sum(group.count * group.share for group in clients)
    # This margin is nearly always enough for ``count`` arrivals; otherwise all are drawn again.
    until = 1.5 * count + 50.0
    while True:
        times = np.sort(
            np.concatenate(
                [
                    _renewals(rng, group.share / total, group.cv, until)
                    for group in clients
                    for _ in range(group.count)
                ]
            )
        )
        if len(times) >= count:
            arrivals: Floats = times[:count] * (count / times[count - 1])
            return arrivals
        until *= 2


def _renewals(rng: np.random.Generator, rate: float, cv: float, until: float) -> Floats:
    shape = cv**-2
    scale = 1 / (shape * rate)
    # The rest of the gap that contains time 0. A gap contains it in proportion to its length.
    time = rng.random() * rng.gamma(shape + 1, scale)
    arrivals = [np.array([time])]
    while time <= until:
        gaps = rng.gamma(shape, scale, int(until * rate) + 16)
        arrivals.append(time + np.cumsum(gaps))
        time = float(arrivals[-1][-1])
    times: Floats = np.concatenate(arrivals)
    return times[times <= until]
