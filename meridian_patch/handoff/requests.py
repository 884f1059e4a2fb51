"""``offload`` and ``ingest``: the bodies of the two requests that a hand-off consists of.

For proxies of your own; ``meridian route`` uses them too. A chat request that thinks on one
engine and answers on another is sent twice::

    first = client.post(f"{think}/v1/chat/completions", json=offload(body)).json()
    ticket = ticket_in(first)
    if ticket is not None:
        second = client.post(f"{answer}/v1/chat/completions", json=ingest(body, ticket)).json()

Bodies are those of ``/v1/chat/completions`` or ``/v1/completions``, as JSON objects.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from meridian_patch.handoff.ticket import FACTS, OFFER, PROMPT_IDS, Facts, facts_in

Json = dict[str, Any]

_TRANSFER: Final = "kv_transfer_params"
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
# Their effect depends on tokens before the boundary, or they ask for what has been sent already.
_FIRST_ONLY: Final = ("echo", "prompt_logprobs")
_BUDGET: Final = "thinking_token_budget"
_OUR_BUDGET: Final = "meridian_max_think_tokens"


def cleaned(body: Mapping[str, Any]) -> Json:
    """The request without what only engines may tell each other."""
    rest = {name: value for name, value in body.items() if name != _TRANSFER}
    extra = rest.get("vllm_xargs")
    if isinstance(extra, dict) and _TRANSFER in extra:
        rest["vllm_xargs"] = {name: value for name, value in extra.items() if name != _TRANSFER}
    return rest


def can_be_handed_off(body: Mapping[str, Any]) -> bool:
    """Whether another engine can generate the rest of this request from token ids."""
    if any(body.get(name) not in (None, 1) for name in ("n", "best_of")):
        return False
    if any(body.get(name) for name in ("use_beam_search", "echo", "suffix")):
        return False
    if "prompt" not in body:
        return not _has_media(body.get("messages"))
    prompt = body["prompt"]
    is_one = isinstance(prompt, str) or (
        isinstance(prompt, list) and all(type(each) is int for each in prompt)
    )
    # Lists of log-probabilities are numbered from the start of the text.
    return is_one and body.get("logprobs") is None


def has_grammar(body: Mapping[str, Any]) -> bool:
    """Whether the answer follows a grammar, which begins with the answer's first token."""
    wanted = body.get("response_format")
    is_free = wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text")
    is_forced = body.get("tool_choice") not in (None, "none", "auto")
    return not is_free or is_forced or body.get("structured_outputs") is not None


def offload(body: Mapping[str, Any]) -> Json:
    """The request for the think engine: it may end after its thought, and leave a ticket."""
    return {**body, _TRANSFER: dict(OFFER)}


def ticket_in(payload: Mapping[str, Any]) -> Json | None:
    """The ticket in a whole response, or in the last chunk of a stream; None if there is none.

    Raises:
        ConfigError: there is one, and it is not what a think engine writes.
    """
    params = payload.get(_TRANSFER)
    return dict(params) if params and facts_in(params) else None


def ingest(body: Mapping[str, Any], ticket: Mapping[str, Any]) -> Json:
    """The request for the answer engine, which continues where the think engine ended.

    Args:
        body: as the client sent it.
        ticket: what ``ticket_in`` returned.
    """
    facts = Facts.model_validate(ticket[FACTS])
    after = _continued(body, ticket[PROMPT_IDS], facts.num_output_tokens)
    for name in _LIMITS:
        after.pop(name, None)
    after["max_tokens"] = facts.max_tokens_left
    rest = {name: value for name, value in ticket.items() if name != PROMPT_IDS}
    after[_TRANSFER] = {**after.get(_TRANSFER, {}), **rest}
    return after


def resume(body: Mapping[str, Any], token_ids: Sequence[int], num_output_tokens: int) -> Json:
    """The request that computes all tokens again on any engine, and goes on from there.

    Args:
        body: as the client sent it.
        token_ids: the prompt and all tokens generated so far.
        num_output_tokens: how many of them were generated.
    """
    after = _continued(body, token_ids, num_output_tokens)
    # Without effect once the thought is over: the prompt has its end.
    if type(body.get(_BUDGET)) is int and body[_BUDGET] >= 0:
        after[_BUDGET] = max(body[_BUDGET] - num_output_tokens, 0)
    ours = body.get("vllm_xargs")
    if isinstance(ours, dict) and type(ours.get(_OUR_BUDGET)) is int:
        left = max(ours[_OUR_BUDGET] - num_output_tokens, 1)
        after["vllm_xargs"] = {**ours, _OUR_BUDGET: left, "meridian_min_think_tokens": 0}
    for name in _LIMITS:
        if after.get(name) is not None:
            after[name] = max(after[name] - num_output_tokens, 1)
    return after


def _continued(body: Mapping[str, Any], token_ids: Sequence[int], num_output_tokens: int) -> Json:
    without = (*_FIRST_ONLY, _BUDGET)
    after = {name: value for name, value in body.items() if name not in without}
    if "prompt" in body:
        after["prompt"] = list(token_ids)
    else:
        # Load-bearing: vLLM takes them for the prompt, and does not render the messages.
        after[_TRANSFER] = {PROMPT_IDS: list(token_ids)}
    if after.get("min_tokens"):
        after["min_tokens"] = max(after["min_tokens"] - num_output_tokens, 0)
    return after


def _has_media(messages: Any) -> bool:
    """Whether any message has parts other than text: their tokens cannot be sent as ids."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        parts = content if isinstance(content, list) else ()
        if any(isinstance(part, dict) and part.get("type", "text") != "text" for part in parts):
            return True
    return False
