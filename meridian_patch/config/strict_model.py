"""The base of all models of the configuration and of requests' options."""

from typing import Any

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def not_empty_path(value: Any) -> Any:
    """Refuse an empty path, which would be the current directory.

    Raises:
        ValueError: says what is expected.
    """
    if value == "":
        raise ValueError("a path; null for none")
    return value
