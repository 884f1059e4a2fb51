"""Loads the configuration: default, then file, then environment."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.config.schema import Config
from meridian_patch.config.validate import (
    KeyPath,
    dotted,
    field_names,
    shown,
    unknown_key,
    validate,
)
from meridian_patch.config.yaml_file import parse_mapping, parse_value, read_text
from meridian_patch.errors import ConfigError

DIGEST_LENGTH = 12


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where each value came from.

    Attributes:
        config: the validated values.
        origins: dotted key to ``"default"``, ``"file PATH"`` or ``"env NAME"``.
        digest: hash of the values; equal for equal configurations.
    """

    config: Config
    origins: Mapping[str, str]
    digest: str

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Dotted key, value as in JSON, and origin of each value."""
        for path, value in _leaves(self.config.model_dump(mode="json")).items():
            yield dotted(path), value, self.origins[dotted(path)]


def load_config(env: Mapping[str, str]) -> LoadedConfig:
    """Load the configuration from the file and variables that the environment names.

    Args:
        env: names and values, for example ``envs.environment()``.

    Raises:
        ConfigError: a wrong value, key, file or variable; the message names it.
    """
    envs.check_names(env)
    values, file_origin = _read_file(env)
    sources: dict[KeyPath, str] = dict.fromkeys(_leaves(values), file_origin)
    validate(Config, values, lambda _: file_origin)
    for path, (name, text) in envs.config_overrides(env).items():
        _override(values, path, name, text)
        sources = {each: source for each, source in sources.items() if not _is_in(each, path)}
        sources[path] = f"env {name}"
    config = validate(Config, values, lambda path: _origins(path, sources) or file_origin)
    origins = {dotted(path): _origin(path, sources) for path in _leaves(config.model_dump())}
    _check_directory(config, origins)
    _check_trace(config, origins)
    digest = hashlib.sha256(config.model_dump_json().encode()).hexdigest()[:DIGEST_LENGTH]
    return LoadedConfig(config, origins, digest)


def process_config() -> LoadedConfig:
    """The configuration of this process, loaded once for the variables and the file as they are.

    Raises:
        ConfigError: as ``load_config``.
    """
    variables = envs.environment().items()
    ours = {name: value for name, value in variables if name.startswith(envs.PREFIX)}
    return _loaded(frozenset(ours.items()), _version_of(envs.config_path(ours)))


@lru_cache(maxsize=1)
def _loaded(variables: frozenset[tuple[str, str]], _version: tuple[str, int, int]) -> LoadedConfig:
    return load_config(dict(variables))


def _version_of(file: Path | None) -> tuple[str, int, int]:
    """What differs once a configuration file was edited, or is another one by the same name."""
    if file is None:
        return "", 0, 0
    try:
        stat = file.stat()
    except (OSError, ValueError):
        # Loading it names what is wrong.
        return "", 0, 0
    return str(file.absolute()), stat.st_mtime_ns, stat.st_size


def _read_file(env: Mapping[str, str]) -> tuple[dict[str, Any], str]:
    path = envs.config_path(env)
    if path is None:
        return {}, "default"
    origin = f"file {path}"
    try:
        text = read_text(path)
    except ConfigError as error:
        raise ConfigError(f"{error}; it is set by MERIDIAN_PATCH_CONFIG") from error
    values = parse_mapping(text, origin)
    _place(values, "families_dir", path.parent)
    _place(values.get("exit"), "trace", path.parent)
    for key in ("api_key_file", "ca_file"):
        _place(values.get("handoff"), key, path.parent)
    return values, origin


def _place(section: Any, key: str, directory: Path) -> None:
    """Let a relative path of a section count from a directory; what is no path is refused later."""
    if isinstance(section, dict) and section.get(key) and isinstance(section[key], str):
        section[key] = str(directory / section[key])


def _override(values: dict[str, Any], path: KeyPath, name: str, text: str) -> None:
    origin = _long_name(f"env {name}")
    *sections, key = path
    known = field_names(Config, tuple(sections))
    if not known:
        raise unknown_key(path, field_names(Config, ()), origin)
    if key not in known:
        raise unknown_key(path, known, origin)
    below = field_names(Config, path)
    if below:
        raise ConfigError(
            f"{origin}: {dotted(path)} is a section; set one of its keys, for example "
            f"{name}__{below[0].upper()}"
        )
    for section in sections:
        values = values.setdefault(str(section), {})
    values[str(key)] = parse_value(text, origin, path)


def _origin(path: KeyPath, sources: Mapping[KeyPath, str]) -> str:
    """Where the value of a key is from, or the mapping or list that it stands in."""
    around = (path[:length] for length in range(len(path), 0, -1))
    return next((sources[each] for each in around if each in sources), "default")


def _origins(path: KeyPath, sources: Mapping[KeyPath, str]) -> str:
    """The same in a sentence; of a section, where its keys are from; empty: nothing is set."""
    own = _origin(path, sources)
    below = [source for each, source in sources.items() if _is_in(each, path)]
    found = below if own == "default" else [own]
    return ", ".join(map(_long_name, dict.fromkeys(found)))


def _is_in(path: KeyPath, section: KeyPath) -> bool:
    return path[: len(section)] == section


def _leaves(values: Mapping[str, Any], path: KeyPath = ()) -> dict[KeyPath, Any]:
    """Values that are no mappings, by their key paths."""
    leaves: dict[KeyPath, Any] = {}
    for key, value in values.items():
        below = (*path, key)
        leaves |= _leaves(value, below) if isinstance(value, Mapping) else {below: value}
    return leaves


def _check_directory(config: Config, origins: Mapping[str, str]) -> None:
    directory = config.families_dir
    if directory is not None and not _is_directory(directory):
        raise ConfigError(
            f"{_long_name(origins['families_dir'])}: families_dir is {shown(str(directory))}, "
            "expected an existing directory of family files"
        )


def _check_trace(config: Config, origins: Mapping[str, str]) -> None:
    file = config.exit.trace
    if file is None:
        return
    if not _can_be_written(file):
        raise ConfigError(
            f"{_long_name(origins['exit.trace'])}: exit.trace is {shown(str(file))}, expected a "
            "file that can be written, in an existing directory"
        )


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:
        # Of a name that is too long, for example.
        return False


def _can_be_written(file: Path) -> bool:
    try:
        target = file if file.exists() else file.parent
        is_fit = target.is_file() if target == file else target.is_dir()
    except OSError:
        return False
    return is_fit and os.access(target, os.W_OK)


def _long_name(origin: str) -> str:
    """The origin in a sentence: ``env NAME``, used in tables, becomes ``environment variable``."""
    kind, _, name = origin.partition(" ")
    return f"environment variable {name}" if kind == "env" else origin
