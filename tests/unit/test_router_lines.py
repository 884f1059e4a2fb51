"""How the router reads a stream: its lines, and what is no event."""

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import pytest

from meridian_patch.router.command import engines_of
from meridian_patch.router.engine_client import EngineClient, EngineFailed

DONE = b"data: [DONE]\n\n"


class Parts(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


def read(*parts: bytes) -> list[dict]:
    """The events of a stream that comes in these parts."""
    (engine,) = engines_of(["http://a"], [])
    transport = httpx.MockTransport(lambda _: httpx.Response(200, stream=Parts(list(parts))))

    async def run() -> list[dict]:
        async with httpx.AsyncClient(transport=transport) as http:
            return [each async for each in EngineClient(http).events(engine, "/", {}, {})]

    return asyncio.run(run())


@pytest.mark.parametrize("char", ("\u2028", "\u2029", "\x85", "\x0b", "\x1c"), ids=ascii)
def test_only_a_line_feed_ends_a_line(char: str) -> None:
    """vLLM writes the first three as they are within its JSON."""
    event = {"text": f"a{char}b"}
    line = json.dumps(event, ensure_ascii=ord(char) < 0x20).encode()
    assert read(b"data: " + line + b"\n\n" + DONE) == [event]


def test_lines_and_characters_come_in_any_parts() -> None:
    events = [{"text": "hm \u2028 é"}, {"text": "6"}]
    lines = [b"data:" + json.dumps(each, ensure_ascii=False).encode() for each in events]
    stream = b": a comment\r\n" + b"\r\n\r\n".join(lines) + b"\r\n\r\ndata: [DONE]"
    for size in (1, 2, 3, 7, len(stream)):
        parts = [stream[begin : begin + size] for begin in range(0, len(stream), size)]
        assert read(*parts) == events


@pytest.mark.parametrize("line", (b'{"text"', b"5", b"[1]", b'{"text": "\xff"}'))
def test_an_event_that_cannot_be_read_takes_no_engine_from_others(line: bytes) -> None:
    with pytest.raises(EngineFailed) as failed:
        read(b"data: " + line + b"\n\n", DONE)
    assert not failed.value.is_down


def test_a_stream_without_its_end_is_a_loss() -> None:
    with pytest.raises(EngineFailed, match="without") as failed:
        read(b'data: {"text": "6"}\n\n')
    assert failed.value.is_down
