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
from math import ceil
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from meridian_patch.errors import ConfigError
from meridian_patch.handoff.ticket import FACTS, OFFER, PROMPT_IDS, RELEASE, Facts, facts_in

Json = dict[str, Any]

_TRANSFER: Final = "kv_transfer_params"
# What only engines may tell each other: where to read from.
_ENGINES_ONLY: Final = frozenset((_TRANSFER, "ec_transfer_params"))
_LIMITS: Final = ("max_tokens", "max_completion_tokens")
# Their effect depends on tokens before the boundary, or they ask for what has been sent already.
# Truncation would cut the token ids that take the prompt's place.
_FIRST_ONLY: Final = ("echo", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side")
_TEXT_KEYS: Final = frozenset(("type", "text", "cache_control"))
# vLLM's limit of a completion that has none.
_COMPLETION_TOKENS: Final = 16
_BUDGET: Final = "thinking_token_budget"
_OURS: Final = "meridian_"
_OUR_BUDGET: Final = "meridian_max_think_tokens"
_FLOOR: Final = "meridian_min_think_tokens"
_RESERVE: Final = "meridian_answer_reserve"
_BOOL: Final = TypeAdapter(bool)
_INT: Final = TypeAdapter(int)


def cleaned(body: Mapping[str, Any]) -> Json:
    """The request without what only engines may tell each other."""
    rest = _without_tickets(body)
    if isinstance(rest.get("vllm_xargs"), dict):
        rest["vllm_xargs"] = _without_tickets(rest["vllm_xargs"])
    sampling = rest.get("sampling_params")
    if isinstance(sampling, dict) and isinstance(sampling.get("extra_args"), dict):
        rest["sampling_params"] = {
            **sampling,
            "extra_args": _without_tickets(sampling["extra_args"]),
        }
    return rest


def can_be_handed_off(body: Mapping[str, Any]) -> bool:
    """Whether another engine can generate the rest of this request from token ids."""
    if any(as_whole(body.get(name), default=1) != 1 for name in ("n", "best_of")):
        return False
    if "messages" in body and "prompt" in body:
        # Each endpoint reads one of them.
        return False
    if any(body.get(name) for name in ("use_beam_search", "echo", "suffix", "prompt_embeds")):
        return False
    if not all(_is_number(body.get(name)) for name in ("min_tokens", *_LIMITS)):
        return False
    if _is_chat(body):
        return not _has_media(body["messages"])
    prompt = body.get("prompt")
    is_one = isinstance(prompt, str) or (isinstance(prompt, list) and _is_ids(prompt))
    # Lists of log-probabilities are numbered from the start of the text.
    return is_one and body.get("logprobs") is None


def has_grammar(body: Mapping[str, Any]) -> bool:
    """Whether the answer follows a grammar, which begins with the answer's first token."""
    wanted = body.get("response_format")
    is_free = wanted is None or (isinstance(wanted, dict) and wanted.get("type") == "text")
    is_forced = body.get("tool_choice") not in (None, "none", "auto")
    return not is_free or is_forced or body.get("structured_outputs") is not None


def is_true(value: Any, *, default: bool = False) -> bool:
    """A field as vLLM reads it, "off" and "0" included; what it refuses counts as it stands."""
    if value is None:
        return default
    try:
        return _BOOL.validate_python(value)
    except ValidationError:
        return bool(value)


def as_whole(value: Any, *, default: int) -> int:
    """A number as vLLM reads it, strings included; what it refuses counts as the default."""
    try:
        return default if value is None else _INT.validate_python(value)
    except ValidationError:
        return default


def num_prompts(body: Mapping[str, Any]) -> int:
    """How many prompts a request has, each with choices of its own."""
    if "messages" in body:
        return 1
    several = [body.get(name) for name in ("prompt", "prompt_embeds")]
    lists = [each for each in several if isinstance(each, list)]
    return max(sum(len(each) for each in lists if not _is_ids(each)), 1)


def offload(body: Mapping[str, Any]) -> Json:
    """The request for the think engine: it may end after its thought, and leave a ticket."""
    return {**body, _TRANSFER: dict(OFFER)}


def ticket_in(payload: Mapping[str, Any]) -> Json | None:
    """The ticket in a whole response, or in the last chunk of a stream; None if there is none.

    Raises:
        ConfigError: there is one, and it is not what a think engine writes.
    """
    params = payload.get(_TRANSFER)
    if not params or not facts_in(params):
        return None
    if not isinstance(params.get(PROMPT_IDS), list):
        raise ConfigError(
            f"kv_transfer_params field {PROMPT_IDS} is {params.get(PROMPT_IDS)!r}, expected the "
            "token ids that a think engine wrote"
        )
    return dict(params)


def ingest(body: Mapping[str, Any], ticket: Mapping[str, Any]) -> Json:
    """The request for the answer engine, which continues where the think engine ended.

    Args:
        body: as the client sent it.
        ticket: what ``ticket_in`` returned.
    """
    facts = Facts.model_validate(ticket[FACTS])
    after = _continued(body, ticket[PROMPT_IDS], facts.num_output_tokens)
    after = _limited(after, facts.max_tokens_left)
    after = _with_reserve(after)
    rest = {name: value for name, value in ticket.items() if name != PROMPT_IDS}
    after[_TRANSFER] = {**after.get(_TRANSFER, {}), **rest}
    return after


def resume(
    body: Mapping[str, Any],
    token_ids: Sequence[int],
    num_output_tokens: int,
    num_tokens_left: int | None = None,
) -> Json:
    """The request that computes all tokens again on any engine, and goes on from there.

    Args:
        body: as the client sent it.
        token_ids: the prompt and all tokens generated so far.
        num_output_tokens: how many of them were generated.
        num_tokens_left: how many more may be, as a ticket has it; None without one.
    """
    after = _continued(body, token_ids, num_output_tokens)
    # Without effect once the thought is over: the prompt has its end.
    if type(body.get(_BUDGET)) is int and body[_BUDGET] >= 0:
        after[_BUDGET] = max(body[_BUDGET] - num_output_tokens, 0)
    if num_tokens_left is not None:
        return _with_reserve(_limited(after, num_tokens_left))
    if not _is_chat(body) and body.get("max_tokens") is None:
        after["max_tokens"] = _COMPLETION_TOKENS
    for name in _LIMITS:
        if after.get(name) is not None:
            after[name] = max(int(after[name]) - num_output_tokens, 1)
    return _with_reserve(after)


def releasing(body: Mapping[str, Any], ticket: Mapping[str, Any]) -> Json:
    """The request with the word that no engine reads the KV cache of a ticket.

    Only for a ticket that was given to no engine: one that reads it would read what came after.

    Args:
        body: what ``resume`` returned.
        ticket: of which the KV cache need not be kept.
    """
    # Load-bearing: NIXL's name for the request whose blocks it keeps; Mooncake has none.
    kept = ticket.get("remote_request_id")
    if kept is None:
        return dict(body)
    return {**body, _TRANSFER: {**body.get(_TRANSFER, {}), RELEASE: kept}}


def _continued(body: Mapping[str, Any], token_ids: Sequence[int], num_output_tokens: int) -> Json:
    without = (*_FIRST_ONLY, _BUDGET)
    after = {name: value for name, value in body.items() if name not in without}
    if _is_chat(body):
        # Load-bearing: vLLM takes them for the prompt, and does not render the messages.
        after[_TRANSFER] = {PROMPT_IDS: list(token_ids)}
    else:
        after["prompt"] = list(token_ids)
    if after.get("min_tokens"):
        after["min_tokens"] = max(int(after["min_tokens"]) - num_output_tokens, 0)
    # Fields of ours stand in `vllm_xargs` or at the top level.
    inner = body.get("vllm_xargs")
    ours = {name: value for name, value in body.items() if name.startswith(_OURS)}
    if ours:
        after = {name: value for name, value in after.items() if name not in ours}
        after["vllm_xargs"] = ours = {**(inner if isinstance(inner, dict) else {}), **ours}
    elif isinstance(inner, dict):
        ours = inner
    counted = {_OUR_BUDGET: 1, _FLOOR: 0}
    # Also behind the thought: it may open again. No field is added: an engine may not allow it.
    less = {
        name: max(ours[name] - num_output_tokens, least)
        for name, least in counted.items()
        if type(ours.get(name)) is int
    }
    if _FLOOR in less and _OUR_BUDGET in less:
        less[_FLOOR] = min(less[_FLOOR], less[_OUR_BUDGET])
    share, limits = ours.get(_RESERVE), [body[n] for n in _LIMITS if body.get(n) is not None]
    if type(share) is float and limits:
        # Of what the client asked for, which is more than what is left.
        less[_RESERVE] = ceil(share * min(map(int, limits)))
    if less:
        after["vllm_xargs"] = {**ours, **less}
    return after


def _limited(after: Json, num_tokens: int) -> Json:
    rest = {name: value for name, value in after.items() if name not in _LIMITS}
    return {**rest, "max_tokens": num_tokens}


def _with_reserve(after: Json) -> Json:
    """The request with an answer reserve that is less than what it may still write."""
    ours, known = after.get("vllm_xargs"), [after.get(name) for name in _LIMITS]
    limits = [int(value) for value in known if value is not None]
    if not isinstance(ours, dict) or type(ours.get(_RESERVE)) is not int or not limits:
        return after
    left = min(ours[_RESERVE], min(limits) - 1)
    fields = {name: value for name, value in ours.items() if name != _RESERVE}
    return {**after, "vllm_xargs": fields | ({_RESERVE: left} if left > 0 else {})}


def _without_tickets(values: Mapping[str, Any]) -> Json:
    return {name: value for name, value in values.items() if name not in _ENGINES_ONLY}


def _is_chat(body: Mapping[str, Any]) -> bool:
    return "messages" in body


def _is_ids(prompt: Sequence[Any]) -> bool:
    """Whether a list is one prompt, of token ids."""
    return all(type(each) is int for each in prompt)


def _is_number(value: Any) -> bool:
    """Whether it is left to the engine, or a number as vLLM takes it: a string may be one."""
    if value is None:
        return True
    try:
        int(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _has_media(messages: Any) -> bool:
    """Whether any message has parts other than text: their tokens cannot be sent as ids."""
    if not isinstance(messages, list):
        return False
    contents = [each.get("content") for each in messages if isinstance(each, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return any(isinstance(part, dict) and not _is_text(part) for part in parts)


def _is_text(part: Mapping[str, Any]) -> bool:
    # vLLM knows media also by their keys, whatever the type.
    return part.get("type", "text") == "text" and part.keys() <= _TEXT_KEYS
