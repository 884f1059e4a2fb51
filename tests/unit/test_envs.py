"""The environment: which variables are read, and what a wrong one says."""

from pathlib import Path

import pytest

from meridian_patch import envs
from meridian_patch.errors import ConfigError


def test_misspelled_variable_is_refused_with_the_close_name():
    """A variable with our prefix that nothing reads is an error, not silence."""
    with pytest.raises(ConfigError) as error:
        envs.check_names({"MERIDIAN_PATCH_CONFG": "x"})
    assert "MERIDIAN_PATCH_CONFG" in str(error.value)
    assert "did you mean MERIDIAN_PATCH_CONFIG?" in str(error.value)


def test_unrelated_and_known_variables_pass():
    """Known names, overrides and other people's variables are no errors."""
    names = [*envs.KNOWN, "MERIDIAN_PATCH_SET_ANYTHING", "PATH", "VLLM_PLUGINS"]
    envs.check_names(dict.fromkeys(names, "1"))


def service_links(name, address="10.0.0.11"):
    """What Kubernetes sets for a service with the ports `http` 80 and an unnamed 9000/UDP."""
    host = f"[{address}]" if ":" in address else address
    http, other = f"tcp://{host}:80", f"udp://{host}:9000"
    return {
        f"{name}_SERVICE_HOST": address,
        f"{name}_SERVICE_PORT": "80",
        f"{name}_SERVICE_PORT_HTTP": "80",
        f"{name}_PORT": http,
        f"{name}_PORT_80_TCP": http,
        f"{name}_PORT_80_TCP_PROTO": "tcp",
        f"{name}_PORT_80_TCP_PORT": "80",
        f"{name}_PORT_80_TCP_ADDR": address,
        f"{name}_PORT_9000_UDP": other,
        f"{name}_PORT_9000_UDP_PROTO": "udp",
        f"{name}_PORT_9000_UDP_PORT": "9000",
        f"{name}_PORT_9000_UDP_ADDR": address,
    }


@pytest.mark.parametrize("name", ["MERIDIAN_PATCH", "MERIDIAN_PATCH_METRICS"])
@pytest.mark.parametrize("address", ["10.0.0.11", "fd00::11"])
def test_kubernetes_service_links_pass(name, address, caplog):
    """A service named `meridian-patch` in the namespace does not keep the server from starting."""
    links = service_links(name, address)
    caplog.set_level("DEBUG", logger="vllm.meridian_patch")
    envs.check_names(links)
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert all(link in said for link in links)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MERIDIAN_PATCH_PORT", "8000"),
        ("MERIDIAN_PATCH_PORT", "tcp://10.0.0.11"),
        ("MERIDIAN_PATCH_PORTS", "tcp://10.0.0.11:80"),
        ("MERIDIAN_PATCH_SERVICE", "10.0.0.11"),
        ("MERIDIAN_PATCH_SERVICE_HOST", "localhost"),
        ("MERIDIAN_PATCH_SERVICE_PORT", "http"),
        ("MERIDIAN_PATCH_PORT_80", "tcp://10.0.0.11:80"),
        ("MERIDIAN_PATCH_PORT_80_TCP_HOST", "10.0.0.11"),
        ("MERIDIAN_PATCHSERVICE_PORT", "80"),
        ("MERIDIAN_PATCH_CONFG_PORT", "a.yaml"),
    ],
)
def test_what_only_resembles_a_service_link_is_refused(name, value):
    """Name and value must both be as Kubernetes makes them."""
    with pytest.raises(ConfigError, match=f"environment variable {name} is not read"):
        envs.check_names({name: value})


@pytest.mark.parametrize(("value", "expected"), [(None, None), ("0", False), ("1", True)])
def test_activation(value, expected):
    """MERIDIAN_PATCH is off, on or unset."""
    env = {} if value is None else {"MERIDIAN_PATCH": value}
    assert envs.activation(env) is expected


@pytest.mark.parametrize("value", ["", "yes", "true", "2"])
def test_activation_refuses_other_values(value):
    """A half-understood switch would leave a server unpatched."""
    with pytest.raises(ConfigError, match=f"MERIDIAN_PATCH is {value!r}, expected 0 or 1"):
        envs.activation({"MERIDIAN_PATCH": value})


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, True),
        ({"MERIDIAN_PATCH_MODE": "strict"}, True),
        ({"MERIDIAN_PATCH_MODE": "lenient"}, False),
    ],
)
def test_mode(env, expected):
    """Strict is the default."""
    assert envs.is_strict(env) is expected


def test_mode_refuses_other_values():
    """An unknown mode names both modes."""
    with pytest.raises(ConfigError, match="'loose', expected strict or lenient"):
        envs.is_strict({"MERIDIAN_PATCH_MODE": "loose"})


@pytest.mark.parametrize("name", envs.KNOWN)
def test_an_empty_variable_is_refused(name):
    """It is no value, and not the default either: half a template was filled in."""
    with pytest.raises(ConfigError, match=f"environment variable {name} is empty, expected a"):
        envs.check_names({name: ""})


def test_config_path():
    assert envs.config_path({}) is None
    assert envs.config_path({"MERIDIAN_PATCH_CONFIG": "a.yaml"}) == Path("a.yaml")


def test_overrides_become_key_paths():
    """Two underscores stand for the dot, and case does not count."""
    env = {"MERIDIAN_PATCH_SET_POLICY__NAME": "noop", "MERIDIAN_PATCH_SET_FAMILY": "x", "A": "1"}
    assert envs.config_overrides(env) == {
        ("policy", "name"): ("MERIDIAN_PATCH_SET_POLICY__NAME", "noop"),
        ("family",): ("MERIDIAN_PATCH_SET_FAMILY", "x"),
    }


def test_two_variables_for_one_value_are_refused():
    """Which of them counts would depend on the order of their names."""
    names = "MERIDIAN_PATCH_SET_POLICY__NAME", "MERIDIAN_PATCH_SET_policy__name"
    with pytest.raises(ConfigError, match=f"variables {names[0]} and {names[1]} set the same"):
        envs.config_overrides(dict.fromkeys(names, "noop"))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, None), ("", [""]), ("a, meridian_patch", ["a", "meridian_patch"])],
)
def test_plugin_names(value, expected):
    """vLLM's list is split at commas; unset and empty are different."""
    env = {} if value is None else {"VLLM_PLUGINS": value}
    assert envs.plugin_names(env) == expected


def test_activate_children_adds_the_plugin_to_a_given_list(monkeypatch):
    """A list without us would keep vLLM from loading us in its processes."""
    monkeypatch.setenv("MERIDIAN_PATCH", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    envs.activate_children()
    assert envs.activation(envs.environment()) is True
    assert envs.plugin_names(envs.environment()) == ["other", "meridian_patch"]


def test_activate_children_leaves_an_unset_list_alone(monkeypatch):
    """Unset means that vLLM loads all plugins."""
    monkeypatch.setenv("MERIDIAN_PATCH", "0")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    envs.activate_children()
    assert envs.plugin_names(envs.environment()) is None
