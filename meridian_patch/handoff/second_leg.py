"""The answer's leg of a moved request, as vLLM's token endpoint takes it and streams it.

Pure: JSON in and out. vLLM's token endpoint takes token ids and sampling parameters, and
streams token ids as server-sent events.
"""

import json
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, Final

import msgspec

TRANSFER: Final = "kv_transfer_params"
"""vLLM's name of a ticket, in requests, in responses and in ``extra_args``."""

TRANSFERS: Final = frozenset((TRANSFER, "ec_transfer_params"))
"""What only engines may tell each other: where to read from."""

_EVENT: Final = b"data: "
_DONE: Final = b"[DONE]"
# What the think server's own detokenizer and output processor do, and what is vLLM's alone.
_AT_HOME: Final = frozenset(
    (
        *("n", "stop", "bad_words", "include_stop_str_in_output", "output_kind", "detokenize"),
        *("output_text_buffer_length", "skip_clone", "stream_interval", "thinking_token_budget"),
    )
)
# Counted from the request's first token: the least value of what is left of them.
_COUNTED: Final = {"meridian_max_think_tokens": 1, "meridian_min_think_tokens": 0}
_RESERVE: Final = "meridian_answer_reserve"


class TopLogprob(msgspec.Struct):
    """A token that could have been sampled, its log-probability and its rank, 1 the likeliest."""

    token_id: int
    logprob: float
    rank: int | None = None


class SampledLogprob(TopLogprob):
    """The sampled token's, with the likeliest ones, the sampled token first."""

    top_logprobs: list[TopLogprob] = []


class _Logprobs(msgspec.Struct):
    content: list[SampledLogprob]


class Piece(msgspec.Struct):
    """Tokens of an answer.

    Attributes:
        token_ids: new ones.
        logprobs: of each of them, if the request wants any.
        finish_reason: vLLM's; None while the answer goes on.
        stop_reason: the token that ended it, if one did.
    """

    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Chunk(msgspec.Struct):
    choices: list[Piece] = []
    error: Any = None


class LegLost(Exception):  # noqa: N818 - the name is what happened
    """An answer engine does not go on with the request; its text is the cause.

    Attributes:
        may_read: whether the engine may have got the request, and so read what is kept for it.
        is_engines: whether it is about the engine, so that other requests would be lost, too.
    """

    def __init__(self, message: str, *, may_read: bool = True, is_engines: bool = False) -> None:
        super().__init__(message)
        self.may_read = may_read
        self.is_engines = is_engines


_decode: Final = msgspec.json.Decoder(_Chunk).decode


def read_event(line: bytes) -> Sequence[Piece]:
    """The pieces in a line of the stream; none in an empty one and in the last.

    Raises:
        LegLost: the engine reports an error or ends the request without an answer, or the line is
            nothing that vLLM writes.
    """
    if not line.startswith(_EVENT) or line.startswith(_DONE, len(_EVENT)):
        return ()
    try:
        chunk = _decode(line[len(_EVENT) :])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LegLost(f"it sent {line[:80]!r}: {error}") from error
    if chunk.error is not None:
        raise LegLost(str(chunk.error)[:300])
    for piece in chunk.choices:
        if piece.finish_reason in {"abort", "error"}:
            # Load-bearing: an engine that drains aborts what comes.
            is_engines = piece.finish_reason == "abort"
            why = f"it ended the request: {piece.finish_reason}"
            raise LegLost(why, is_engines=is_engines)
    return chunk.choices


def wire_body(
    *,
    name: str,
    token_ids: Sequence[int],
    sampling: Mapping[str, Any],
    num_output_tokens: int,
    ticket: Mapping[str, Any],
    **others: Any,
) -> bytes:
    """The body that asks an answer engine for the rest of a request.

    Args:
        name: the request's id.
        token_ids: the prompt and what was generated.
        sampling: the request's sampling parameters as plain data.
        num_output_tokens: how many tokens were generated.
        ticket: where the KV cache is.
        others: further fields of ``GenerateRequest``; those that are None are left out.
    """
    named = ((key, value) for key, value in sampling.items() if not key.startswith("_"))
    params = {key: value for key, value in named if key not in _AT_HOME}
    after = limits_after(sampling, num_output_tokens)
    # Stop strings match at the think server, which has the text before them.
    params |= after | {"detokenize": False}
    params["extra_args"] = extra_args_after(sampling, num_output_tokens)
    body = {
        "request_id": name,
        "token_ids": list(token_ids),
        "sampling_params": params,
        "stream": True,
        "reasoning_ended": True,
        TRANSFER: dict(ticket),
    }
    wanted = {key: value for key, value in others.items() if value is not None}
    return json.dumps(body | wanted).encode()


def limits_after(sampling: Mapping[str, Any], num_output_tokens: int) -> dict[str, int]:
    """``max_tokens`` and ``min_tokens`` of what is left of a request."""
    return {
        "max_tokens": sampling["max_tokens"] - num_output_tokens,
        "min_tokens": max(sampling.get("min_tokens", 0) - num_output_tokens, 0),
    }


def extra_args_after(sampling: Mapping[str, Any], num_output_tokens: int) -> dict[str, Any] | None:
    """A request's ``extra_args``, in which what is counted from its first token is what is left.

    A thought may open again behind the boundary, so that budgets go on. Where to read KV blocks
    from is left out.
    """
    given = sampling.get("extra_args") or {}
    after = {key: value for key, value in given.items() if key not in TRANSFERS}
    for key, floor in _COUNTED.items():
        if type(after.get(key)) is int:
            after[key] = max(after[key] - num_output_tokens, floor)
    least, most = (after.get(f"meridian_{side}_think_tokens") for side in ("min", "max"))
    if type(least) is int and type(most) is int:
        after["meridian_min_think_tokens"] = min(least, most)
    share = after.get(_RESERVE)
    if share is not None:
        tokens = ceil(share * sampling["max_tokens"]) if type(share) is float else share
        left = min(tokens, sampling["max_tokens"] - num_output_tokens - 1)
        after.pop(_RESERVE)
        after |= {_RESERVE: left} if left > 0 else {}
    return after or None
