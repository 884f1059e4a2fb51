"""Serves the page and its data to browsers of this machine."""

import errno
import ipaddress
import json
import socket
import socketserver
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from meridian_patch.errors import MeridianError
from meridian_patch.operate.top.web.history import History

_FILES: Final = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/chart.js": ("chart.js", "text/javascript; charset=utf-8"),
    "/words.js": ("words.js", "text/javascript; charset=utf-8"),
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


class ListenError(MeridianError):
    """The page cannot be served at the address."""


class _Listener(socketserver.ThreadingTCPServer):
    """Listens; a thread per request."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, history: History, host: str, port: int) -> None:
        # Read before a browser asks: an installation that lacks one fails at once.
        folder = files("meridian_patch.operate.top.web")
        self.bodies = {
            path: (kind, folder.joinpath(name).read_bytes())
            for path, (name, kind) in _FILES.items()
        }
        self.history = history
        self.names = {"localhost", host.lower()} - {""}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        if not self.is_loopback:
            self.names.add(socket.gethostname().lower())

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        return ipaddress.ip_address(str(self.server_address[0])).is_loopback

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, but not of a connection that a browser ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    """One request of a browser."""

    # Seconds that a connection may stay silent.
    timeout = 10.0
    server: _Listener

    def do_GET(self) -> None:
        """Reply with the page, its data, or a refusal in one sentence."""
        if not is_named(self.headers.get("Host", ""), self.server.names):
            # Another site's name that leads here (DNS rebinding) would read the data as its own.
            port = self.server.server_address[1]
            self._refuse(f"open this page as http://127.0.0.1:{port}, or by --host's name")
        elif self._is_foreign():
            self._refuse("another site asks for this page's data")
        else:
            self._reply_to(self.path)

    def log_message(self, *_: Any) -> None:
        """Print nothing: the terminal has the address alone."""

    def version_string(self) -> str:
        """Name no versions."""
        return "meridian"

    def _is_foreign(self) -> bool:
        """Whether a page of another origin asks: a link to this page is all that one may have."""
        origin, site = self.headers.get("Origin"), self.headers.get("Sec-Fetch-Site")
        if origin is not None and origin.lower() != f"http://{self.headers['Host']}".lower():
            return True
        return site in {"cross-site", "same-site"} and self.path != "/"

    def _reply_to(self, target: str) -> None:
        path, _, query = target.partition("?")
        if path == "/points":
            self._send(HTTPStatus.OK, "application/json", self._points(query))
        elif path in self.server.bodies:
            self._send(HTTPStatus.OK, *self.server.bodies[path])
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"no such page\n")

    def _points(self, query: str) -> bytes:
        asked = parse_qs(query)
        run, after = asked.get("run", [""])[0], asked.get("after", ["0"])[0]
        number = int(after) if after.isdecimal() and len(after) < len(str(2**63)) else 0
        return json.dumps(self.server.history.since(run, number), allow_nan=False).encode()

    def _refuse(self, why: str) -> None:
        self._send(HTTPStatus.FORBIDDEN, "text/plain; charset=utf-8", f"{why}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def serving(history: History, host: str, port: int) -> Iterator[tuple[str, bool]]:
    """Serve the page until the block ends.

    Args:
        history: what it shows.
        host: name or address of this machine to listen on.
        port: 0 for any free one.

    Yields:
        The page's address, and whether only this machine can connect.

    Raises:
        ListenError: the address is not this machine's, or its port is taken.
    """
    try:
        listener = _Listener(history, host, port)
    except OSError as error:
        raise ListenError(_why(error, host, port)) from error
    with listener:
        thread = threading.Thread(target=listener.serve_forever, kwargs={"poll_interval": 0.1})
        thread.start()
        try:
            name = f"[{host}]" if ":" in host else host
            yield f"http://{name}:{listener.server_address[1]}", listener.is_loopback
        finally:
            listener.shutdown()
            thread.join()


def is_named(header: str, names: set[str]) -> bool:
    """Whether a ``Host`` header has an IP address, or one of these names, with any port.

    An address cannot be made to lead elsewhere; with a tunnel the browser's port is another one.
    """
    try:
        host = urlsplit(f"//{header}").hostname or ""
    except ValueError:
        return False
    if host in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _why(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} of {host} is in use; choose another one with --port, 0 for any"
    reason = error.strerror or error
    return f"the page cannot be served at {host} port {port}: {reason}; see --host and --port"
