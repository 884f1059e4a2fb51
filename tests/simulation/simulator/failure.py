"""What a simulation reports."""


class Failure(Exception):  # noqa: N818 - the name is what happened
    """An invariant does not hold.

    Attributes:
        invariant: short name of it.
    """

    def __init__(self, invariant: str, message: str) -> None:
        super().__init__(message)
        self.invariant = invariant
        self.message = message

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message}"
