"""What a request asks of early exit by itself, in ``vllm_xargs``."""

from collections.abc import Mapping
from typing import Any

from meridian_patch.config.request_fields import NO_FIELDS, RequestFields, read_fields
from meridian_patch.config.schema import ExitConfig


def apply_wishes(config: ExitConfig, extra_args: Mapping[str, Any] | None) -> ExitConfig:
    """The configuration as one request has it.

    1. ``meridian_exit`` (mode), ``meridian_max_think_tokens`` and ``meridian_min_think_tokens``
       (tokens), ``meridian_eat_delta`` (nats squared) and ``meridian_rpdi_lambda`` (a quotient)
       stand in for the configured values.
    2. A threshold switches its strategy on.
    3. Without any of them it is the very configuration that was given.
    4. Where only one bound is the request's and the floor comes out above the maximum, the maximum
       counts.

    Raises:
        ConfigError: one of our fields is wrong; it names the field, what came and what was
            expected.
    """
    fields = read_fields(extra_args)
    if fields is NO_FIELDS:
        return config
    wished = {name: value for name, value in _wishes(fields).items() if value is not None}
    if not wished:
        return config
    return config.model_copy(update=wished)


def _wishes(fields: RequestFields) -> dict[str, Any]:
    return {
        "mode": fields.meridian_exit,
        "max_think_tokens": fields.meridian_max_think_tokens,
        "min_think_tokens": fields.meridian_min_think_tokens,
        "eat_delta": fields.meridian_eat_delta,
        "eat": None if fields.meridian_eat_delta is None else True,
        "rpdi_lambda": fields.meridian_rpdi_lambda,
        "rpdi": None if fields.meridian_rpdi_lambda is None else True,
    }
