"""Puts the ticket of a hand-off into the last chunk of a stream, as whole responses have it."""

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from meridian_patch.handoff.ticket import FACTS

_EVENT = "data: {"
_FIELD = "kv_transfer_params"


class Tickets:
    """The ticket of one response, kept until the chunk that ends its only choice."""

    def __init__(self) -> None:
        self._ticket: dict[str, Any] | None = None

    async def watch(self, results: AsyncGenerator[Any]) -> AsyncIterator[Any]:
        """Pass on vLLM's results, plain or numbered by prompt, and keep a ticket among them."""
        async with aclosing(results):
            async for item in results:
                result = item[-1] if isinstance(item, tuple) else item
                params = result.kv_transfer_params
                if params and FACTS in params:
                    self._ticket = params
                yield item

    def add_to_event(self, event: str) -> str:
        """Add the ticket to the server-sent event that ends the choice."""
        if self._ticket is None or not event.startswith(_EVENT):
            return event
        chunk = json.loads(event.removeprefix("data: "))
        if not any(choice.get("finish_reason") for choice in chunk.get("choices", ())):
            return event
        chunk[_FIELD], self._ticket = self._ticket, None
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
