"""Arms of a comparison: the same server and traces, with and without us.

``noop`` runs our scheduler class with the policy that decides as stock does. It is there because
stock counts preemptions but not in which phase the victim was.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meridian_patch import envs
from meridian_patch.bench.served.client import Client, RequestRecord
from meridian_patch.bench.served.counters import difference, read_counters
from meridian_patch.bench.served.load import Load, play_in_processes
from meridian_patch.bench.served.metrics import Figures, run_figures
from meridian_patch.bench.served.server import (
    ServerProcess,
    ServerSettings,
    pick_port,
    server_environment,
)
from meridian_patch.bench.served.workload import Mix, TraceRequest, make_trace
from meridian_patch.errors import BenchError

STOCK, NOOP = "stock", "noop"
STOCK_AGAIN = "stock-again"
ARM_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    # An empty list of plugins: not even our entry point is loaded.
    STOCK: {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""},
    NOOP: {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_SET_POLICY__NAME": "noop"},
    "patched": {"MERIDIAN_PATCH": "1"},
}
_WARM_UP = Mix(requests=6, rate_per_s=6.0, max_tokens=64)
_WARM_UP_SEED = 1_000_003


@dataclass(frozen=True)
class Arm:
    """What makes a server's arm.

    Attributes:
        name: in tables and file names; ``stock`` is what the others are compared with.
        environment: variables that decide whether and how we are active.
    """

    name: str
    environment: Mapping[str, str]


@dataclass
class SeedRun:
    """One trace played on one arm.

    Attributes:
        seed: of the trace.
        expected_requests: how many the trace holds.
        end_marker: token ids that end thinking.
        records: one per request that was sent.
        counters: what the server's counters rose by.
        is_complete: False when the run broke off.
    """

    seed: int
    expected_requests: int
    end_marker: tuple[int, ...]
    records: list[RequestRecord] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    is_complete: bool = False

    def figures(self) -> Figures:
        return run_figures(self.records, self.end_marker, self.counters)


@dataclass
class ArmRun:
    """All of one arm, as far as it got.

    Attributes:
        name: of the arm.
        seeds: in the order played.
        start_s: seconds until the server was healthy.
        error: what ended the arm early.
    """

    name: str
    seeds: list[SeedRun] = field(default_factory=list)
    start_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class RunningArm:
    """An arm whose server is up.

    Attributes:
        run: takes what the arm does.
        end_marker: token ids that end thinking; empty when there is no thinking.
    """

    run: ArmRun
    server: ServerProcess
    client: Client
    end_marker: tuple[int, ...]


def arm_environment(arm: Arm, base: Mapping[str, str]) -> dict[str, str]:
    """Complete environment of an arm's server: ``base`` but for what decides about activation."""
    inherited = {name: value for name, value in base.items() if name != "VLLM_PLUGINS"}
    return server_environment(inherited) | dict(arm.environment)


@contextmanager
def start_arm(
    run: ArmRun,
    settings: ServerSettings,
    env: Mapping[str, str],
    log_path: Path,
    load: Load,
    port: int = 0,
) -> Iterator[RunningArm]:
    """Start an arm's server, warm it up, and end it on exit.

    Args:
        run: takes what the arm does.
        settings: the server's, shared by all arms.
        env: from ``arm_environment``.
        log_path: takes the server's output.
        load: shared by all arms.
        port: 0 for any free one.

    Raises:
        BenchError: the server did not start, or serves something unexpected.
    """

    def on_wait(waited_s: float) -> None:
        run.start_s = waited_s

    with ServerProcess(settings, env, log_path, pick_port(port), on_wait=on_wait) as server:
        client = Client(server.url, settings.served_name, load.request_limit_s)
        end_marker = client.end_marker(load.end_marker) if load.end_marker else ()
        client.play(make_trace(_WARM_UP, _WARM_UP_SEED), [], server.check_alive)
        _check_is_patched(run.name, envs.activation(env), client.metrics_text())
        yield RunningArm(run, server, client, end_marker)


def play_seed(
    arm: RunningArm,
    seed: int,
    trace: Sequence[TraceRequest],
    processes: int,
    on_request: Callable[[], None],
) -> None:
    """Play one trace on an arm whose prefix cache has just been emptied.

    Args:
        arm: its run is filled as the trace goes on, and keeps what there is when it breaks off.
        seed: of the trace.
        trace: what to send.
        processes: that share the sending.
        on_request: called when a request has ended.

    Raises:
        BenchError: the server died, or a client did.
    """
    seed_run = SeedRun(seed, len(trace), arm.end_marker)
    arm.run.seeds.append(seed_run)
    arm.server.check_alive()
    arm.client.reset_prefix_cache()
    before = read_counters(arm.client.metrics_text())
    play_in_processes(
        arm.client, trace, processes, seed_run.records, arm.server.check_alive, on_request
    )
    seed_run.counters = difference(before, read_counters(arm.client.metrics_text()))
    seed_run.is_complete = True


def _check_is_patched(arm: str, should_be: bool | None, page: str) -> None:
    """A stock server among the arms that should be ours would make the comparison a lie."""
    is_ours = "meridian_" in page
    if is_ours != should_be:
        state = "exports" if is_ours else "does not export"
        raise BenchError(
            f"the server of arm {arm} {state} meridian_ metrics: it runs "
            f"{'patched' if is_ours else 'stock'}. Run 'meridian status' to see what is loaded"
        )
