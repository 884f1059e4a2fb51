"""The base of all models of the configuration."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
