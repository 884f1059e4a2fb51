"""Serves a request that is not streamed: its thought on one engine, its answer on another."""

from typing import Any

from meridian_patch.handoff.requests import ingest, resume, ticket_in
from meridian_patch.handoff.ticket import PROMPT_IDS, facts_in
from meridian_patch.router.attempts import Attempts, Services
from meridian_patch.router.engine_client import EngineFailed, EngineRefused
from meridian_patch.router.pool import Role
from meridian_patch.router.stream_state import joined_usage

Json = dict[str, Any]


class WholeRelay:
    """Serves one request.

    Args:
        services: what all requests share.
        path: of the endpoint.
        body: the request as the client sent it.
        headers: to pass on.
    """

    def __init__(self, services: Services, path: str, body: Json, headers: dict[str, str]) -> None:
        self._services = services
        self._path = path
        self._body = body
        self._headers = headers
        self._attempts = Attempts(services.pool, body)

    async def response(self) -> Json:
        """The response for the client.

        Raises:
            NoEngine: no engine is left.
            EngineRefused: the request is wrong.
            ConfigError: a think engine's ticket is wrong.
        """
        first = await self._sent("think", self._attempts.first_body())
        ticket = ticket_in(first)
        if ticket is None:
            return first
        first.pop("kv_transfer_params", None)
        return joined(first, await self._answer(ticket))

    async def _answer(self, ticket: Json) -> Json:
        engine = self._attempts.choose("answer")
        body = ingest(self._body, ticket)
        client, metrics = self._services.client, self._services.metrics
        try:
            second = await client.whole(engine, self._path, body, self._headers)
        except (EngineFailed, EngineRefused) as error:
            self._attempts.failed(engine, error)
        else:
            metrics.moved("moved")
            return second
        metrics.moved("answered_again")
        facts = facts_in(ticket)
        num_output_tokens = facts.num_output_tokens if facts else 0
        again = resume(self._body, ticket[PROMPT_IDS], num_output_tokens)
        return await self._sent("think", again)

    async def _sent(self, role: Role, body: Json) -> Json:
        while True:
            engine = self._attempts.choose(role)
            try:
                return await self._services.client.whole(engine, self._path, body, self._headers)
            except EngineFailed as error:
                self._attempts.failed(engine, error)
                self._services.metrics.moved("resumed")


def joined(first: Json, second: Json) -> Json:
    """One response of two: the thought of the first, and the answer of the second."""
    before, after = first["choices"][0], second["choices"][0]
    choice = {**before, **after}
    if "message" in after:
        names = ("reasoning", "reasoning_content")
        thought = {name: before["message"][name] for name in names if before["message"].get(name)}
        choice["message"] = {**after["message"], **thought}
        content = before["message"].get("content")
        if content:
            # Tokens that were accepted in the same step as the boundary.
            choice["message"]["content"] = content + (after["message"].get("content") or "")
    else:
        choice["text"] = before["text"] + after["text"]
    if before.get("token_ids") and after.get("token_ids"):
        choice["token_ids"] = [*before["token_ids"], *after["token_ids"]]
    usage = joined_usage(first["usage"], second["usage"])
    return {**first, "choices": [choice], "usage": usage}
