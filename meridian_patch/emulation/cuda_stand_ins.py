"""CUDA streams and events on a machine without CUDA, for asynchronous scheduling.

vLLM's runners copy sampled tokens on a stream of their own and wait for an event. On a CPU the
tokens are there when the sampler returns, so that stand-ins which do nothing are right.
"""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Self

import torch


class _Event:
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept what ``torch.cuda.Event`` accepts."""

    def record(self, *_args: Any) -> None:
        """Nothing to order."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """All that was recorded has happened."""
        return True


class _Stream(AbstractContextManager["_Stream"]):
    device = torch.device("cpu")

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        """Accept what ``torch.cuda.Stream`` accepts."""

    def wait_stream(self, *_args: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_args: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        """Nothing to restore."""


def put_stand_ins() -> None:
    """Replace torch's CUDA streams and events in this process, for good.

    Load-bearing: vLLM's runners take them from ``torch.cuda`` when they are built and when a step
    ends, by these four names.
    """
    cuda: Any = torch.cuda
    cuda.Event, cuda.Stream = _Event, _Stream
    cuda.stream = lambda _stream: _Stream()
    cuda.current_stream = lambda *_: _Stream()
