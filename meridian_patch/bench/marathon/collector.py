"""A collector of traces that takes whatever comes, and a scraper of metrics that reads slowly."""

import asyncio
from contextlib import suppress

_HOST = "127.0.0.1"
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_SIP_BYTES = 64


class Collector:
    """Takes exports over HTTP and answers them, after ``delay_s``.

    Attributes:
        port: that it listens on; 0 before ``start``.
        delay_s: seconds until an export is answered.
        num_exports: exports that came.
    """

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self.port = 0
        self.delay_s = 0.0
        self.num_exports = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    @property
    def endpoint(self) -> str:
        """Where vLLM is to export to."""
        return f"http://{_HOST}:{self.port}/v1/traces"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                await reader.readexactly(_length_in(head))
                self.num_exports += 1
                await asyncio.sleep(self.delay_s)
                writer.write(_OK)
                await writer.drain()
        writer.close()


async def scrape_slowly(port: int, seconds: float) -> None:
    """Ask for ``/metrics`` and read a few bytes per second; the connection is then dropped."""
    with suppress(OSError):
        reader, writer = await asyncio.open_connection(_HOST, port, limit=_SIP_BYTES)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: marathon\r\n\r\n")
        for _ in range(int(seconds)):
            await reader.read(_SIP_BYTES)
            await asyncio.sleep(1)
        writer.close()


def _length_in(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length":
            return int(value)
    return 0
