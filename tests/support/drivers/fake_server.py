"""An HTTP server in this process that replies what a test says, as vLLM's would."""

import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from meridian_patch.telemetry.metrics import METRICS


class Page:
    """A page of metrics.

    Attributes:
        hits: of the prefix cache, in tokens.
        changes: what is not 0, by name and value of the metric's label.
        is_patched: whether our metrics are on it.
        has_stats: whether vLLM's metrics of requests are on it.
        block_size: tokens per KV block.
        lines: further ones.
    """

    def __init__(self) -> None:
        self.hits = 0.0
        self.changes: dict[tuple[str, str], float] = {}
        self.is_patched = True
        self.has_stats = True
        self.block_size = 16
        self.lines: list[str] = []

    def text(self) -> str:
        cache = f'block_size="{self.block_size}",cache_dtype="auto",enable_prefix_caching="True"'
        lines = [
            "# TYPE vllm:prefix_cache_hits counter",
            f'vllm:prefix_cache_hits_total{{engine="0"}} {self.hits}',
            "# TYPE vllm:cache_config_info gauge",
            f"vllm:cache_config_info{{{cache}}} 1.0",
            *self.lines,
        ]
        if self.has_stats:
            lines += [
                "# TYPE vllm:num_requests_running gauge",
                'vllm:num_requests_running{model_name="m"} 2',
                "# TYPE vllm:num_requests_waiting gauge",
                'vllm:num_requests_waiting{model_name="m"} 0',
            ]
        for metric in METRICS if self.is_patched else ():
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            for value in metric.values or ("any",):
                number = self.changes.get((metric.exported_name, value), 0.0)
                labels = f'engine="0",{metric.label}="{value}"'
                lines.append(f"{metric.sample_name}{{{labels}}} {number}")
        return "\n".join(lines) + "\n"


class FakeServer:
    """What the server replies; change it before it is asked.

    Attributes:
        url: its address.
        page: its metrics.
        replies: status, and JSON or text, by path.
        asked: path and body of each POST.
        num_asked: requests of any kind.
        headers: of each request.
        sent: headers of every reply, beside its length.
        missing_bytes: by how much a reply is shorter than its length says.
        on_asked: called with the path of each POST before the reply.
    """

    def __init__(self) -> None:
        self.page = Page()
        self.url = ""
        self.num_asked = 0
        self.headers: list[Mapping[str, str]] = []
        self.sent: dict[str, str] = {}
        self.missing_bytes = 0
        self.on_asked: Callable[[str], Any] = str
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self.replies: dict[str, Any] = {
            "/health": (200, ""),
            "/version": (200, {"version": "0.32.0"}),
            "/v1/models": (200, {"data": [{"id": "m", "root": "tiny", "max_model_len": 1024}]}),
            "/v1/chat/completions": (200, closed_reply()),
            "/v1/completions": (200, {"usage": {"prompt_tokens": 100}}),
        }

    def reply_to(self, path: str, body: Mapping[str, Any] | None) -> tuple[int, str]:
        self.num_asked += 1
        if body is not None:
            self.asked.append((path, body))
            self.on_asked(path)
            if path == "/v1/completions":
                # The first one fills the cache.
                self.page.hits += 0 if [p for p, _ in self.asked].count(path) == 1 else 96
        if path == "/metrics" and path not in self.replies:
            return 200, self.page.text()
        status, value = self.replies.get(path, (404, {"error": "not found"}))
        return status, value if isinstance(value, str) else json.dumps(value)


def closed_reply(reason: str | None = "hard_cap", reasoning_tokens: int | None = 9) -> dict:
    """A chat completion whose thought was closed at its cap."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": "stop"}
    if reason is not None:
        choice["meridian"] = {"exit_reason": reason, "think_tokens": 9}
    details = None if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    return {"choices": [choice], "usage": {"completion_tokens_details": details}}


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[FakeServer]:
    """A server that listens on this machine until the block ends."""
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._reply(None)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            self._reply(json.loads(self.rfile.read(length)))

        def _reply(self, body: Mapping[str, Any] | None) -> None:
            fake.headers.append(dict(self.headers))
            status, text = fake.reply_to(self.path, body)
            data = text.encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + fake.missing_bytes))
            for name, value in fake.sent.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.url = f"http://127.0.0.1:{listener.server_address[1]}"
    if tls is not None:
        listener.socket = tls.wrap_socket(listener.socket, server_side=True)
        fake.url = fake.url.replace("http", "https")
    thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield fake
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
