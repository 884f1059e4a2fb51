"""Arms of a comparison: the same server and traces, with and without us.

``noop`` runs our scheduler class with the policy that decides as stock does. It is there because
stock counts preemptions but not in which phase the victim was.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meridian_patch.bench.client import Client, RequestRecord
from meridian_patch.bench.counters import difference, read_counters
from meridian_patch.bench.metrics import Figures, run_figures
from meridian_patch.bench.server import (
    MODEL_NAME,
    ServerProcess,
    ServerSettings,
    pick_port,
    server_environment,
)
from meridian_patch.bench.workload import Mix, TraceRequest, make_trace
from meridian_patch.errors import BenchError

ARM_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    # An empty list of plugins: not even our entry point is loaded.
    "stock": {"MERIDIAN_PATCH": "0", "VLLM_PLUGINS": ""},
    "noop": {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_SET_POLICY__NAME": "noop"},
    "patched": {"MERIDIAN_PATCH": "1"},
}
_WARM_UP = Mix(requests=6, rate_per_s=6.0, max_tokens=64)
_WARM_UP_SEED = 1_000_003


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
        name: key of ``ARM_ENVIRONMENTS``.
        seeds: in the order played.
        start_s: seconds until the server was healthy.
        error: what ended the arm early.
    """

    name: str
    seeds: list[SeedRun] = field(default_factory=list)
    start_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True)
class Watcher:
    """What the caller wants to hear of while an arm runs."""

    on_wait: Callable[[float], None] = lambda _: None
    on_seed: Callable[[int], None] = lambda _: None
    on_request: Callable[[], None] = lambda: None


def arm_environment(arm: str, base: Mapping[str, str]) -> dict[str, str]:
    """Complete environment of an arm's server: ``base`` but for what decides about activation."""
    inherited = {name: value for name, value in base.items() if name != "VLLM_PLUGINS"}
    return server_environment(inherited) | dict(ARM_ENVIRONMENTS[arm])


def run_arm(
    run: ArmRun,
    settings: ServerSettings,
    base_env: Mapping[str, str],
    traces: Mapping[int, Sequence[TraceRequest]],
    log_path: Path,
    port: int = 0,
    watcher: Watcher | None = None,
) -> None:
    """Start the arm's server once and play all traces on it.

    Args:
        run: is filled as the arm goes on, so that it keeps what there is when it breaks off.
        settings: the server's, shared by all arms.
        base_env: environment the server's is built from.
        traces: seed to trace.
        log_path: takes the server's output.
        port: 0 for any free one.
        watcher: told of progress.

    Raises:
        BenchError: the server did not start, or died, or serves something unexpected.
    """
    watcher = watcher or Watcher()

    def on_wait(waited_s: float) -> None:
        run.start_s = waited_s
        watcher.on_wait(waited_s)

    server = ServerProcess(
        settings, arm_environment(run.name, base_env), log_path, pick_port(port), on_wait=on_wait
    )
    with server:
        client = Client(server.url, MODEL_NAME)
        end_marker = client.end_marker()
        client.play(make_trace(_WARM_UP, _WARM_UP_SEED), [], server.check_alive)
        _check_is_patched(run.name, client.metrics_text())
        for seed, trace in traces.items():
            watcher.on_seed(seed)
            seed_run = SeedRun(seed, len(trace), end_marker)
            run.seeds.append(seed_run)
            client.reset_prefix_cache()
            before = read_counters(client.metrics_text())
            client.play(trace, seed_run.records, server.check_alive, lambda _: watcher.on_request())
            seed_run.counters = difference(before, read_counters(client.metrics_text()))
            seed_run.is_complete = True


def _check_is_patched(arm: str, page: str) -> None:
    """A stock server among the arms that should be ours would make the comparison a lie."""
    is_ours = "meridian_" in page
    if is_ours == (arm == "stock"):
        state = "exports" if is_ours else "does not export"
        raise BenchError(
            f"the server of arm {arm} {state} meridian_ metrics: it runs "
            f"{'patched' if is_ours else 'stock'}. Run 'meridian status' to see what is loaded"
        )
