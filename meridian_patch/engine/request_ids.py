"""Converts the engine's request ids to those of callers."""


def caller_id(request_id: str) -> str:
    """The id that the caller gave to a request, from the engine's id."""
    # Load-bearing: vLLM appends a random suffix to the caller's id.
    return request_id.rsplit("-", 1)[0]
