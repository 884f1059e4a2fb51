"""A TCP proxy whose connections can be reset."""

import asyncio
import random
import socket
import struct
from contextlib import suppress

_HOST = "127.0.0.1"
_PIECE_BYTES = 65_536
# Closing a socket with this option sends a reset, not an end.
_RESET = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a port of this machine.

    Args:
        target: port to forward to.
        seed: of the choice of connections to reset.

    Attributes:
        port: that it listens on; 0 before ``start``.
        num_reset: connections that were reset.
    """

    def __init__(self, target: int, seed: int = 0) -> None:
        self._target = target
        self._random = random.Random(seed)
        self._server: asyncio.Server | None = None
        self._open: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self.port = 0
        self.num_reset = 0

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, _HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Listen no more, and reset what is open."""
        if self._server is not None:
            self._server.close()
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
