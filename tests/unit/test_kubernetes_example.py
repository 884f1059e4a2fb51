"""examples/kubernetes: valid manifests that fit together. Nothing is started."""

import copy
import sys
from itertools import chain
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from meridian_patch.config.load import load_config
from meridian_patch.router.command import engines_of
from meridian_patch.serve_roles import split_role

EXAMPLE = Path(__file__).resolve().parent.parent.parent / "examples" / "kubernetes"
# Oldest and newest release that the manifests are for.
RELEASES = ("1.29", "1.37")
FILES = sorted(EXAMPLE.glob("*.yaml"))
OBJECTS = [each for file in FILES for each in yaml.safe_load_all(file.read_text())]


def named(kind: str, name: str) -> dict:
    (found,) = [o for o in OBJECTS if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


def pod(kind: str, name: str) -> dict:
    return named(kind, name)["spec"]["template"]


ENGINES = {role: pod("StatefulSet", f"meridian-{role}") for role in ("think", "answer")}
ROUTER = pod("Deployment", "meridian-router")
PODS = [*ENGINES.values(), ROUTER]


def container(template: dict) -> dict:
    (only,) = template["spec"]["containers"]
    return only


@pytest.mark.parametrize("release", RELEASES)
def test_every_manifest_is_valid(release):
    """With unknown fields refused."""
    assert len(FILES) == 4
    for each in OBJECTS:
        kubernetes_validate.validate(each, release, strict=True)


@pytest.mark.parametrize("place", ("metadata", "spec"))
def test_an_unknown_field_is_noticed(place):
    wrong = copy.deepcopy(named("Deployment", "meridian-router"))
    wrong[place]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_a_wrong_probe_is_noticed():
    wrong = copy.deepcopy(named("StatefulSet", "meridian-think"))
    container(wrong["spec"]["template"])["readinessProbe"]["httpGet"].pop("port")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_selectors_find_their_pods():
    for each in OBJECTS:
        if each["kind"] in {"Deployment", "StatefulSet"}:
            wanted = each["spec"]["selector"]["matchLabels"]
            labels = each["spec"]["template"]["metadata"]["labels"]
            assert wanted.items() <= labels.items()
        if each["kind"] == "Service":
            found = [p for p in PODS if each["spec"]["selector"].items() <= _labels(p).items()]
            (one,) = found
            ports = {port["name"] for port in container(one)["ports"]}
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= ports
    policy = named("NetworkPolicy", "meridian-engines")["spec"]["podSelector"]["matchExpressions"]
    kept = [p for p in PODS if all(_labels(p).get(e["key"]) in e["values"] for e in policy)]
    assert kept == list(ENGINES.values())


def _labels(template: dict) -> dict:
    return template["metadata"]["labels"]


def test_the_router_names_every_engine():
    """By the names of pods that their stateful sets give."""
    arguments = [each.partition("=") for each in container(ROUTER)["args"]]
    told = {role: [v for name, _, v in arguments if name == f"--{role}"] for role in ENGINES}
    for role, urls in told.items():
        spec = named("StatefulSet", f"meridian-{role}")["spec"]
        service = named("Service", spec["serviceName"])
        assert service["spec"]["clusterIP"] == "None"
        (port,) = [p["port"] for p in service["spec"]["ports"]]
        name = f"meridian-{role}"
        pods = [f"http://{name}-{n}.{name}:{port}" for n in range(spec["replicas"])]
        assert urls == pods
    assert [each.role for each in engines_of(told["think"], told["answer"])] == list(ENGINES)


def test_commands_take_their_arguments(monkeypatch):
    from meridian_patch.cli import _parser

    route = container(ROUTER)
    parsed = _parser().parse_args([*route["command"][1:], *route["args"]])
    assert parsed.port == container(ROUTER)["ports"][0]["containerPort"]
    # The package may be missing where no engine is tested.
    monkeypatch.setattr("importlib.util.find_spec", lambda _: sys)
    for role, template in ENGINES.items():
        engine = container(template)
        env = {each["name"]: each.get("value", "") for each in engine["env"]}
        made = split_role(engine["args"], env)
        assert made.environment["MERIDIAN_PATCH_SET_HANDOFF__ROLE"] == role
        assert "--kv-transfer-config" in made.arguments
        # The side channel's port is the one that is open.
        assert "VLLM_NIXL_SIDE_CHANNEL_PORT" not in made.environment
        open_ports = {port["containerPort"] for port in engine["ports"]}
        assert int(env["VLLM_NIXL_SIDE_CHANNEL_PORT"]) in open_ports
        assert f"--port={parsed_port(engine)}" in engine["args"]


def parsed_port(engine: dict) -> int:
    (port,) = [each["containerPort"] for each in engine["ports"] if each["name"] == "http"]
    return port


def test_the_configuration_is_one_of_ours(tmp_path):
    (text,) = named("ConfigMap", "meridian-config")["data"].values()
    file = tmp_path / "meridian.yaml"
    file.write_text(text)
    config = load_config({"MERIDIAN_PATCH_CONFIG": str(file)}).config
    assert config.handoff.offload_threshold_blocks == 16
    for template in ENGINES.values():
        (mount,) = [m for m in container(template)["volumeMounts"] if m["name"] == "config"]
        (path,) = [
            e["value"] for e in container(template)["env"] if e["name"] == "MERIDIAN_PATCH_CONFIG"
        ]
        (key,) = named("ConfigMap", "meridian-config")["data"]
        assert path == f"{mount['mountPath']}/{key}"


def test_mounts_and_probes_fit():
    for template in PODS:
        only = container(template)
        volumes = {each["name"] for each in template["spec"].get("volumes", ())}
        assert {each["name"] for each in only.get("volumeMounts", ())} == volumes
        ports = {port["name"] for port in only["ports"]}
        probes = [only[name] for name in only if name.endswith("Probe")]
        assert {probe["httpGet"]["port"] for probe in probes} <= ports
        assert template["spec"]["enableServiceLinks"] is False
    paths = set(chain.from_iterable(_paths(template) for template in PODS))
    assert paths == {"/health", "/metrics"}


def _paths(template: dict) -> list[str]:
    only = container(template)
    return [only[name]["httpGet"]["path"] for name in only if name.endswith("Probe")]
