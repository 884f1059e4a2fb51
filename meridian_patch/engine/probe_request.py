"""A request that is ours."""

from vllm.v1.request import Request


class ProbeRequest(Request):
    """A probe; what is of this class is seen by nobody outside of the engine core."""
