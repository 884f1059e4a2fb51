"""What an answer engine must have in common with its think engine, by what both show over HTTP.

Pure but for the files that the configuration names: pages in, facts out.
"""

import json
import re
import ssl
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, NamedTuple

from meridian_patch.config.handoff import HandoffConfig
from meridian_patch.config.key_file import read_key
from meridian_patch.errors import ConfigError

TOKENS: Final = "/inference/v1/generate"
"""vLLM's token endpoint, with ``--enable-scale-out``."""

VERSION: Final = "/version"
MODELS: Final = "/v1/models"
METRICS: Final = "/metrics"
PAGES: Final = (VERSION, MODELS, METRICS)
"""What is read of an engine; ``ASKED`` is sent to ``TOKENS`` beside them."""

ASKED: Final = '{"token_ids": [0], "sampling_params": {"max_tokens": 1}}'
"""Asks for one token. What vLLM finds wrong would leave a traceback in the engine's log."""

_CACHE: Final = "vllm:cache_config_info{"
# Whole labels: others end in the same words.
_CACHE_INFO: Final = re.compile(r'[{,](block_size|cache_dtype)="([^"]*)"')
_HUB: Final = "models--"
_MOST_SHOWN: Final = 80
_REFUSES: Final = frozenset((HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN))
_DISABLED: Final = frozenset((HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND))

Pages = Mapping[str, tuple[int, str]]
"""HTTP status and text, by path."""


class Same(NamedTuple):
    """What an answer engine must have in common with the think engine.

    Attributes:
        version: vLLM's.
        block_size: tokens per KV block.
        cache_dtype: vLLM's ``cache_config.cache_dtype``.
        models: paths and names under which the engine loaded its model.
        length: vLLM's ``max_model_len``; an answer engine's is as large or larger.
    """

    version: str
    block_size: str
    cache_dtype: str
    models: tuple[str, ...]
    length: int

    def has_model(self, root: str) -> bool:
        """Whether a server that was started with this model has ours."""
        # Load-bearing: offline, vLLM replaces a name by its folder in the hub's cache.
        hub = _HUB + root.replace("/", "--")
        return any(each == root or hub in Path(each).parts for each in self.models)


class Fact(NamedTuple):
    """One thing that an answer engine shows.

    Attributes:
        name: what it is.
        found: what the engine shows.
        expected: what it should show; empty: it does.
    """

    name: str
    found: str
    expected: str = ""

    @property
    def why(self) -> str:
        """Why the engine is not used, in one sentence."""
        return f"its {self.name} is {self.found}, expected {self.expected}"


def compare(same: Same, pages: Pages) -> Iterator[Fact]:
    """All facts in order; after a page that is no vLLM server's none follow.

    Args:
        same: what the think engine has.
        pages: of the answer engine, ``PAGES`` and ``TOKENS``.
    """
    for path, key in ((VERSION, "version"), (MODELS, "data")):
        status, text = pages[path]
        if key not in _object(pages[path]):
            reply = f"HTTP {status} {text[:_MOST_SHOWN]!r}"
            if status in _REFUSES:
                yield Fact("reply to the key", reply, "its own --api-key in handoff.api_key_file")
            else:
                yield Fact(path, reply, "a vLLM server's")
            return
    listed = _listed(pages)
    ours = [each for each in listed if same.has_model(str(each.get("root")))]
    roots = ", ".join(repr(each.get("root")) for each in ours or listed)
    yield _fact("model", roots or "none", repr(same.models[0]), is_same=bool(ours))
    shown = {"version": _version(pages), **_cache(pages)}
    for name in ("version", "block_size", "cache_dtype"):
        found, our = shown.get(name, "not in /metrics"), getattr(same, name)
        yield _fact(name, repr(found), repr(our), is_same=found == our)
    length = _length(ours)
    expected = f"at least {same.length}"
    yield _fact("max_model_len", str(length), expected, is_same=length >= same.length)
    status, text = pages[TOKENS]
    if status == HTTPStatus.OK and _has_token(pages[TOKENS]):
        yield Fact("token endpoint", TOKENS)
    elif status in _DISABLED:
        # Load-bearing: vLLM forbids what is disabled.
        expected = f"{TOKENS}: start it with --role answer or --enable-scale-out"
        yield Fact("token endpoint", "not there", expected)
    else:
        yield Fact("token endpoint", f"HTTP {status} {text[:_MOST_SHOWN]!r}", "a token")


def served_name(same: Same, pages: Pages) -> str:
    """The name under which an engine whose facts are in order serves the model."""
    listed = _listed(pages)
    return str(next(each["id"] for each in listed if same.has_model(str(each.get("root")))))


def same_in(pages: Pages) -> Same | None:
    """What a think server shows of what its answer engines must have in common with it.

    Args:
        pages: of the think server, ``PAGES``.

    Returns:
        None if a page lacks a part of it.
    """
    listed, cache = _listed(pages), _cache(pages)
    # An adapter names the model that it belongs to.
    models = tuple(str(each["root"]) for each in listed if each.get("root") and not each["parent"])
    if not models or len(cache) < 2 or not _version(pages):  # noqa: PLR2004 - both labels
        return None
    return Same(_version(pages), cache["block_size"], cache["cache_dtype"], models, _length(listed))


def key_of(config: HandoffConfig) -> str | None:
    """The key of the answer engines; None: they ask for none.

    Raises:
        ConfigError: its file cannot be read, or holds no key.
    """
    return read_key(config.api_key_file, "handoff.api_key_file")


def tls_of(config: HandoffConfig) -> ssl.SSLContext | None:
    """What verifies answer engines; None: what the system trusts.

    Raises:
        ConfigError: the file of certificates cannot be read.
    """
    if config.ca_file is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(config.ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"handoff.ca_file {config.ca_file}: {error}, expected certificates in PEM"
        ) from error


def _fact(name: str, found: str, ours: str, *, is_same: bool) -> Fact:
    return Fact(name, found, "" if is_same else f"{ours} as at the think engine")


def _object(page: tuple[int, str]) -> dict[str, Any]:
    status, text = page
    try:
        value = json.loads(text) if status == HTTPStatus.OK else None
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {}


def _has_token(page: tuple[int, str]) -> bool:
    """Load-bearing: an engine that drains answers with HTTP 200 and no token."""
    choices = _object(page).get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(first, dict) and bool(first.get("token_ids"))


def _version(pages: Pages) -> str:
    return str(_object(pages[VERSION]).get("version") or "")


def _listed(pages: Pages) -> list[dict[str, Any]]:
    data = _object(pages[MODELS]).get("data")
    found = [each for each in data if isinstance(each, dict)] if isinstance(data, list) else []
    return [{"id": "", "parent": None, **each} for each in found]


def _cache(pages: Pages) -> dict[str, str]:
    lines = pages[METRICS][1].splitlines()
    info = next((line for line in lines if line.startswith(_CACHE)), "")
    return dict(_CACHE_INFO.findall(info))


def _length(listed: list[dict[str, Any]]) -> int:
    return max((each.get("max_model_len") or 0 for each in listed), default=0)
