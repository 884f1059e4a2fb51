"""Broken configurations: each finding names its cause and its fix."""

from meridian_patch.operate.doctor.configuration import check_configuration
from meridian_patch.operate.doctor.finding import State


def found(env, state):
    """The findings of a state; each says what was expected, and how to mend it in one line."""
    findings = [each for each in check_configuration(env) if each.state is state]
    if state in (State.WARN, State.FAIL):
        assert all(each.expected and each.fix and "\n" not in each.fix for each in findings)
    return findings


def test_defaults_are_in_order():
    """Nothing set: nothing to fix."""
    names, mode, values = found({"PATH": "/bin"}, State.OK)
    assert names.check == "names of variables"
    assert mode.found.startswith("strict")
    assert "set: none" in values.found


def test_an_unknown_variable():
    """All wrong names at once, each with the one that was meant."""
    env = {"MERIDIAN_PATCH_MOD": "lenient", "MERIDIAN_PATCH_FOO_BAR": "1"}
    foo, mod = found(env, State.FAIL)
    assert "MERIDIAN_PATCH_MOD is not read" in mod.found
    assert mod.expected == "MERIDIAN_PATCH_MODE"
    assert mod.fix == "write MERIDIAN_PATCH_MODE, or unset MERIDIAN_PATCH_MOD"
    assert "unset MERIDIAN_PATCH_FOO_BAR" in foo.fix


def test_a_file_that_is_no_yaml(tmp_path):
    """The message has the file and the line."""
    path = tmp_path / "config.yaml"
    path.write_text("version: 1\npolicy: {name: latency\n")
    (finding,) = found({"MERIDIAN_PATCH_CONFIG": str(path)}, State.FAIL)
    assert f"file {path}" in finding.found
    assert "not valid YAML" in finding.found


def test_a_file_that_does_not_exist():
    (finding,) = found({"MERIDIAN_PATCH_CONFIG": "/nowhere.yaml"}, State.FAIL)
    assert "/nowhere.yaml does not exist" in finding.found
    assert "MERIDIAN_PATCH_CONFIG" in finding.found


def test_a_wrong_value_names_its_variable():
    env = {"MERIDIAN_PATCH_SET_POLICY__NAME": "fastest"}
    (finding,) = found(env, State.FAIL)
    assert "MERIDIAN_PATCH_SET_POLICY__NAME: policy.name is 'fastest'" in finding.found
    assert "meridian config" in finding.fix


def test_a_wrong_name_does_not_hide_a_wrong_value():
    """One run shows all that is wrong."""
    env = {"MERIDIAN_PATCH_MOD": "x", "MERIDIAN_PATCH_SET_POLICY__NAME": "fastest"}
    assert [each.check for each in found(env, State.FAIL)] == ["names of variables", "values"]


def test_which_source_wins(tmp_path):
    """A variable over the file, and the file over the default."""
    path = tmp_path / "config.yaml"
    path.write_text("version: 1\npolicy:\n  name: noop\n  level_tokens: 5\n")
    env = {"MERIDIAN_PATCH_CONFIG": str(path), "MERIDIAN_PATCH_SET_POLICY__NAME": "noop"}
    *_, values = found(env, State.OK)
    variable = "env MERIDIAN_PATCH_SET_POLICY__NAME"
    assert f"policy.name=noop ({variable}, wins over file {path})" in values.found
    assert f"policy.level_tokens=5 (file {path})" in values.found


def test_modes():
    (lenient,) = found({"MERIDIAN_PATCH_MODE": "lenient"}, State.WARN)
    assert "serves stock" in lenient.found
    (wrong,) = found({"MERIDIAN_PATCH_MODE": "lax"}, State.FAIL)
    assert "'lax'" in wrong.found
