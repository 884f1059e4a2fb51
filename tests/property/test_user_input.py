"""Whatever a user writes is taken as it is written, or refused in a sentence: never a traceback."""

import math
import re
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import meridian_patch.configs
from meridian_patch import envs
from meridian_patch.bench.served.workload import read_trace as read_served_trace
from meridian_patch.bench.simulated.trace import read_trace
from meridian_patch.calibrate.problems import read_problems
from meridian_patch.config.family_files import read_family
from meridian_patch.config.family_schema import Family
from meridian_patch.config.json_text import parse_json
from meridian_patch.config.load import load_config
from meridian_patch.config.request_options import RequestOptions, parse_options
from meridian_patch.config.schema import Config
from meridian_patch.config.validate import dotted, field_names
from meridian_patch.config.yaml_file import MOST_NUMBER, Dumper, parse_value
from meridian_patch.errors import ConfigError, MeridianError
from meridian_patch.replay.cost import CostModel, load_cost

CONFIGS = Path(meridian_patch.configs.__file__).parent


def leaves(model, path=()):
    """Key paths of all values of a model."""
    below = field_names(model, path)
    return [each for name in below for each in leaves(model, (*path, name))] if below else [path]


SCALARS = st.one_of(
    st.from_regex(r"[-+.]?[0-9oxeE_:+.-]{0,12}", fullmatch=True),
    st.from_regex(r"[0-9]{1,40}(e-?[0-9]{1,4})?", fullmatch=True),
    st.sampled_from(
        """~ null true false True TRUE yes no on off y n 0100 1:30 12:30:45.5 1e-320 1e400 .inf
        -.INF .nan 2001-13-45 2001-01-01 0x1F 0o17 0b1 1_000 9007199254740993 1e3 1.0 -0 off all
        observe enforce noop latency strip keep answer think none 50 64 0.5 2 1""".split()  # noqa: SIM905 - words read better than quoted ones
    ),
    st.text(st.sampled_from("abcxyz .-_é中"), max_size=8).map(str.strip),
).filter(lambda text: not re.match(r"-\s|-$|---|\.\.\.|.*:(\s|$)|:|\?", text))


NAMED = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
    **{f"{sign}.{word}": math.inf for sign in ("", "+") for word in ("inf", "Inf", "INF")},
    **{f"-.{word}": -math.inf for word in ("inf", "Inf", "INF")},
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
}


def core(text):
    """A plain scalar in the core schema of YAML 1.2, read without the product's expressions."""
    if text in NAMED:
        return NAMED[text]
    if text.startswith(("0x", "0o")) and "_" not in text:
        with suppress(ValueError):
            return int(text, 0)
    for read in (int, float) if set(text) <= set("0123456789.eE+-") else ():
        with suppress(ValueError):
            return read(text)
    return text


# A text of YAML, and the value that it stands for.
VALUES = st.one_of(
    SCALARS.map(lambda text: (text, core(text))),
    SCALARS.map(lambda text: (f"'{text}'", text)),
    st.lists(SCALARS.filter(lambda text: text not in {"", "="}), max_size=3).map(
        lambda texts: (f"[{', '.join(texts)}]", [core(text) for text in texts])
    ),
    SCALARS.map(lambda text: (f"{{a: '{text}'}}", {"a": text})),
)


def is_kept(found, wanted, folder):
    """Whether a value of the configuration is the one that was written, of its own type."""
    if isinstance(found, Path):
        return isinstance(wanted, str) and wanted != "" and found == folder / wanted
    if isinstance(found, list | tuple):
        is_list = isinstance(wanted, list) and len(found) == len(wanted)
        return is_list and all(is_kept(*pair, folder) for pair in zip(found, wanted, strict=True))
    if isinstance(found, float):
        # A whole number may be written for any number.
        return type(wanted) in {int, float} and (found == wanted or math.isnan(found))
    return type(found) is type(wanted) and found == wanted


@pytest.mark.parametrize("is_variable", [False, True], ids=["file", "variable"])
@settings(deadline=None)
@given(path=st.sampled_from(leaves(Config)), value=VALUES)
def test_a_value_is_kept_or_refused_by_name(is_variable, path, value):
    text, wanted = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name).resolve()
        file = folder / "c.yaml"
        if is_variable:
            variable = envs.OVERRIDE_PREFIX + "__".join(path).upper()
            env, source = {variable: text}, f"environment variable {variable}"
            folder = Path()
        else:
            own = f"{path[0]}: {text}" if len(path) == 1 else f"{path[0]}:\n  {path[1]}: {text}"
            version = "" if path == ("version",) else "version: 1\n"
            file.write_text(f"{version}{own}\n")
            env, source = {"MERIDIAN_PATCH_CONFIG": str(file)}, f"file {file}"
        try:
            found = load_config(env).config
        except ConfigError as error:
            message = str(error)
            assert message.startswith(source)
            assert "\n" not in message
            assert path[-1] in message or "not valid YAML" in message
            return
        for key in path:
            kind, found = type(found).model_fields[key].annotation, getattr(found, key)
        assert not isinstance(found, bool) or "bool" in str(kind)
        assert is_kept(found, wanted, folder), (dotted(path), text, found)


# A right file, its model, and its reader.
FILES = {
    "family": (
        CONFIGS / "families" / "gpt_oss.yaml",
        Family,
        lambda path: read_family(path).family,
    ),
    "cost model": (
        CONFIGS / "cost" / "h100-30b-a3b-moe.yaml",
        CostModel,
        lambda path: load_cost(str(path)),
    ),
}
PLACE = "@place"


@settings(deadline=None)
@given(
    place=st.sampled_from([(kind, path) for kind in FILES for path in leaves(FILES[kind][1])]),
    value=VALUES,
)
def test_a_value_of_another_file_is_kept_or_refused_by_name(place, value):
    (kind, path), (text, wanted) = place, value
    right, _, read = FILES[kind]
    values = section = yaml.safe_load(right.read_text())
    for key in path[:-1]:
        section = section.setdefault(key, {})
    section[path[-1]] = PLACE
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "file.yaml"
        file.write_text(yaml.dump(values, Dumper=Dumper).replace(f"'{PLACE}'", text))
        try:
            found = read(file)
        except MeridianError as error:
            # Of a list, one sentence for each value that is wrong.
            for line in str(error).split("\n"):
                assert str(file) in line
                assert path[-1] in line or "not valid YAML" in line
            return
    for key in path:
        found = getattr(found, key)
    assert is_kept(found, wanted, Path()), (kind, dotted(path), text, found)


BYTES = st.one_of(
    st.binary(max_size=4),
    st.sampled_from(
        [
            *(
                b"\0",
                b"\x07",
                b"\xff",
                b"\xed\xa0\x80",
                b"&a ",
                b"*a",
                b"<<: *a",
                b"!!int ",
                b"!!set ",
            ),
            *(b"0100", b"1:30", b"9" * 5000, b"1e-400", b"[" * 400, b"{a: " * 400, b'"\\ud800"'),
            *(b'"\\UFFFFFFFF"', b"\n---\n", b"%YAML 9.9\n", b"? ", b": ", b"|\n", b">-\n", b"\t"),
            *(
                b"2001-13-45",
                b"no",
                b"\xe2\x80\xa8",
                b"NaN",
                b'"a": 1, ',
                b"true",
                b"null",
                b"{}",
                b"!!set ",
            ),
        ]
    ),
)
# Where, how many bytes go, and what comes.
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), BYTES), min_size=1, max_size=3)
PROBLEM = (
    b'{"prompt": "1+1", "answer": "2", "id": 7}\n'
    b'{"messages": [{"role": "user", "content": "a"}], "answer": 3}\n'
)
TRACE = (
    b'{"id": "a", "arrival_s": 0.5, "prompt_tokens": 3, "think_tokens": 2, "answer_tokens": 1}\n'
)
SERVED = (
    b'{"id": "1-0", "arrival_s": 0.12, "messages": [{"role": "user", "content": "2+2"}], '
    b'"expected": "4", "max_tokens": 9}\n'
)
CONFIG = b"""version: 1
policy: {name: latency, level_tokens: 1024, answer_itl_ms: 40.5, order: true}
kv: {history: auto, retain_s: 3e2}
exit:
  mode: observe
  patterns: ["done", [1, 2], [[3], [4, 5]]]
requests: {allowed_fields: [meridian_exit]}
provenance: {lag: {stride_steps: 1}, curve: [[1.0e-3, true], [~, "x"]]}
"""
# Content that is right, its reader, and what a wrong one raises.
READERS = {
    "configuration": (CONFIG, lambda path: load_config({"MERIDIAN_PATCH_CONFIG": str(path)})),
    "profile": (
        (CONFIGS / "profiles" / "tiny_reasoner_exit.yaml").read_bytes(),
        lambda path: load_config({"MERIDIAN_PATCH_CONFIG": str(path)}),
    ),
    "family": ((CONFIGS / "families" / "gpt_oss.yaml").read_bytes(), read_family),
    "cost model": (
        (CONFIGS / "cost" / "h100-30b-a3b-moe.yaml").read_bytes(),
        lambda path: load_cost(str(path)),
    ),
    "problems": (PROBLEM, read_problems),
    "trace": (TRACE, read_trace),
    "served trace": (SERVED, read_served_trace),
}


@pytest.mark.parametrize("kind", READERS)
@settings(deadline=None)
@given(changes=CHANGES)
def test_a_damaged_file_is_read_or_refused_by_name(kind, changes):
    content, read = READERS[kind]
    for place, length, more in changes:
        begin = int(place * len(content))
        content = content[:begin] + more + content[begin + length :]
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "file.yaml"
        path.write_bytes(content)
        try:
            read(path)
        except MeridianError as error:
            assert str(path) in str(error)


PLAIN = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-MOST_NUMBER, MOST_NUMBER),
    st.floats(allow_nan=False, allow_subnormal=False),
    st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=20),
    SCALARS,
)
NAMES = st.from_regex(r"[a-z0-9_.~:-]{1,8}", fullmatch=True)
NESTED = st.recursive(
    PLAIN, lambda below: st.lists(below, max_size=3) | st.dictionaries(NAMES, below, max_size=3)
)


@settings(deadline=None)
@given(value=NESTED)
def test_what_is_written_is_read_back(value):
    """As itself, whatever its texts look like; PyYAML reads the same."""
    written = yaml.dump(value, Dumper=Dumper, sort_keys=False, width=98)
    found = parse_value(written, "file")
    assert repr(found) == repr(value)
    assert repr(yaml.safe_load(written)) == repr(value)


@given(
    text=st.text(max_size=40)
    | st.text(st.sampled_from("[]{}&*!?:-,'\"|>%@\\ \n\t0aU#~"), max_size=40)
)
def test_any_text_is_yaml_or_refused(text):
    try:
        parse_value(text, "file c")
    except ConfigError as error:
        assert str(error).startswith("file c")


@given(
    text=st.text(max_size=40) | st.text(st.sampled_from('[]{}:,"\\ud8NaIn01e-+.tr'), max_size=40)
)
def test_any_text_is_json_or_refused(text):
    try:
        parse_json(text)
    except ValueError as error:
        assert str(error).startswith("not JSON: ")


@given(
    name=st.sampled_from([*RequestOptions.model_fields, "meridian_unknown"]),
    value=NESTED | st.integers() | st.floats() | st.just(10**5000),
)
def test_a_field_of_a_request_is_kept_or_refused_by_name(name, value):
    try:
        found = getattr(parse_options({name: value}), name)
    except ConfigError as error:
        message = str(error)
        assert name in message
        assert "\n" not in message
        return
    assert not isinstance(found, bool)
    assert is_kept(found, value, Path()), (name, value, found)
