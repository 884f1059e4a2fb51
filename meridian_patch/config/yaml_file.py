"""Reads one YAML file that starts with ``version: 1``; refuses duplicate keys and other types."""

from pathlib import Path
from typing import Any

import yaml

from meridian_patch.config.schema import SCHEMA_VERSION
from meridian_patch.errors import ConfigError


class _UniqueKeyLoader(yaml.SafeLoader):
    """A safe loader that refuses duplicate keys; PyYAML would keep the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise ConfigError(
                    f"{self.name}, line {line}: key {key!r} is not text; expected a name"
                )
            if key in lines:
                raise ConfigError(
                    f"{self.name}, line {line}: key {key!r} is already set in line {lines[key]}; "
                    "remove one of them"
                )
            lines[key] = line
        return super().construct_mapping(node, deep=deep)


def read_text(path: Path) -> str:
    """The file's text; ConfigError when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"file {path} does not exist; expected a YAML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"file {path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise ConfigError(f"file {path} cannot be read: {error.strerror}") from error


def parse_mapping(text: str, origin: str) -> dict[str, Any]:
    """Keys and values of a YAML text, its version checked and kept.

    Args:
        text: the file's content.
        origin: name of the file in messages.

    Raises:
        ConfigError: bad YAML, a duplicate key, no mapping, or another version.
    """
    value = parse_value(text, origin)
    if not isinstance(value, dict):
        kind = "empty" if value is None else f"a {type(value).__name__}"
        raise ConfigError(
            f"{origin} is {kind}, expected a mapping that starts with 'version: {SCHEMA_VERSION}'"
        )
    if "version" not in value:
        raise ConfigError(
            f"{origin}: version is missing; write 'version: {SCHEMA_VERSION}' in the first line"
        )
    version = value["version"]
    if type(version) is not int or version != SCHEMA_VERSION:
        raise ConfigError(
            f"{origin}: version is {version!r}, expected {SCHEMA_VERSION}, the only version "
            "that this release reads"
        )
    return value


def parse_value(text: str, origin: str) -> Any:
    """One YAML value; ``origin`` is the name of its source in messages."""
    loader = _UniqueKeyLoader(text)
    loader.name = origin
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{origin}{place}: not valid YAML: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{origin}: not valid YAML: {error}") from error
    finally:
        loader.dispose()
