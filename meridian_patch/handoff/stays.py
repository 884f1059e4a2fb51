"""Which requests cannot be sampled further by another engine, and why."""

from typing import Any, Final

REASONS: Final = (
    *("pooling", "session", "media", "embeddings", "seed", "penalties", "bad_words"),
    *("prompt_logprobs", "many_logprobs", "token_logprobs", "repetition", "trace", "grammar"),
)
"""All reasons why a request stays where it thinks."""


def why_it_stays(
    request: Any, *, binds_thoughts: bool = False, most_logprobs: int | None = None
) -> str | None:
    """The first reason, of a request that vLLM's server has parsed; None: it may move.

    A seeded generator, and counts of tokens behind penalties, do not travel; media and chunks of a
    session cannot be sent as token ids; a grammar that began with the thought cannot begin again
    behind it.

    Args:
        request: vLLM's ``EngineCoreRequest``, or the scheduler's ``Request``.
        binds_thoughts: whether grammars begin with the thought on this server.
        most_logprobs: log-probabilities per token that can travel; None: any number.
    """
    params = request.sampling_params
    if params is None:
        return "pooling"
    count, grammar = params.logprobs or 0, params.structured_outputs
    by_token = ("logprob_token_ids", "prompt_logprob_token_ids")
    held = {
        "session": request.resumable,
        "media": request.mm_features,
        "embeddings": request.prompt_embeds is not None or not request.prompt_token_ids,
        "seed": params.seed is not None and params.temperature > 0,
        "penalties": params.presence_penalty or params.frequency_penalty,
        "bad_words": params.bad_words,
        "prompt_logprobs": params.prompt_logprobs is not None,
        "many_logprobs": count < 0 or (most_logprobs is not None and count > most_logprobs),
        # Of given tokens: the token endpoint's stream has no field for them.
        "token_logprobs": any(getattr(params, name, None) is not None for name in by_token),
        "repetition": getattr(params, "repetition_detection", None) is not None,
        "trace": getattr(params, "trace_decode_token_ids", None) is not None,
        "grammar": grammar is not None and binds_thoughts,
    }
    return next((reason for reason, holds in held.items() if holds), None)
