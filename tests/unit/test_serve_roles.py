"""``meridian serve --role``: what it adds to vLLM's own options, and what it refuses."""

import json

import pytest

from meridian_patch import serve_roles
from meridian_patch.errors import ConfigError
from meridian_patch.serve_roles import split_role


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """Every fabric's package is installed."""
    monkeypatch.setattr(serve_roles.importlib.util, "find_spec", lambda _: object())


def test_without_a_role_nothing_changes() -> None:
    arguments = ["m", "--port", "8001", "--max-model-len", "1024"]
    assert split_role(arguments, {}) == (arguments, {})


@pytest.mark.parametrize(
    ("fabric", "connector"), (("nixl", "NixlConnector"), ("mooncake", "MooncakeConnector"))
)
def test_a_role_configures_vllms_connector(fabric: str, connector: str) -> None:
    given = ["m", "--role", "think", "--fabric", fabric, "--offload-threshold-blocks", "3"]
    role = split_role([*given, "--port", "8001"], {})
    assert role.arguments[:4] == ["m", "--port", "8001", "--kv-transfer-config"]
    transfer = json.loads(role.arguments[4])
    assert transfer["kv_connector"] == connector
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert role.environment["MERIDIAN_PATCH_SET_HANDOFF__ROLE"] == "think"
    assert role.environment["MERIDIAN_PATCH_SET_HANDOFF__OFFLOAD_THRESHOLD_BLOCKS"] == "3"


@pytest.mark.parametrize(
    ("fabric", "variable"),
    (("nixl", "VLLM_NIXL_SIDE_CHANNEL_PORT"), ("mooncake", "VLLM_MOONCAKE_BOOTSTRAP_PORT")),
)
@pytest.mark.parametrize(
    ("port", "channel"), (("8001", "30008"), ("8002", "30016"), ("60000", "28000"))
)
def test_servers_of_one_host_get_ports_of_their_own(
    fabric: str, variable: str, port: str, channel: str
) -> None:
    """For the engines that read from them; a port of the user's own is kept."""
    given = ["m", "--role", "answer", "--fabric", fabric, "--port", port]
    environment = split_role(given, {}).environment
    assert environment[variable] == channel
    assert [name for name in environment if name.endswith("_PORT")] == [variable]
    assert variable not in split_role(given, {variable: "5600"}).environment


def test_mooncake_frees_what_nobody_fetches() -> None:
    """After half a minute, as NIXL does; a time of the user's own is kept."""
    given, variable = ["m", "--role", "think", "--fabric"], "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT"
    assert split_role([*given, "mooncake"], {}).environment[variable] == "120"
    assert variable not in split_role([*given, "mooncake"], {variable: "5"}).environment
    assert variable not in split_role([*given, "nixl"], {}).environment


@pytest.mark.parametrize("option", ("--headless", "--nnodes=2", "--data_parallel_address=h"))
def test_an_engine_over_several_hosts_keeps_vllms_own_port(option: str) -> None:
    """It is the same on all of them, and only one has an API server's port."""
    given = ["m", "--role", "answer", "--fabric", "mooncake", option]
    assert "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in split_role(given, {}).environment


def test_the_port_may_stand_in_vllms_configuration_file(tmp_path) -> None:
    """The command line takes precedence, as in vLLM; a wrong file is refused in one sentence."""
    file = tmp_path / "vllm.yaml"
    file.write_text("port: 8002\nmax-model-len: 1024\n")
    given = ["m", "--role", "answer", "--config", str(file)]

    def channel(*more: str) -> str:
        return split_role([*given, *more], {}).environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]

    assert channel() == "30016"
    assert channel("--port", "8001") == "30008"
    for wrong, why in (("[1, 2]", "is a list, expected a map"), ("a: [", "line 1: not valid YAML")):
        file.write_text(wrong)
        with pytest.raises(ConfigError, match=f"file {file}.* {why}"):
            channel()
    file.unlink()
    with pytest.raises(ConfigError, match=f"file {file} does not exist"):
        channel()


@pytest.mark.parametrize("name", ["kv-transfer-config", "kv_transfer_config"])
def test_a_connector_of_the_configuration_file_is_kept(tmp_path, name: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(f"{name}:\n  kv_connector: NixlConnector\n")
    own = ["m", "--config", str(file)]
    role = split_role([*own, "--role", "think"], {})
    assert role.arguments == own
    assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in role.environment


@pytest.mark.parametrize(
    "own",
    (
        ["m", "--kv-transfer-config", "{}"],
        ["m", "--kv_transfer_config={}"],
        ["m", "--kv-transfer-config.kv_connector", "NixlConnector"],
    ),
    ids=str,
)
def test_a_connector_of_the_users_own_is_kept(own: list[str]) -> None:
    assert split_role([*own, "--role", "think"], {}).arguments == own


@pytest.mark.parametrize(
    ("arguments", "says"),
    (
        (["--role", "both"], "--role"),
        (["--fabric", "nixl"], "--fabric needs --role"),
        (["--offload-threshold-blocks", "3"], "--offload-threshold-blocks needs --role"),
        (["--role", "think", "--offload-threshold-blocks", "-1"], "is '-1', expected 0 or more"),
        (["--role", "think", "--fabric", "rdma"], "--fabric"),
        (
            ["--role", "think", "--fabric", "nixl", "--kv-transfer-config", "{}"],
            "either --fabric or --kv-transfer-config",
        ),
    ),
)
def test_wrong_options_are_refused(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        split_role(["m", *arguments], {})


@pytest.mark.parametrize(
    ("fabric", "says"),
    (
        ("nixl", r"package nixl is missing.*; 'pip install nixl'$"),
        ("mooncake", r"package mooncake is missing.*'pip install mooncake-transfer-engine-cuda13'"),
    ),
)
def test_a_missing_package_is_named(monkeypatch, fabric: str, says: str) -> None:
    monkeypatch.setattr(serve_roles.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=says):
        split_role(["m", "--role", "think", "--fabric", fabric], {})
