"""What the suite's parts that serve have in common: a server, problems and their checks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from gpu_suite.suite import Context, Served
from meridian_patch.bench.served.arms import arm_environment
from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.run import describe_failures
from meridian_patch.bench.served.server import ServerProcess, pick_port
from meridian_patch.bench.served.workload import Mix, ServedRequest, make_trace
from meridian_patch.errors import BenchError

SEED = 31
_LEAST_LIMIT_S = 30.0
# Nothing that counts is lost when a server is killed.
_STOP_LIMIT_S = 5.0


@contextmanager
def launched(
    context: Context, served: Served, env: Mapping[str, str], log: Path, limit_s: float
) -> Iterator[tuple[ServerProcess, Client]]:
    """Launch a server with an environment of its own; it may not be up yet."""
    whole = arm_environment(env, context.base_env)
    with ServerProcess(
        served.settings,
        whole,
        log,
        pick_port(),
        start_limit_s=limit_s,
        stop_limit_s=_STOP_LIMIT_S,
    ) as server:
        name, limit_s = served.settings.served_name, max(_LEAST_LIMIT_S, limit_s)
        yield server, Client(server.url, name, request_limit_s=limit_s)


@contextmanager
def serving(
    context: Context, served: Served, env: Mapping[str, str], log: Path, limit_s: float
) -> Iterator[tuple[ServerProcess, Client]]:
    """A server that is up."""
    with launched(context, served, env, log, limit_s) as (server, client):
        server.wait_until_healthy()
        yield server, client


def problems(served: Served, number: int, max_tokens: int) -> list[ServedRequest]:
    """Hard problems at once, without earlier turns."""
    mix = Mix(number, 100.0, history_share=0.0, hard_share=1.0, max_tokens=max_tokens)
    return bounded(served, make_trace(mix, SEED))


def bounded(served: Served, trace: Sequence[ServedRequest]) -> list[ServedRequest]:
    """Bound thoughts by vLLM's budget where random weights would never end them."""
    if not served.is_dummy:
        return list(trace)
    return [
        replace(
            request,
            max_tokens=256 + 128,
            extra={"thinking_token_budget": 64 + 37 * place % 192, "ignore_eos": True},
        )
        for place, request in enumerate(trace)
    ]


def check_records(records: Sequence[RequestRecord], log: Path) -> None:
    """Raise BenchError where a request failed."""
    failures = describe_failures(records)
    if failures is not None:
        raise BenchError(f"{failures}; see {log}")
