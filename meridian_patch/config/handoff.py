"""Fields of the configuration for engines with roles."""

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from meridian_patch.config.strict_model import StrictModel, not_empty_path


class HandoffConfig(StrictModel):
    """Whether requests think on one engine and answer on another."""

    role: Literal["none", "think", "answer"] = Field(
        default="none",
        description="`think` ends requests after their thought, and keeps their KV cache for an "
        "engine with the role `answer`. Set by `meridian serve --role`.",
    )
    offload_threshold_blocks: int = Field(
        default=8, ge=0, description="Requests with fewer KV blocks then answer in place."
    )
    nixl_wait_ms: int | None = Field(
        default=None,
        ge=0,
        le=1000,
        description="How long, at most 1000, the thread of NIXL's agent waits for an event before "
        "it looks by itself. 0: it asks without a pause, as NIXL's Python package sets it, and "
        "takes what it can get of a processor core. Unset: 1 on an engine with a role whose KV "
        "blocks are in the host's memory (`kv_buffer_device` is `cpu`), else 0. Only with "
        "`NixlConnector` or `NixlPullConnector` itself, over UCX.",
    )
    answer_urls: tuple[str, ...] = Field(
        default=(),
        strict=False,
        description="Base URLs of the answer engines, one each and no balancer's, for an engine "
        "with the role `think`. The one with the fewest requests of this server goes first. Set "
        "by `meridian serve --answer`.",
    )
    answer_wait_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="An answer engine that sends nothing for so long is lost: its requests go on "
        "where they thought.",
    )
    api_key_file: Annotated[Path | None, BeforeValidator(not_empty_path)] = Field(
        default=None,
        strict=False,
        description="File that holds the answer engines' `--api-key`. A relative path is relative "
        "to the configuration file's directory, or to the working directory if set in the "
        "environment.",
    )
    ca_file: Annotated[Path | None, BeforeValidator(not_empty_path)] = Field(
        default=None,
        strict=False,
        description="Certificates, in PEM, that verify `https` addresses of answer engines. Unset: "
        "the system's. A relative path counts as that of `api_key_file`.",
    )

    @model_validator(mode="after")
    def _check_urls(self) -> Self:
        for url in self.answer_urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"field answer_urls is {url!r}, expected http:// or https://")
        if self.answer_urls and self.role != "think":
            raise ValueError(
                f"field answer_urls is set, expected role 'think' beside it and not {self.role!r}"
            )
        return self
