"""Asks a running server over HTTP; every failure is one sentence."""

import http.client
import json
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from meridian_patch.errors import MeridianError
from meridian_patch.operate.text import printable

_LOCAL = frozenset(("localhost", "127.0.0.1", "::1", "0.0.0.0"))  # noqa: S104 - compared with
# Without a scheme: a name or an address, IPv6 in brackets, then a port and perhaps a path.
_HOST_PORT = re.compile(r"(?:[\w.-]+|\[[\w:.]+\]):\d+(?:/.*)?")
_MOST_SHOWN = 200
_MOST_BYTES = 2**25
_GET_LIMIT_S = 10.0


class ServerError(MeridianError):
    """A server cannot be reached, or its reply cannot be used."""


class Reply(NamedTuple):
    """Status and body of a reply."""

    status: int
    text: str

    @property
    def is_ok(self) -> bool:
        """Whether the server did what it was asked for."""
        return self.status == HTTPStatus.OK

    @property
    def begin(self) -> str:
        """Status and the body's beginning, in one line."""
        return f"HTTP {self.status}: {printable(' '.join(self.text.split())[:_MOST_SHOWN])}".rstrip(
            ": "
        )


class _StayingHandler(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: another host would be sent the API key."""

    def redirect_request(self, *_: Any) -> None:
        """No request: the redirect itself is the reply."""


class ServerClient:
    """A server at an address.

    Args:
        url: ``http://host:port``, or ``host:port`` for HTTP, with or without a path before vLLM's
            own paths.
        api_key: sent as a bearer token; None: none is sent.
        limit_s: most seconds that one read of a reply to a POST may take.
        tls: what verifies the server; None: what the system trusts.
        is_direct: ask through no proxy, as engines ask each other.

    Raises:
        ServerError: the address is no HTTP address, or holds a user or password.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        limit_s: float = 30.0,
        *,
        tls: ssl.SSLContext | None = None,
        is_direct: bool = False,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/metrics")
        if _HOST_PORT.fullmatch(self.url):
            self.url = f"http://{self.url}"
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            is_usable = None
        if "@" in url:
            # The address is not quoted: it may hold a password.
            raise ServerError("the address may hold no user and no password: http://host:port")
        if not is_usable:
            raise ServerError(f"address {url!r} is no http://host:port")
        self.host = parts.hostname or ""
        handlers: list[urllib.request.BaseHandler] = [_StayingHandler()]
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=tls))
        if is_direct or self.is_local:
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
        self._api_key = api_key
        self._limit_s = limit_s

    @property
    def is_local(self) -> bool:
        """Whether the address is this machine's own."""
        return self.host in _LOCAL

    def get(self, path: str) -> Reply:
        """The reply to a GET, which takes no computing.

        Raises:
            ServerError: there is no reply, or it is cut off.
        """
        return self._ask(path, None, min(self._limit_s, _GET_LIMIT_S))

    def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Reply:
        """The reply to a POST of a JSON object.

        Args:
            path: below the server's address.
            body: the object.
            headers: sent with it.

        Raises:
            ServerError: there is no reply, or it is cut off.
        """
        return self._ask(path, json.dumps(body).encode(), self._limit_s, headers)

    def metrics(self) -> str:
        """The text of ``/metrics``.

        Raises:
            ServerError: there is none.
        """
        reply = self.get("/metrics")
        if not reply.is_ok:
            raise ServerError(f"{self.url}/metrics replies {reply.begin}, expected HTTP 200")
        return reply.text

    def _ask(
        self,
        path: str,
        data: bytes | None,
        limit_s: float,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        sent = dict(headers or {})
        if data is not None:
            sent["Content-Type"] = "application/json"
        if self._api_key:
            sent["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(f"{self.url}{path}", data, sent)  # noqa: S310 - checked
        try:
            return self._reply_to(request, limit_s)
        except urllib.error.URLError as error:
            raise ServerError(f"{self.url} cannot be reached: {error.reason}") from error
        except (OSError, http.client.HTTPException, ValueError, OverflowError) as error:
            why = str(error) or type(error).__name__
            raise ServerError(f"{self.url}{path} gave no whole reply: {why}") from error

    def _reply_to(self, request: urllib.request.Request, limit_s: float) -> Reply:
        try:
            opened = self._opener.open(request, timeout=limit_s)
        except urllib.error.HTTPError as error:
            opened = error
        with opened:
            body = opened.read(_MOST_BYTES)
            # A read with a limit does not say that the body ended before its Content-Length.
            missing = getattr(opened, "length", None)
            if missing:
                raise http.client.IncompleteRead(body, missing)
            return Reply(opened.status, body.decode(errors="replace"))


def read_object(text: str) -> dict[str, Any]:
    """A reply's JSON object; an empty one for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
