"""The one loader of YAML: types of the core schema, bounds, and one sentence for what is wrong."""

import math
import os

import pytest
import yaml

from meridian_patch.config.yaml_file import (
    MOST_BYTES,
    MOST_LEVELS,
    MOST_NUMBER,
    Dumper,
    parse_value,
    read_text,
)
from meridian_patch.errors import ConfigError


def error_of(text, path=("exit", "trace")):
    with pytest.raises(ConfigError) as error:
        parse_value(text, "file c.yaml", path)
    message = str(error.value)
    assert message.startswith("file c.yaml")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *((text, None) for text in ("", "~", "null", "Null", "NULL", "# nothing")),
        *((text, True) for text in ("true", "True", "TRUE")),
        *((text, False) for text in ("false", "False", "FALSE")),
        *((text, 12) for text in ("12", "+12", "0o14", "0xC", "0xc")),
        *((text, 0) for text in ("0", "-0")),
        *((text, 1000.0) for text in ("1e3", "1E+3", "1000.", "+1000.0", "10000e-1")),
        *((text, 0.5) for text in (".5", "0.5", "5e-1")),
        *((text, math.inf) for text in (".inf", "+.Inf", ".INF")),
        ("-.inf", -math.inf),
        *((text, 0.0) for text in ("0.0", "0e5", "-0.0", "0.000e-999")),
        (str(MOST_NUMBER), MOST_NUMBER),
        (f"-{MOST_NUMBER}", -MOST_NUMBER),
        ("[1, a, {b: ~}]", [1, "a", {"b": None}]),
        ("!!str 12", "12"),
        ("!!int 12", 12),
        ("{a: &x [1], b: *x}", {"a": [1], "b": [1]}),
    ],
)
def test_values_of_the_core_schema(text, value):
    """Of the value's own type: 1 is not true, and 1.0 is not 1."""
    found = parse_value(text, "file c.yaml")
    assert (type(found), found) == (type(value), value)


@pytest.mark.parametrize(
    "text",
    [
        *("yes", "no", "on", "off", "y", "N", "tRUE", "nULL"),
        *("1:30", "12:30:45.5", "1_000", "0b11", "0o8", "1e", "+.e3", ".", ".nAn", "inf", "nan"),
        *("2001-13-45", "2001-01-01", "2001-01-01 10:00:00", "0x", "=", "<<"),
    ],
)
def test_all_else_is_text(text):
    """Readers of YAML 1.1 make times, dates, numbers and truth of some of these."""
    assert parse_value(text, "file c.yaml") == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0100", "exit.trace is 0100, which is octal in YAML 1.1 and decimal in YAML 1.2"),
        ("-00", "exit.trace is -00, which is octal"),
        ("9" * 26, f"exit.trace is {'9' * 26}, expected a whole number of at most 90071992547"),
        (str(MOST_NUMBER + 1), "expected a whole number of at most 9007199254740992"),
        ("9" * 5000, f"exit.trace is {'9' * 100}..., expected a whole number"),
        ("0x" + "F" * 5000, "..., expected a whole number of at most"),
        ("1e-320", "exit.trace is 1e-320, expected 0 or a number from 2.3e-308 to 1.7e308"),
        ("1e400", "exit.trace is 1e400, expected 0 or a number"),
        ("-1e-999999999", "exit.trace is -1e-999999999, expected 0 or a number"),
        ("!!int a", "exit.trace is a, expected a whole number"),
        ("!!bool 1", "exit.trace is 1, expected true or false"),
        ("!!null 1", "exit.trace is 1, expected null"),
        ("!!python/name:os.system", "not valid YAML: exit.trace has the tag tag:yaml.org,2002:py"),
        ("!!timestamp 2001-01-01", "not valid YAML: exit.trace has the tag"),
        ("!!set {a}", "not valid YAML: exit.trace has the tag"),
        ("!mine [a]", "not valid YAML: exit.trace has the tag !mine"),
        ("a\x07", "line 1: not valid YAML: it holds the character 0x0007"),
        ("a\n\0", "line 2: not valid YAML: it holds the character 0x0000"),
        ("\udcff", "not valid YAML: it holds the character 0xdcff"),
        ('"\\0"', "exit.trace holds the character 0x0000, expected text"),
        ('"\\ud800"', "exit.trace holds the character 0xd800, expected text"),
        ('"\\UFFFFFFFF"', "not valid YAML: the number in an escape"),
        ('"\\U00110000"', "not valid YAML: the number in an escape"),
        (f"%YAML 1.{'1' * 5000}\n--- a", "not valid YAML: the number in an escape or in %YAML"),
        ("&a [*a]", "exit.trace.0 holds itself, by an alias"),
        ("&a {b: {c: *a}}", "exit.trace.b.c holds itself, by an alias"),
        ("*a", "not valid YAML: found undefined alias 'a'"),
        ("[" * 500, f"line 1: it stands within {MOST_LEVELS} lists and mappings or more"),
        ("{a: " * 500, f"it stands within {MOST_LEVELS} lists and mappings or more"),
        ("[" + "1, " * 20_000 + "]", "or later, what aliases repeat included"),
        ("a" * (MOST_BYTES + 1), f"is longer than {MOST_BYTES} characters"),
        ("a\n--- b", "not valid YAML: expected a single document in the stream"),
        ("{a: 1, a: 2}", "key 'a' is already set in line 1; remove one"),
        ("{true: 1}", "key true is not text; expected a name"),
        ("{[a]: 1}", "key a list is not text"),
        ("? {a: b}\n: 1", "key a mapping is not text"),
        ("{'': 1}", "key '' is no name"),
        ('{"a\\nb": 1}', r"key 'a\nb' is no name"),
        ("? " + "a" * 300 + "\n: 1", "is no name; expected 1 to 200 characters in a line"),
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_what_is_refused(text, says):
    """One sentence with file, line and key."""
    assert says in error_of(text)


def test_aliases_count_as_what_they_stand_for():
    """Nine lists of nine aliases of nine lists, and so on: 43 million values in a few lines."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [
        f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefg", "bcdefgh", strict=True)
    ]
    assert "or later, what aliases repeat included" in error_of("\n".join(lines))
    nested = ["a0: &a0 [x]", *(f"a{n}: &a{n} [*a{n - 1}]" for n in range(1, 99))]
    assert f"stands within {MOST_LEVELS} lists" in error_of("\n".join(nested))


def test_what_cannot_be_read(tmp_path):
    """No regular file, one that is too long, and one whose name no file can have."""
    pipe, long = tmp_path / "pipe", tmp_path / "long"
    os.mkfifo(pipe)
    long.write_bytes(b"a" * (MOST_BYTES + 1))
    for path, why in (
        (pipe, "cannot be read: it is not a regular file"),
        (long, f"is longer than {MOST_BYTES} bytes"),
        (tmp_path / ("x" * 5000), "cannot be read: File name too long"),
    ):
        with pytest.raises(ConfigError, match=why):
            read_text(path)


def test_a_byte_order_mark_and_other_line_ends_are_read(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert parse_value(read_text(path), f"file {path}") == {"a": 1, "b": 2}


@pytest.mark.parametrize("text", ["1e5", "0o17", "123e4", "no", "2001-01-01", "0100", "~", "1:30"])
def test_what_is_written_is_read_back(text):
    """As the text that it was, by this loader and by PyYAML's own."""
    written = yaml.dump({"a": text}, Dumper=Dumper)
    assert parse_value(written, "file c.yaml") == yaml.safe_load(written) == {"a": text}
