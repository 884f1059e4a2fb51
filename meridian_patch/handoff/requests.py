"""``offload`` and ``ingest``: the bodies of the two requests that a hand-off consists of.

For proxies of your own, before engines with ``--role think`` and ``--role answer`` that do not know
each other. Bodies are those of vLLM's token endpoint, which both need ``--enable-scale-out`` for::

    path = "/inference/v1/generate"
    first = client.post(f"{think}{path}", json=offload(body)).json()
    ticket = ticket_in(first)
    if ticket is not None:
        thought = first["choices"][0]["token_ids"]
        second = client.post(f"{answer}{path}", json=ingest(body, thought, ticket)).json()
"""

from collections.abc import Mapping, Sequence
from typing import Any

from meridian_patch.engine import wire
from meridian_patch.errors import ConfigError
from meridian_patch.handoff.second_leg import TRANSFER, extra_args_after, limits_after
from meridian_patch.handoff.ticket import OFFER, Facts, facts_in

Json = dict[str, Any]


def offload(body: Mapping[str, Any]) -> Json:
    """The request for the think engine: it may end after its thought, and leave a ticket.

    Args:
        body: ``token_ids`` of the prompt and ``sampling_params``. The response is not streamed:
            vLLM's streams of tokens have no tickets.

    Raises:
        ConfigError: it asks for several choices, which would have one ticket.
    """
    number = body["sampling_params"].get("n", 1)
    if number != 1:
        raise ConfigError(f"sampling_params field n is {number!r}, expected 1 for a hand-off")
    return {**body, "stream": False, TRANSFER: dict(OFFER)}


def ticket_in(reply: Mapping[str, Any]) -> Json | None:
    """The ticket in a response of a think engine; None if the request ended there.

    Raises:
        ConfigError: there is one, and it is not what a think engine writes.
    """
    params = reply.get(TRANSFER)
    return dict(params) if params and facts_in(params) else None


def ingest(body: Mapping[str, Any], thought: Sequence[int], ticket: Mapping[str, Any]) -> Json:
    """The request for the answer engine, which goes on where the think engine ended.

    Args:
        body: as it was given to ``offload``.
        thought: token ids of the think engine's response.
        ticket: what ``ticket_in`` returned.
    """
    facts = Facts.model_validate(ticket[wire.FACTS])
    most = facts.num_output_tokens + facts.max_tokens_left
    given = {**body["sampling_params"], "max_tokens": most}
    sampling = {**given, **limits_after(given, len(thought))}
    sampling["extra_args"] = extra_args_after(given, len(thought))
    # Its thought is over.
    sampling.pop("thinking_token_budget", None)
    return {
        **body,
        "token_ids": [*body["token_ids"], *thought],
        "sampling_params": sampling,
        "reasoning_ended": True,
        TRANSFER: dict(ticket),
    }
