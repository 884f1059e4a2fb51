"""What hinders servers from outside: a proxy that resets, a slow collector, a slow scraper."""

import asyncio
import random
import socket
import struct
from abc import ABC, abstractmethod
from contextlib import suppress

_HOST = "127.0.0.1"
_PIECE_BYTES = 65_536
# Closing a socket with this option sends a reset, not an end.
_RESET = struct.pack("ii", 1, 0)
_OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
_SIP_BYTES = 64


class _Listener(ABC):
    """A server on a free port of this machine.

    Attributes:
        port: that it listens on; 0 before ``start``.
    """

    def __init__(self) -> None:
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None:
            self._server.close()

    @abstractmethod
    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a connection."""


class Proxy(_Listener):
    """Forwards connections to a port of this machine.

    Args:
        target: port to forward to.
        seed: of the choice of connections to reset.

    Attributes:
        num_reset: connections that were reset.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)
        super().__init__()
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.num_reset = 0

    def close(self) -> None:
        """Listen no more, and reset what is open."""
        super().close()
        self.reset(1.0)

    def reset(self, share: float) -> None:
        """Reset each open connection with this probability, on both of its sides."""
        for pair in list(self._open):
            if self._random.random() < share:
                self.num_reset += 1
                for writer in pair:
                    _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(_HOST, self._target)
        except OSError:
            _reset(writer)
            return
        pair = (writer, far_writer)
        self._open.add(pair)
        try:
            await asyncio.gather(_pump(reader, far_writer), _pump(far_reader, writer))
        finally:
            self._open.discard(pair)
            for each in pair:
                each.close()


class Collector(_Listener):
    """Takes exports over HTTP and answers them, after ``delay_s``.

    Attributes:
        delay_s: seconds until an export is answered.
        num_exports: exports that came.
    """

    def __init__(self) -> None:
        super().__init__()
        self.delay_s = 0.0
        self.num_exports = 0

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


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.write_eof()
    except OSError:
        # A broken connection is broken on the other side, too.
        _reset(writer)


def _reset(writer: asyncio.StreamWriter) -> None:
    own = writer.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
