"""Reads YAML: types of YAML 1.2's core schema, bounded, and one sentence for whatever is wrong."""

import re
import stat
import sys
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import yaml

from meridian_patch.config.schema import SCHEMA_VERSION
from meridian_patch.config.validate import KeyPath, cut, dotted
from meridian_patch.errors import ConfigError

MOST_BYTES: Final = 2**20
# Levels of lists and mappings within each other. No key of ours has more than five.
MOST_LEVELS: Final = 32
# Values and keys, those that aliases repeat included: 64 patterns of 300 token ids each.
MOST_VALUES: Final = 20_000
# Up to this number, whole numbers are exact in JSON, in every client and as a float.
MOST_NUMBER: Final = 2**53
# Characters of a key; digits of a number that is read at all.
_MOST_KEY: Final = 200
_MOST_DIGITS: Final = 24

_TAG: Final = "tag:yaml.org,2002:"
_NULL, _BOOL, _INT, _FLOAT = (f"{_TAG}{name}" for name in ("null", "bool", "int", "float"))
_STR, _SEQ, _MAP = (f"{_TAG}{name}" for name in ("str", "seq", "map"))
# YAML 1.2.2, section 10.3.2: the text of a plain scalar decides about its type, and the first
# expression that fits.
_CORE: Final = (
    (_NULL, re.compile(r"(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
    (_BOOL, re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"), list("tTfF")),
    (_INT, re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"), list("-+0123456789")),
    (
        _FLOAT,
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
        ),
        list("-+.0123456789"),
    ),
)
_FORMS: Final = MappingProxyType({tag: form for tag, form, _ in _CORE})
_EXPECTED: Final = MappingProxyType(
    {_NULL: "null", _BOOL: "true or false", _INT: "a whole number", _FLOAT: "a number"}
)
# No text of ours has one: JSON and UTF-8 cannot hold the second kind, names of files not the first.
_WRONG_CHARACTER: Final = re.compile("[\0\ud800-\udfff]")


def read_text(path: Path) -> str:
    """The text of a YAML file.

    Raises:
        ConfigError: there is no such file, it is no regular file, too long, or not UTF-8.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"file {path} cannot be read: it is not a regular file")
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"file {path} does not exist; expected a YAML file") from None
    except OSError as error:
        raise ConfigError(f"file {path} cannot be read: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"file {path} is longer than {MOST_BYTES} bytes; expected a YAML file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"file {path} is not UTF-8 text: {error}") from error


def parse_mapping(text: str, origin: str) -> dict[str, Any]:
    """Keys and values of a YAML text, its version checked and kept.

    Args:
        text: the file's content.
        origin: name of the file in messages.

    Raises:
        ConfigError: what ``parse_value`` refuses, no mapping, or another version.
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
            f"{origin}: version is {cut(repr(version))}, expected {SCHEMA_VERSION}, the only "
            "version that this release reads"
        )
    return value


def parse_value(text: str, origin: str, path: KeyPath = ()) -> Any:
    """One YAML value, of the types of YAML 1.2's core schema.

    Args:
        text: of the value.
        origin: name of its source in messages.
        path: key whose value it is, for messages.

    Raises:
        ConfigError: no YAML, a tag outside the core schema, a duplicate key, one that is no name,
            a number that would not be kept exactly, or more of anything than the bounds above.
    """
    if len(text) > MOST_BYTES:
        raise ConfigError(f"{origin} is longer than {MOST_BYTES} characters; expected a YAML value")
    try:
        loader = _Loader(text, origin)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f", line {mark.line + 1}" if mark else ""
        why = f"{error.context}, {error.problem}" if error.context else str(error.problem)
        raise ConfigError(f"{origin}{place}: not valid YAML: {cut(why)}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{origin}, line {line}: not valid YAML: it holds the character {error.character:#06x}"
        ) from error
    except (ValueError, OverflowError) as error:
        # Load-bearing: PyYAML lets Python's own errors of these two pass.
        raise ConfigError(
            f"{origin}: not valid YAML: the number in an escape or in %YAML is too large"
        ) from error
    return None if node is None else _Values(origin).of(node, path)


class Dumper(yaml.SafeDumper):
    """Writes what ``parse_value`` reads back, as do other readers of YAML 1.1 and 1.2.

    It quotes a text that either of the two takes for something else.
    """


class _Loader(yaml.BaseLoader):
    """Composes nodes with tags of the core schema, of a bounded number and depth."""

    def __init__(self, text: str, origin: str) -> None:
        super().__init__(text)
        self._origin = origin
        self._levels = 0
        self._nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """See PyYAML; it calls this once for each value, key and alias."""
        self._nodes += 1
        self._levels += 1
        # Load-bearing: PyYAML calls itself for each level, and Python bounds that by a
        # RecursionError.
        if self._levels > MOST_LEVELS or self._nodes > MOST_VALUES:
            line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise ConfigError(f"{self._origin}, line {line}: it {_too_much(self._levels)}")
        node = super().compose_node(parent, index)
        self._levels -= 1
        return node


for _tag, _form, _first in _CORE:
    _Loader.add_implicit_resolver(_tag, _form, _first)
    Dumper.add_implicit_resolver(_tag, _form, _first)


class _Values:
    """Turns nodes into values; an alias counts as all that it stands for."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self._num_values = 0
        # Of the lists and mappings around the current node.
        self._around: list[yaml.Node] = []

    def of(self, node: yaml.Node, path: KeyPath) -> Any:
        """The value of a node, which stands at ``path``."""
        self._num_values += 1
        if any(node is each for each in self._around):
            raise self._error(node, path, "holds itself, by an alias; write the value out")
        if len(self._around) >= MOST_LEVELS or self._num_values > MOST_VALUES:
            raise self._error(node, path, _too_much(len(self._around) + 1))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if node.tag != (_MAP if isinstance(node, yaml.MappingNode) else _SEQ):
            raise self._unknown_tag(node, path)
        self._around.append(node)
        if isinstance(node, yaml.MappingNode):
            value: Any = self._mapping(node, path)
        else:
            value = [self.of(each, (*path, place)) for place, each in enumerate(node.value)]
        self._around.pop()
        return value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = self._key(key_node)
            if key in lines:
                raise self._error(
                    key_node,
                    (),
                    f"key {key!r} is already set in line {lines[key]}; remove one of them",
                )
            lines[key] = key_node.start_mark.line + 1
            values[key] = self.of(value_node, (*path, key))
        return values

    def _key(self, node: yaml.Node) -> str:
        is_text = isinstance(node, yaml.ScalarNode) and node.tag == _STR
        kind = "a mapping" if isinstance(node, yaml.MappingNode) else "a list"
        key = str(node.value) if isinstance(node, yaml.ScalarNode) else kind
        if is_text and 0 < len(key) <= _MOST_KEY and key.isprintable():
            return key
        if is_text:
            raise self._error(
                node,
                (),
                f"key {cut(repr(key))} is no name; expected 1 to {_MOST_KEY} characters in a line",
            )
        raise self._error(node, (), f"key {cut(key)} is not text; expected a name")

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        if node.tag == _STR:
            return self._text(node, path)
        if node.tag not in _FORMS:
            raise self._unknown_tag(node, path)
        if not _FORMS[node.tag].match(node.value):
            # Its tag is written before it.
            raise self._error(node, path, f"is {cut(node.value)}, expected {_EXPECTED[node.tag]}")
        if node.tag == _NULL:
            return None
        if node.tag == _BOOL:
            return node.value.lower() == "true"
        return self._whole(node, path) if node.tag == _INT else self._number(node, path)

    def _text(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        found = _WRONG_CHARACTER.search(node.value)
        if found:
            raise self._error(
                node,
                path,
                f"holds the character {ord(found.group()):#06x}, expected text without NUL and "
                "surrogates",
            )
        return str(node.value)

    def _whole(self, node: yaml.ScalarNode, path: KeyPath) -> int:
        digits = node.value.lstrip("-+")
        if len(digits) > 1 and digits.startswith("0") and digits.isdecimal():
            raise self._error(
                node,
                path,
                f"is {cut(node.value)}, which is octal in YAML 1.1 and decimal in YAML 1.2; "
                "expected a number without a 0 before it, such as 100, 0o100 for an octal one, "
                "or quotes around a text",
            )
        # Python refuses to read thousands of digits.
        if len(digits) > _MOST_DIGITS or abs(int(node.value, 0)) > MOST_NUMBER:
            raise self._error(
                node,
                path,
                f"is {cut(node.value)}, expected a whole number of at most {MOST_NUMBER}, which "
                "is exact everywhere",
            )
        return int(node.value, 0)

    def _number(self, node: yaml.ScalarNode, path: KeyPath) -> float:
        text = node.value.lower()
        if text.endswith((".inf", ".nan")):
            return float(text.replace(".", ""))
        number = float(text)
        is_zero = not re.search("[1-9]", text.partition("e")[0])
        if not (is_zero or sys.float_info.min <= abs(number) <= sys.float_info.max):
            raise self._error(
                node,
                path,
                f"is {cut(node.value)}, expected 0 or a number from 2.3e-308 to 1.7e308, which "
                "a float of 64 bits holds",
            )
        return number

    def _unknown_tag(self, node: yaml.Node, path: KeyPath) -> ConfigError:
        where = f"{dotted(path)} has" if path else "it has"
        return self._error(
            node, (), f"not valid YAML: {where} the tag {cut(node.tag)}, expected one of YAML 1.2"
        )

    def _error(self, node: yaml.Node, path: KeyPath, what: str) -> ConfigError:
        where = f"{self._origin}, line {node.start_mark.line + 1}"
        return ConfigError(f"{where}: {dotted(path)} {what}" if path else f"{where}: {what}")


def _too_much(levels: int) -> str:
    if levels > MOST_LEVELS:
        return f"stands within {MOST_LEVELS} lists and mappings or more, expected fewer"
    return f"is value {MOST_VALUES} or later, what aliases repeat included; expected fewer"
