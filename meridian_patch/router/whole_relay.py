"""Serves a request that is not streamed: its thought on one engine, its answer on another.

The answer is streamed from its engine: vLLM's parsers of whole texts do not look at the prompt, and
would take an answer whose thought is in the prompt for a thought.
"""

from typing import Any

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.requests import ticket_in
from meridian_patch.router.attempts import Attempts, Services
from meridian_patch.router.engine import Engine
from meridian_patch.router.engine_client import EngineFailed, Headers, take_abort, within
from meridian_patch.router.stream_relay import StreamRelay
from meridian_patch.router.stream_state import without_places

Json = dict[str, Any]


class WholeRelay:
    """Serves one request.

    Args:
        services: what all requests share.
        path: of the endpoint.
        body: the request as the client sent it.
        headers: to pass on.
    """

    def __init__(self, services: Services, path: str, body: Json, headers: Headers) -> None:
        self._services = services
        self._where = path, body, headers

    async def response(self) -> Json:
        """The response for the client.

        Raises:
            NoEngine: no engine is left.
            EngineRefused: the request is wrong.
        """
        path, body, headers = self._where
        attempts = Attempts(self._services.pool, body)
        first, engine = await self._thought(attempts)
        ticket = ticket_in(first)
        if ticket is None:
            return first
        first.pop("kv_transfer_params", None)
        relay = StreamRelay(self._services, path, body, headers, attempts)
        choice = first["choices"][0]
        async for chunk in relay.rest(ticket, engine):
            for part in chunk["choices"]:
                extend(choice, part)
        without_places(choice)
        if relay.usage is not None:
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            first["usage"] |= {name: relay.usage[name] for name in counts}
        return first

    async def _thought(self, attempts: Attempts) -> tuple[Json, Engine]:
        path, _, headers = self._where
        while True:
            engine = await attempts.choose("think")
            body = attempts.first_body(engine)
            reply = self._services.client.whole(engine, path, body, headers)
            try:
                whole = await within(engine, reply, may_leave=not attempts.is_last)
                _check(whole)
            except EngineFailed as error:
                attempts.failed(engine, error)
                self._services.metrics.moved("resumed")
            else:
                return whole, engine


def _check(whole: Json) -> None:
    """Refuse what another engine should serve from its beginning.

    Raises:
        EngineFailed: the engine aborted the request, or its ticket is wrong.
    """
    if take_abort(whole):
        raise EngineFailed("it aborted the request", is_down=False)
    try:
        ticket_in(whole)
    except ConfigError as error:
        raise EngineFailed(str(error), is_down=False) from error


def extend(choice: Json, part: Json) -> None:
    """Append a streamed piece to a choice of a whole response, in place."""
    if "text" in part:
        choice["text"] += part["text"]
    else:
        _extend_message(choice["message"], part["delta"])
    if part.get("token_ids"):
        choice["token_ids"] = [*(choice.get("token_ids") or ()), *part["token_ids"]]
    logprobs = part.get("logprobs") or {}
    for name, values in logprobs.items():
        if isinstance(values, list):
            kept = choice.setdefault("logprobs", None) or {}
            choice["logprobs"] = {**kept, name: [*(kept.get(name) or ()), *values]}
    for name in ("finish_reason", "stop_reason", "meridian"):
        if part.get(name) is not None:
            choice[name] = part[name]
        elif name == "stop_reason" and part.get("finish_reason"):
            choice[name] = None


def _extend_message(message: Json, delta: Json) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        if delta.get(name):
            message[name] = (message.get(name) or "") + delta[name]
    for call in delta.get("tool_calls") or ():
        _extend_call(message, call)


def _extend_call(message: Json, piece: Json) -> None:
    calls = message["tool_calls"] = message.get("tool_calls") or []
    while len(calls) <= piece["index"]:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[piece["index"]]
    call["id"] = piece.get("id") or call["id"]
    function = piece.get("function") or {}
    call["function"]["name"] = function.get("name") or call["function"]["name"]
    call["function"]["arguments"] += function.get("arguments") or ""
