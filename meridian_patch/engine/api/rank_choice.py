"""Places requests on the data-parallel rank with the least phase-weighted load."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meridian_patch import envs
from meridian_patch.config.load import load_config
from meridian_patch.engine.api.guard import ApiGuard
from meridian_patch.engine.api.phase_changes import peek_change
from meridian_patch.policy.profiles import choose_rules
from meridian_patch.policy.rank_choice import PlacedLoads

_GUARD = ApiGuard("requests were placed on ranks by vLLM's own counts")


def build_balancing_client(original: type) -> type:
    """``original``, vLLM's client of several ranks, that counts requests by their phases."""

    class BalancingClient(original):
        _placed: PlacedLoads | None = None

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # First, because upstream's may start to receive outputs.
            if choose_rules(load_config(envs.environment()).config.policy).balance:
                self._placed = PlacedLoads()
            super().__init__(*args, **kwargs)

        def get_core_engine_for_request(self, request: Any) -> Any:
            placed = self._placed
            if placed is None or request.request_id in self.reqs_in_flight:
                return super().get_core_engine_for_request(request)
            with self._weighted(placed):
                engine = super().get_core_engine_for_request(request)
            with _GUARD:
                placed.placed(request.request_id, engine)
            return engine

        # Load-bearing: a static method whose first argument is the client; upstream calls it with
        # all outputs of an engine before anything else sees them.
        @staticmethod
        async def process_engine_outputs(self: Any, outputs: Any) -> None:  # noqa: PLW0211
            placed = self._placed
            if placed is not None:
                with _GUARD:
                    _follow(placed, outputs)
            await super().process_engine_outputs(self, outputs)

        @contextmanager
        def _weighted(self, placed: PlacedLoads) -> Iterator[None]:
            """Within this context, vLLM's counts of running requests are weighted.

            Load-bearing: upstream scores a rank by the larger of its published counts (waiting and
            running) and this client's own requests on it, plus a penalty for requests that wait
            for KV blocks. It changes only the first count, of the rank that it chooses.
            """
            rows = self.lb_engines
            running = [row[1] for row in rows]
            try:
                with _GUARD:
                    for row, engine in zip(rows, self.core_engines, strict=False):
                        known = self.client_count * self.engine_inflight[engine]
                        known = max(known, row[0] + row[1])
                        # As upstream does, it assumes the same of the other clients' requests.
                        row[1] = known - row[0] + self.client_count * placed.beyond_count(engine)
                yield
            finally:
                for row, count in zip(rows, running, strict=True):
                    row[1] = count

    return BalancingClient


def _follow(placed: PlacedLoads, outputs: Any) -> None:
    for output in outputs.outputs:
        # Fast path: most outputs carry nothing.
        if output.kv_transfer_params:
            change = peek_change(output)
            if change is not None:
                placed.changed(output.request_id, is_thinking=bool(change.is_thinking))
    for request_id in outputs.finished_requests or ():
        placed.ended(request_id)
