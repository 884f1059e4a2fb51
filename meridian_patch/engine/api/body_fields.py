"""Finds ``meridian_*`` fields wherever a request's body has them, and as they were sent."""

import json
from collections.abc import Mapping
from typing import Any

from meridian_patch.config.request_options import PREFIX
from meridian_patch.config.validate import cut
from meridian_patch.engine.api.exit_summary import RequestRefused


async def restore_fields(request: Any, raw_request: Any) -> None:
    """Give a request its fields as the HTTP body has them.

    In ``vllm_xargs``, vLLM makes 1 of ``true``. Of the body of ``/v1/messages`` it makes a chat
    request without fields that it does not know.

    Args:
        request: as vLLM read it.
        raw_request: Starlette's; None for a request that did not come by HTTP.
    """
    # Load-bearing: FastAPI has read the body with this object, which keeps it.
    body = b"" if raw_request is None else await raw_request.body()
    if PREFIX.encode() not in body:
        return
    sent = json.loads(body)
    inner = sent.get("vllm_xargs")
    if isinstance(inner, dict) and _ours(inner):
        request.vllm_xargs = {**(request.vllm_xargs or {}), **_ours(inner)}
    # Load-bearing: request models keep unknown fields in this dict.
    request.model_extra.update(_ours(sent))


def move_fields(request: Any) -> None:
    """Move fields from the top level of a body into ``vllm_xargs``, which vLLM passes on.

    What a client of the OpenAI package has in ``extra_body`` comes at the top level, where vLLM
    ignores it.

    Raises:
        RequestRefused: a field is in both places.
    """
    outer = _ours(getattr(request, "model_extra", None) or {})
    if not outer:
        return
    inner = getattr(request, "vllm_xargs", None) or {}
    twice = sorted(outer.keys() & inner.keys())
    if twice:
        raise RequestRefused(
            f"field {cut(twice[0])} is at the top level of the body and in vllm_xargs, expected in "
            "one of them"
        )
    for name in outer:
        del request.model_extra[name]
    request.vllm_xargs = {**inner, **outer}


def _ours(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name.startswith(PREFIX)}
