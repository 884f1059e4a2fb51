"""Ids of requests, as callers and as the engine have them."""


def caller_id(request_id: str) -> str:
    """The id that whoever asked gave to a request of the engine."""
    # Load-bearing: vLLM puts a random suffix behind the caller's id.
    return request_id.rsplit("-", 1)[0]
