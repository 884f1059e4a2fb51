"""Exports the ``meridian_*`` metrics from EngineCore, for front ends that export none of them.

The scheduler leaves references to what a step had in a queue. A thread counts and times them, with
the code that does so in the API server, and another one serves them: no step waits for either.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from queue import SimpleQueue
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import CollectorRegistry, start_http_server
from vllm.logger import init_logger

from meridian_patch import envs
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import MetricsConfig
from meridian_patch.engine import front_end, status
from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.phase_times import follow_outputs, times_of
from meridian_patch.engine.scheduler.parts import SchedulerPart
from meridian_patch.phase.progress import PhaseChange, PhaseProgress
from meridian_patch.telemetry import counters
from meridian_patch.telemetry.prometheus import PhaseMetrics

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = init_logger("vllm.meridian_patch")

DEFAULT_PORT: Final = 18_000
"""Port of the first rank behind the Rust front end."""

_EXPORTS: Final = ApiGuard("metrics of a step were not exported")

Changes = Mapping[str, PhaseChange]


class Exporter:
    """Turns what the scheduler hands over into metrics, in a thread of its own.

    Args:
        model_name: label value, as in vLLM's own metrics.
        engine: index of the engine among the data-parallel ranks.
    """

    def __init__(self, model_name: str, engine: int) -> None:
        self.registry = CollectorRegistry()
        self._engine = engine
        self._metrics = PhaseMetrics(model_name, self.registry)
        self._metrics.initialize(engine)
        self.count({f"{counters.INFO}:{version(envs.PLUGIN_NAME)}": 1})
        # Requests under way, with what the code of the API server reads of its request states.
        self._states: dict[str, Any] = {}

    def begin(self, request_id: str, arrival_s: float) -> None:
        """Follow a request, or a session's next turn, that arrived then by the wall clock."""
        stats = SimpleNamespace(arrival_time=arrival_s)
        self._states[request_id] = SimpleNamespace(progress=PhaseProgress(), stats=stats)

    def count(self, events: Mapping[str, float]) -> None:
        """Add what ``PhaseCounters`` counted in a step."""
        self._metrics.record(events, self._engine)

    def take(self, clients: Iterable[Any], changes: Changes, now_s: float, wall_s: float) -> None:
        """Take in a step's outputs.

        Args:
            clients: ``EngineCoreOutputs`` of the step.
            changes: of phases in it, by request id.
            now_s: when the step ended, by the monotonic clock.
            wall_s: the same by the wall clock.
        """
        step = SimpleNamespace(iteration_timestamp=wall_s)
        times = times_of(step)
        for client in clients:
            follow_outputs(self._states, client.outputs, now_s, step, changes=changes)
            for output in client.outputs:
                if output.finish_reason is not None:
                    state = self._states.pop(output.request_id, None)
                    if state is not None:
                        times.ended(state.progress)
        self._metrics.record(times.counts(), self._engine)
        self._metrics.observe(times.values, self._engine)

    def forget(self, request_id: str) -> None:
        """Forget a request that left the scheduler; one that was aborted has had no last output."""
        self._states.pop(request_id, None)


class MetricsPart(SchedulerPart):
    """Hands over what an ``Exporter`` needs.

    Args:
        exporter: used in this part's thread alone.
        changes: returns the changes of phases in the step that ends, by request id.
    """

    name = counters.METRICS_EXPORT

    def __init__(self, exporter: Exporter, changes: Callable[[], Changes]) -> None:
        self._exporter = exporter
        self._changes = changes
        # Requests that came and left since the last step's outputs, in this order.
        self._since: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._work: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        threading.Thread(target=self._run, name="meridian-metrics", daemon=True).start()

    def on_added(self, request: "Request", options: RequestOptions) -> None:
        self._begin(request)

    def on_session_continued(self, session: "Request", options: RequestOptions) -> None:
        self._begin(session)

    def on_freed(self, request: "Request") -> None:
        self._since.append((self._exporter.forget, (request.request_id,)))

    def before_update(self, scheduler_output: Any, model_output: Any) -> None:
        # What ends or begins within an update waits for the next one: the outputs of this one are
        # not handed over yet.
        for work in self._since:
            self._work.put(work)
        self._since.clear()

    def after_update(self, scheduler_output: Any, results: Any) -> None:
        now = time.monotonic(), time.time()
        arguments = (tuple(results.values()), self._changes(), *now)
        self._work.put((self._exporter.take, arguments))

    def count(self, events: Mapping[str, float]) -> None:
        """Hand over what was counted in a step; also after this part was switched off."""
        self._work.put((self._exporter.count, (events,)))

    def _begin(self, request: "Request") -> None:
        facts = request.request_id, request.arrival_time
        self._since.append((self._exporter.begin, facts))

    def _run(self) -> None:
        while True:
            work, arguments = self._work.get()
            with _EXPORTS:
                work(*arguments)


def build_metrics(
    scheduler: "Scheduler", config: MetricsConfig, changes: Callable[[], Changes]
) -> MetricsPart | None:
    """The part that exports metrics; None where the configuration or the front end needs none.

    A port that cannot be had ends no engine: the log and the status report say so.

    Args:
        scheduler: upstream's, initialized.
        config: section ``metrics``.
        changes: see ``MetricsPart``.
    """
    status.publish(metrics=None, metrics_off=None)
    first = config.port
    if first is None:
        first = DEFAULT_PORT if front_end.is_rust() else 0
    if not first:
        return None
    engine = int(scheduler.parallel_config.data_parallel_index)
    port = first + engine
    model_name = scheduler.vllm_config.model_config.served_model_name
    why = None
    if not scheduler.log_stats:
        why = "the server runs with --disable-log-stats"
    elif "PROMETHEUS_MULTIPROC_DIR" in envs.environment():
        # Load-bearing: its client then writes to files that several API servers add up.
        why = "PROMETHEUS_MULTIPROC_DIR is set: metrics would be counted twice; unset it"
    else:
        exporter = Exporter(model_name, engine)
        try:
            start_http_server(port, addr=config.host, registry=exporter.registry)
        except (OSError, OverflowError) as error:
            why = f"{config.host}:{port} cannot be had: {error}; set metrics.port to a free one"
    if why is not None:
        status.publish(metrics_off=why)
        logger.warning("meridian_patch: EngineCore exports no metrics: %s", why)
        return None
    host = f"[{config.host}]" if ":" in config.host else config.host
    status.publish(metrics=f"http://{host}:{port}/metrics")
    return MetricsPart(exporter, changes)
