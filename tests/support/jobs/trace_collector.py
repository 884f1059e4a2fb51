"""Takes what OpenTelemetry exports over HTTP, as a collector does."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

LIMIT_S = 30


class TraceCollector:
    """Listens on entry; spans are dicts of their attributes, by name of the span.

    ``id``, ``parent``, ``begin_s`` and ``end_s`` of a span are among them.
    """

    def __init__(self) -> None:
        self._spans: list[tuple[str, dict]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def env(self) -> dict[str, str]:
        """For a server that is to export without delay."""
        return {
            "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/v1/traces"

    def wait_for(self, name: str, number: int) -> list[dict]:
        """The attributes of the spans of a name, as soon as there are so many."""
        deadline = time.monotonic() + LIMIT_S
        while len(found := [each for kind, each in self._spans if kind == name]) < number:
            assert time.monotonic() < deadline, f"{len(found)} of {number} spans {name!r} came"
            time.sleep(0.05)
        return found

    def _take(self, export: ExportTraceServiceRequest) -> None:
        for resource in export.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    own = {
                        "id": span.span_id,
                        "parent": span.parent_span_id,
                        "begin_s": span.start_time_unix_nano / 1e9,
                        "end_s": span.end_time_unix_nano / 1e9,
                    }
                    attributes = dict(map(_attribute, span.attributes))
                    self._spans.append((span.name, attributes | own))


def _attribute(pair) -> tuple[str, object]:
    return pair.key, getattr(pair.value, pair.value.WhichOneof("value"))
