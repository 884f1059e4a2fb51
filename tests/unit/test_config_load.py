"""The configuration: precedence, origins, and one clear error for each wrong input."""

from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from meridian_patch.config.left import LEFT_KEYS, LEFT_VALUES
from meridian_patch.config.load import load_config, process_config
from meridian_patch.config.request_options import RequestOptions, allowed_names
from meridian_patch.config.schema import Config, RequestField
from meridian_patch.errors import ConfigError


@pytest.fixture
def config_file(tmp_path):
    """Writes a configuration file and returns the environment that names it."""

    def write(text):
        path = tmp_path / "meridian.yaml"
        path.write_text(text)
        return {"MERIDIAN_PATCH_CONFIG": str(path)}

    return write


def error_of(env):
    with pytest.raises(ConfigError) as error:
        load_config(env)
    return str(error.value)


def test_defaults():
    """With nothing set, every value is the schema's and says so."""
    loaded = load_config({})
    assert loaded.config == Config()
    assert loaded.config.policy.name == "latency"
    assert set(loaded.origins.values()) == {"default"}
    assert "policy.level_tokens" in loaded.origins


def test_environment_beats_file_beats_default(config_file):
    """Each value comes from the highest source that sets it, and its origin is told."""
    env = config_file("version: 1\npolicy:\n  level_tokens: 5\n  protected_answer_tokens: 4\n")
    env["MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS"] = "7"
    loaded = load_config(env)
    policy = loaded.config.policy
    assert (policy.level_tokens, policy.protected_answer_tokens) == (7, 4)
    assert policy.time_budget_us == Config().policy.time_budget_us
    assert loaded.origins["policy.level_tokens"] == ("env MERIDIAN_PATCH_SET_POLICY__LEVEL_TOKENS")
    file = env["MERIDIAN_PATCH_CONFIG"]
    assert loaded.origins["policy.protected_answer_tokens"] == f"file {file}"
    assert loaded.origins["policy.time_budget_us"] == "default"


def test_environment_alone():
    """One variable switches the policy without a file."""
    loaded = load_config({"MERIDIAN_PATCH_SET_POLICY__NAME": "noop"})
    assert loaded.config.policy.name == "noop"


def test_a_process_loads_its_configuration_once(config_file, monkeypatch):
    """Until a variable of ours or the file changes; a wrong value is refused each time."""
    env = config_file("version: 1\npolicy: {level_tokens: 5}\n")
    monkeypatch.setenv("MERIDIAN_PATCH_CONFIG", env["MERIDIAN_PATCH_CONFIG"])
    first = process_config()
    monkeypatch.setenv("ANOTHER_PROGRAMS", "1")
    assert process_config() is first
    monkeypatch.setenv("MERIDIAN_PATCH_SET_POLICY__NAME", "noop")
    changed = process_config().config.policy
    assert (changed.name, changed.level_tokens) == ("noop", 5)
    Path(env["MERIDIAN_PATCH_CONFIG"]).write_text("version: 1\npolicy: {level_tokens: 60}\n")
    assert process_config().config.policy.level_tokens == 60
    wrong = config_file("version: 1\npolicy: {level_tokens: many}\n")["MERIDIAN_PATCH_CONFIG"]
    monkeypatch.delenv("MERIDIAN_PATCH_SET_POLICY__NAME")
    monkeypatch.setenv("MERIDIAN_PATCH_SET_EXIT__MODE", "off")
    for _ in range(2):
        with pytest.raises(ConfigError) as error:
            process_config()
        assert f"file {wrong}: policy.level_tokens" in str(error.value)


def test_config_is_frozen():
    """No change reaches the configuration of a running engine."""
    config = load_config({}).config
    with pytest.raises(ValidationError):
        config.family = "x"


def test_digest_follows_values_not_origins(config_file):
    """Two processes can compare digests: equal values, equal digest."""
    by_file = load_config(config_file("version: 1\npolicy: {name: noop}\n"))
    by_env = load_config({"MERIDIAN_PATCH_SET_POLICY__NAME": "noop"})
    assert by_file.digest == by_env.digest
    assert by_file.digest != load_config({}).digest


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("version: 1\npolicy:\n  nmae: noop\n", ["policy.nmae", "did you mean name?"]),
        ("version: 1\npolcy: {}\n", ["unknown key polcy", "did you mean policy?"]),
        ("version: 1\npolicy:\n  name: fast\n", ["policy.name is 'fast'", "latency", "noop"]),
        ("version: 1\npolicy:\n  level_tokens: 0\n", ["level_tokens is 0", "equal to 1"]),
        ("version: 1\npolicy:\n  level_tokens: '3'\n", ["level_tokens is '3'", "integer"]),
        ("version: 1\npolicy:\n  level_tokens: true\n", ["level_tokens is True", "integer"]),
        ("version: 1\npolicy:\n  protected_answer_tokens: -1\n", ["is -1", "equal to 0"]),
        ("version: 1\npolicy:\n  time_budget_us: 49\n", ["time_budget_us is 49", "equal to 50"]),
        ("version: 1\npolicy: 3\n", ["policy is 3", "expected a mapping of keys"]),
        ("version: 1\nfamily: 3\n", ["family is 3", "string"]),
        ("version: 1\nfamilies_dir: 3\n", ["families_dir is 3", "path"]),
        ("version: 1\nfamilies_dir: none_such\n", ["families_dir is", "existing directory"]),
        (
            "version: 1\nrequests:\n  allowed_fields: [meridian_itl]\n",
            ["requests.allowed_fields is ['meridian_itl']", "expected 'all' or", "meridian_itl_ms"],
        ),
        (
            "version: 1\nrequests:\n  allowed_fields: none\n",
            ["requests.allowed_fields is 'none'", "expected 'all' or a list"],
        ),
        ("policy: {}\n", ["version is missing", "version: 1"]),
        ("version: 2\n", ["version is 2", "expected 1"]),
        ("version: true\n", ["version is True", "expected 1"]),
        ("version: '1'\n", ["version is '1'", "expected 1"]),
        ("- version\n", ["is a list", "expected a mapping"]),
        ("", ["is empty", "expected a mapping"]),
        ("version: 1\npolicy: {name: noop\n", ["line 3", "not valid YAML"]),
        ("version: 1\nfamily: !!python/name:os.system\n", ["not valid YAML"]),
        ("version: 1\n1: x\n", ["line 2", "key 1 is not text"]),
        ("version: 1\npolicy: {level_tokens: 0100}\n", ["policy.level_tokens is 0100", "octal"]),
        ("version: 1\npolicy: {aging_s: 1:30}\n", ["policy.aging_s is '1:30'", "number"]),
        ("version: 1\npolicy: {aging_s: 1e-320}\n", ["policy.aging_s is 1e-320", "2.3e-308"]),
        ("version: 1\nexit: {mode: no}\n", ["exit.mode is 'no'", "'off', 'observe'"]),
        ("version: 1\nexit: {mode: false}\n", ["exit.mode is False", "'off', 'observe'"]),
        ("version: 1\nkv: {tiers: yes}\n", ["kv.tiers is 'yes'", "expected true or false"]),
        ("version: 1\nfamilies_dir: ''\n", ["families_dir is ''", "a path"]),
        ("version: 1\nexit: {trace: ''}\n", ["exit.trace is ''", "a path"]),
        (f"version: 1\nfamilies_dir: {'x' * 5000}\n", ["families_dir is '", "existing directory"]),
        (f"version: 1\nexit: {{trace: {'x' * 5000}}}\n", ["exit.trace is '", "can be written"]),
        ("version: 1\nfamily: a\nfamily: b\n", ["line 3", "'family'", "already set in line 2"]),
        (
            "version: 1\npolicy:\n  name: noop\n  name: noop\n",
            ["line 4", "'name'", "already set in line 3"],
        ),
    ],
)
def test_wrong_file(config_file, text, parts):
    """Each wrong file gives one error that names the file, the key and what was expected."""
    env = config_file(text)
    message = error_of(env)
    for part in [env["MERIDIAN_PATCH_CONFIG"], *parts]:
        assert part in message


def test_every_wrong_field_is_named_at_once(config_file):
    """An operator mends a file in one go."""
    message = error_of(config_file("version: 1\nfamily: 3\npolicy: {level_tokens: 0}\n"))
    assert "family is 3" in message
    assert "policy.level_tokens is 0" in message


def test_missing_file():
    """A path that leads nowhere names itself and the variable that set it."""
    message = error_of({"MERIDIAN_PATCH_CONFIG": "/none/such.yaml"})
    assert "file /none/such.yaml does not exist" in message
    assert "MERIDIAN_PATCH_CONFIG" in message


def test_directory_in_place_of_a_file(tmp_path):
    """What cannot be read says so."""
    message = error_of({"MERIDIAN_PATCH_CONFIG": str(tmp_path)})
    assert f"file {tmp_path} cannot be read" in message


def test_file_that_is_not_text(tmp_path):
    """Binary content is no YAML."""
    path = tmp_path / "c.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text" in error_of({"MERIDIAN_PATCH_CONFIG": str(path)})


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("POLICY__NAME", "fast", ["policy.name is 'fast'", "latency"]),
        ("POLICY__LEVEL_TOKENS", "many", ["policy.level_tokens is 'many'", "integer"]),
        ("POLICY__NMAE", "noop", ["unknown key policy.nmae", "did you mean name?"]),
        ("POLCY__NAME", "noop", ["unknown key polcy.name", "policy"]),
        ("POLICY__NAME__X", "noop", ["unknown key policy.name.x"]),
        ("POLICY", "{name: noop}", ["policy is a section", "MERIDIAN_PATCH_SET_POLICY__NAME"]),
        ("FAMILY", "[a", ["not valid YAML"]),
        ("FAMILIES_DIR", "/none/such", ["families_dir is '/none/such'", "existing directory"]),
        ("FAMILIES_DIR", "''", ["families_dir is ''", "a path"]),
        ("VERSION", "true", ["version is True", "1"]),
        ("VERSION", "1.0", ["version is 1.0", "1"]),
        ("REQUESTS__ALLOWED_FIELDS", "[1]", ["requests.allowed_fields is [1]", "meridian_exit"]),
        ("FAMILY", "\udcff", ["not valid YAML", "0xdcff"]),
    ],
)
def test_wrong_variable(config_file, name, value, parts):
    """A wrong variable is named, not the file beside it."""
    env = config_file("version: 1\npolicy: {name: noop}\n")
    message = error_of({**env, f"MERIDIAN_PATCH_SET_{name}": value})
    for part in [f"environment variable MERIDIAN_PATCH_SET_{name}", *parts]:
        assert part in message
    assert env["MERIDIAN_PATCH_CONFIG"] not in message


def test_two_values_that_contradict_each_other_name_both_sources(config_file):
    """Neither the file alone nor a variable alone is wrong."""
    env = config_file("version: 1\nexit: {min_think_tokens: 9}\n")
    name = "MERIDIAN_PATCH_SET_EXIT__MAX_THINK_TOKENS"
    message = error_of({**env, name: "5"})
    file = env["MERIDIAN_PATCH_CONFIG"]
    assert message.startswith(f"file {file}, environment variable {name}: exit is ")
    assert "min_think_tokens (9) to be at most max_think_tokens (5)" in message


def test_a_mapping_in_a_variable_is_told_as_such():
    """Its values are from the variable, and not from the file that has others."""
    loaded = load_config({"MERIDIAN_PATCH_SET_PROVENANCE": "{a.b: {c: 1}}"})
    assert loaded.origins["provenance.a.b.c"] == "env MERIDIAN_PATCH_SET_PROVENANCE"
    rows = {key: (value, origin) for key, value, origin in loaded.rows()}
    assert rows["provenance.a.b.c"] == (1, "env MERIDIAN_PATCH_SET_PROVENANCE")
    assert rows["exit.mode"] == ("observe", "default")


def test_many_wrong_fields_are_counted(config_file):
    """The first ones are named."""
    keys = "".join(f"a{number}: 1\n" for number in range(30))
    message = error_of(config_file(f"version: 1\n{keys}"))
    assert message.count("\n") == 20
    assert message.endswith("and 10 more")


@pytest.mark.parametrize("mode", ["off", "observe"])
def test_a_word_is_a_word(config_file, mode):
    """YAML 1.1 took a bare `off` for false."""
    assert (
        load_config(config_file(f"version: 1\nexit: {{mode: {mode}}}\n")).config.exit.mode == mode
    )


def test_misspelled_variable_stops_the_load():
    """A variable that nothing reads is found when the configuration is loaded."""
    assert "MERIDIAN_PATCH_MODUS" in error_of({"MERIDIAN_PATCH_MODUS": "strict"})


def test_null_unsets_a_value_of_the_file(config_file):
    """An empty variable is YAML's null: no family is forced."""
    env = config_file("version: 1\nfamily: gpt_oss\n")
    assert load_config(env).config.family == "gpt_oss"
    assert load_config({**env, "MERIDIAN_PATCH_SET_FAMILY": ""}).config.family is None


def test_relative_families_dir_counts_from_the_file(config_file, tmp_path):
    """A file and its families move together."""
    (tmp_path / "families").mkdir()
    loaded = load_config(config_file("version: 1\nfamilies_dir: families\n"))
    assert loaded.config.families_dir == tmp_path / "families"


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("all", set(RequestOptions.model_fields)),
        ("[]", set()),
        ("[meridian_exit, meridian_itl_ms]", {"meridian_exit", "meridian_itl_ms"}),
    ],
)
def test_allowed_fields(value, allowed):
    """All, none, or a list; the names are those of the fields that requests have."""
    env = {"MERIDIAN_PATCH_SET_REQUESTS__ALLOWED_FIELDS": value}
    assert allowed_names(load_config(env).config.requests.allowed_fields) == allowed


def test_every_request_field_can_be_allowed():
    """The names in the configuration's schema are those of the fields themselves."""
    assert list(get_args(RequestField)) == list(RequestOptions.model_fields)


@pytest.mark.parametrize("key", [key for key in LEFT_KEYS if key.startswith("policy.")])
def test_a_key_that_left_is_refused_with_its_reason(key):
    """One sentence, the same from a file and a variable."""
    name = f"MERIDIAN_PATCH_SET_{key.upper().replace('.', '__')}"
    assert error_of({name: "1"}) == f"environment variable {name}: {key} left: {LEFT_KEYS[key]}"


@pytest.mark.parametrize("policy", ["throughput", "fair"])
def test_a_policy_that_left_is_refused_with_its_reason(policy):
    message = error_of({"MERIDIAN_PATCH_SET_POLICY__NAME": policy})
    assert f"policy.name={policy} left: {LEFT_VALUES['policy.name', policy]}" in message
