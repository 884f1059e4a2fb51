"""A block of the plug-in's code: an exception in it is handled and ends nothing else."""

from types import TracebackType


class GuardedBlock:
    """Context manager; a class, because one made of a generator takes three times as long."""

    __slots__ = ()

    def failed(self, error: Exception) -> None:
        """Handle an exception of the block."""
        raise NotImplementedError

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        error: BaseException | None,
        _trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failed(error)
        return True
