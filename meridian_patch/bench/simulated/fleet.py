"""What a number of GPUs serves: arithmetic over replays of one engine."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final

from meridian_patch.errors import BenchError

LEAST_SERVED_WELL: Final = 0.95
"""Share of the requests that must be within the limits of goodput, for a rate to count."""

# A pool that is fuller than this at its p99 is what limits the engine.
_FULL: Final = 0.95


@dataclass(frozen=True)
class Rate:
    """One engine at one rate of requests, mean over seeds.

    Attributes:
        rate_per_s: offered requests.
        output_per_s: tokens that came out in the steady time, in requests of their mean length; at
            most the offered rate. A short replay can offer more than an engine could keep up.
        served_well: share of the requests within the limits of goodput.
        kv_usage: p99 of the share of KV blocks in use, in the steady time.
        tokens: generated per request, mean.
        kv_tokens: in the KV cache of a request at its end, mean.
        itl_ms: p99 of the gaps between tokens of an answer.
    """

    rate_per_s: float
    output_per_s: float
    served_well: float
    kv_usage: float
    tokens: float
    kv_tokens: float
    itl_ms: float


@dataclass(frozen=True)
class Parts:
    """What stands around the engines.

    Attributes:
        gpus_per_engine: GPUs of one engine.
        kv_bytes_per_token: of the model.
        nic_gbit_per_s: of the network of one GPU.
        router_us_per_token: processor time of a router for each token.
    """

    gpus_per_engine: int
    kv_bytes_per_token: int
    nic_gbit_per_s: float
    router_us_per_token: float


@dataclass(frozen=True)
class Fleet:
    """What so many GPUs serve.

    Attributes:
        gpus: of all engines.
        engines: whole ones.
        requests_per_s: served well.
        tokens_per_s: generated.
        routers: processes that relay them, each on a core of its own.
        nic_share: share of a GPU's network that hand-offs take, if every request moves.
        bottleneck: what is short first.
    """

    gpus: int
    engines: int
    requests_per_s: float
    tokens_per_s: float
    routers: int
    nic_share: float
    bottleneck: str


def rates_in(results: Mapping[str, Any], arm: str) -> list[Rate]:
    """The rates of one arm, ascending.

    Args:
        results: of ``meridian bench replay`` or ``sweep``, as JSON.
        arm: such as ``latency``.

    Raises:
        BenchError: there are none, or they are not of one workload and one pool.
    """
    rows = [row for row in results["rows"] if row["arm"] == arm and row["rate_per_s"] is not None]
    kinds = {(row["workload"], row["pool_tokens"]) for row in rows}
    if len(kinds) != 1:
        raise BenchError(
            f"the results have {len(kinds)} pairs of a workload and a pool for the arm {arm!r} "
            "with --rate, expected one; replay with --rate, --pool and one workload"
        )
    requests = results["workloads"][0]["requests"]
    return sorted((_rate(row, requests) for row in rows), key=lambda rate: rate.rate_per_s)


def best_of(rates: Sequence[Rate]) -> Rate:
    """The highest rate up to which each one is served well.

    Raises:
        BenchError: not even the lowest one is.
    """
    served = None
    for rate in rates:
        if rate.served_well < LEAST_SERVED_WELL:
            break
        served = rate
    if served is None:
        raise BenchError(
            f"at {rates[0].rate_per_s:g} requests/s, the lowest rate, {rates[0].served_well:.0%} "
            f"are served well, expected {LEAST_SERVED_WELL:.0%}; replay lower rates, too"
        )
    return served


def fleet_of(gpus: int, engine: Rate, parts: Parts) -> Fleet:
    """What so many GPUs serve, each engine at this rate, evenly loaded.

    Raises:
        BenchError: they do not make one engine.
    """
    engines = gpus // parts.gpus_per_engine
    if engines == 0:
        raise BenchError(f"{gpus} GPUs are less than the {parts.gpus_per_engine} of one engine")
    requests = engines * engine.output_per_s
    tokens = requests * engine.tokens
    router_cores = tokens * parts.router_us_per_token / 1e6
    moved = (
        engine.output_per_s * engine.kv_tokens * parts.kv_bytes_per_token / parts.gpus_per_engine
    )
    nic_share = moved * 8 / (parts.nic_gbit_per_s * 1e9)
    bottleneck = _first_short(engine, router_cores, nic_share)
    return Fleet(gpus, engines, requests, tokens, ceil(router_cores), nic_share, bottleneck)


def page_of(fleets: Iterable[Fleet], rates: Sequence[Rate], best: Rate) -> str:
    """Both tables, as Markdown."""
    lines = ["| offered, requests/s, one engine | put out | served well | KV pool in use, p99 |"]
    lines[-1] += " answer ITL p99, ms |"
    lines += ["|---|---|---|---|---|"]
    for rate in rates:
        mark = "**" if rate is best else ""
        lines.append(
            f"| {mark}{rate.rate_per_s:g}{mark} | {rate.output_per_s:.2f} "
            f"| {rate.served_well:.1%} | {rate.kv_usage:.0%} | {rate.itl_ms:.1f} |"
        )
    lines += ["", "| GPUs | engines | requests/s | tokens/s | router processes | network |"]
    lines[-1] += " short first |"
    lines.append("|---|---|---|---|---|---|---|")
    lines += [
        f"| {fleet.gpus} | {fleet.engines} | {fleet.requests_per_s:.3g} "
        f"| {fleet.tokens_per_s:,.0f} | {fleet.routers} | {fleet.nic_share:.1%} "
        f"| {fleet.bottleneck} |"
        for fleet in fleets
    ]
    return "\n".join(lines)


def _rate(row: Mapping[str, Any], requests: int) -> Rate:
    value = {name: figure["value"] for name, figure in row["figures"].items()}
    tokens = value["output_tokens"] / requests
    completed_per_s = value["tokens_per_s"] / tokens
    return Rate(
        rate_per_s=row["rate_per_s"],
        output_per_s=min(row["rate_per_s"], value["steady_tokens_per_s"] / tokens),
        served_well=min(value["goodput_per_s"] / completed_per_s, 1.0),
        kv_usage=value["steady_kv_usage_p99"],
        tokens=tokens,
        kv_tokens=(value["prompt_tokens"] + value["output_tokens"]) / requests,
        itl_ms=value["answer_itl_p99_s"] * 1e3,
    )


def _first_short(engine: Rate, router_cores: float, nic_share: float) -> str:
    if router_cores > 1:
        return f"one router process: {router_cores:.1f} are busy"
    if nic_share > 1:
        return "the network between think and answer engines"
    if engine.kv_usage >= _FULL:
        return "the KV pool of the engine"
    return "the time of a step"
