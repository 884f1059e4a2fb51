"""Adds the phases of requests to vLLM's own load report, the header of a response."""

import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any, Final

from prometheus_client import REGISTRY, CollectorRegistry

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_GAUGE: Final = "meridian_requests"
# Load-bearing: vLLM's report is `TEXT named_metrics.NAME=VALUE, ...` or
# `JSON {"named_metrics": {NAME: VALUE, ...}}`, and may have no metric.
_HEADER: Final = b"endpoint-load-metrics"
_TEXT, _JSON, _NAMED = "TEXT", "JSON", "named_metrics"


class LoadReport:
    """ASGI middleware for vLLM's option ``--middleware``.

    It adds ``meridian_requests_PHASE`` to a report that vLLM made, and makes none itself.

    Args:
        app: vLLM's server.
        registry: has the gauge of requests by phase.
    """

    def __init__(self, app: App, registry: CollectorRegistry = REGISTRY) -> None:
        self._app = app
        self._registry = registry

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    (name, self._extended(value) if name.lower() == _HEADER else value)
                    for name, value in message.get("headers", ())
                ]
            await send(message)

        await self._app(scope, receive, sent)

    def _extended(self, report: bytes) -> bytes:
        return with_phases(report.decode("latin-1"), self._by_phase()).encode("latin-1")

    def _by_phase(self) -> dict[str, float]:
        """Unfinished requests by phase, of all engines behind this API server."""
        found: dict[str, float] = {}
        for metric in self._registry.restricted_registry([_GAUGE]).collect():
            for sample in metric.samples:
                name = f"{_GAUGE}_{sample.labels['phase']}"
                found[name] = found.get(name, 0.0) + sample.value
        return found


def with_phases(report: str, phases: Mapping[str, float]) -> str:
    """A load report with more metrics; one of another form is returned as it is.

    Args:
        report: the value of vLLM's header.
        phases: metrics to add.
    """
    form, _, rest = report.partition(" ")
    if form == _TEXT:
        added = [f"{_NAMED}.{name}={value}" for name, value in phases.items()]
        return f"{_TEXT} {', '.join([*filter(None, [rest]), *added])}"
    if form == _JSON:
        try:
            content = json.loads(rest)
            content[_NAMED] = {**content[_NAMED], **phases}
        except (ValueError, LookupError, TypeError):
            return report
        return f"{_JSON} {json.dumps(content)}"
    return report
