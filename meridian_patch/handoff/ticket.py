"""What a think engine gives to the caller, and the caller to an answer engine.

A ticket is vLLM's ``kv_transfer_params``: the connector's own fields, and ``meridian_handoff`` with
our own facts.
"""

from collections.abc import Mapping
from typing import Any, Final, Self

from pydantic import Field, ValidationError

from meridian_patch.config.strict_model import StrictModel
from meridian_patch.engine import wire
from meridian_patch.errors import ConfigError

OFFER: Final[Mapping[str, Any]] = {"do_remote_decode": True}
"""``kv_transfer_params`` of a request that may be handed off."""

NOT_KNOWN: Final = "not known"
"""In place of the digest of an adapter's weights: it is equal to no adapter, and to none."""


class KVLayout(StrictModel):
    """What two engines must have in common so that one can read the other's KV cache.

    Attributes:
        model: path or name that the engine loaded.
        weights: digest of the model's configuration, quantization and revision.
        block_size: tokens per KV block.
        cache_dtype: vLLM's ``cache_config.cache_dtype``.
        dtype: data type of the model's activations.
    """

    model: str
    weights: str
    block_size: int
    cache_dtype: str
    dtype: str

    def difference(self, other: Self) -> str:
        """The first field that differs, with both values; empty if none does."""
        for name, ours in self:
            theirs = getattr(other, name)
            if ours != theirs:
                return f"{name} is {theirs!r} there and {ours!r} here"
        return ""


class Facts(StrictModel):
    """Our part of a ticket.

    Attributes:
        num_prompt_tokens: tokens of the prompt as the client sent it.
        num_output_tokens: tokens generated so far, the boundary included.
        max_tokens_left: tokens that the request may still generate.
        layout: of the engine that holds the KV cache.
        adapter: digest of the weights of the request's LoRA adapter, None without one. A ticket
            without this field may be of any adapter.
    """

    num_prompt_tokens: int = Field(ge=1)
    num_output_tokens: int = Field(ge=1)
    max_tokens_left: int = Field(ge=1)
    layout: KVLayout
    adapter: str | None = NOT_KNOWN


def facts_in(params: Mapping[str, Any] | None) -> Facts | None:
    """Our facts among a request's or a response's ``kv_transfer_params``; None without a ticket.

    Raises:
        ConfigError: the field is there, but is not what a think engine writes.
    """
    if not isinstance(params, Mapping) or wire.FACTS not in params:
        return None
    try:
        return Facts.model_validate(params[wire.FACTS])
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (wire.FACTS, *first["loc"]))
        raise ConfigError(
            f"kv_transfer_params field {where} is {first['input']!r}, expected what a think "
            f"engine wrote: {first['msg']}"
        ) from error
