"""The base of all models of the configuration and of requests' options."""

from pydantic import BaseModel, ConfigDict


class StrictModel(BaseModel):
    """Frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)
