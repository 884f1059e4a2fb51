"""examples/kubernetes: valid manifests that fit together. Nothing is started."""

import ast
import copy
import re
import sys
import tomllib
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from meridian_patch.config.load import load_config
from meridian_patch.serve_roles import split_role

ROOT = Path(__file__).resolve().parent.parent.parent
EXAMPLE = ROOT / "examples" / "kubernetes"
README = (EXAMPLE / "README.md").read_text()
DOCKERFILE = (EXAMPLE / "Dockerfile").read_text().splitlines()
(VLLM,) = (line.removeprefix("ARG VLLM=") for line in DOCKERFILE if line.startswith("ARG "))
GATEWAY_TEST = ROOT / "tests" / "engine" / "test_gateway.py"
# Oldest and newest release that the manifests are for.
RELEASES = ("1.29", "1.37")
CONFIG, ENGINE = EXAMPLE / "config.yaml", EXAMPLE / "engine.yaml"
HANDOFF = sorted((EXAMPLE / "handoff").glob("*.yaml"))
# What each of README's two commands applies.
SETS = {"engine": [CONFIG, ENGINE], "handoff": [CONFIG, *HANDOFF]}
FILES = [CONFIG, ENGINE, *HANDOFF]


def objects(files: list[Path]) -> list[dict]:
    return [each for file in files for each in yaml.safe_load_all(file.read_text())]


def named(kind: str, name: str, files: list[Path] = FILES) -> dict:
    found = [(o["kind"], o["metadata"]["name"]) == (kind, name) for o in objects(files)]
    return objects(files)[found.index(True)]


def pods(files: list[Path]) -> list[dict]:
    return [o["spec"]["template"] for o in objects(files) if "template" in o.get("spec", {})]


def container(template: dict) -> dict:
    (only,) = template["spec"]["containers"]
    return only


def labels(template: dict) -> dict:
    return template["metadata"]["labels"]


def component(template: dict) -> str:
    return labels(template)["app.kubernetes.io/component"]


def ports(template: dict) -> dict[str, int]:
    return {each["name"]: each["containerPort"] for each in container(template)["ports"]}


PODS = {component(template): template for template in pods(FILES)}
ENGINES = {name: template for name, template in PODS.items() if name != "gateway"}


def environment(template: dict) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container(template)["env"]}


def addresses(role: str) -> list[str]:
    """Base URLs of a stateful set's pods, by the names that it gives them."""
    spec = named("StatefulSet", f"meridian-{role}")["spec"]
    service = named("Service", spec["serviceName"])
    # Only then each pod has a name.
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    # Headless services do not translate ports.
    assert port["port"] == ports(PODS[role])[port["targetPort"]]
    name = f"meridian-{role}"
    count = range(spec["replicas"])
    return [f"http://{name}-{n}.{spec['serviceName']}:{port['port']}" for n in count]


@pytest.mark.parametrize("release", RELEASES)
def test_every_manifest_is_valid(release):
    """With unknown fields refused."""
    for each in objects(FILES):
        kubernetes_validate.validate(each, release, strict=True)


def test_every_file_is_applied():
    """A folder given to kubectl is read without the folders in it."""
    assert sorted(EXAMPLE.rglob("*.yaml")) == sorted(FILES)
    assert sorted(EXAMPLE.glob("*.yaml")) == SETS["engine"]
    assert list(PODS) == ["engine", "answer", "gateway", "think"]
    for files in SETS.values():
        names = [(each["kind"], each["metadata"]["name"]) for each in objects(files)]
        assert len(set(names)) == len(names)
        assert ("Service", "meridian") in names


@pytest.mark.parametrize("place", ("metadata", "spec"))
def test_an_unknown_field_is_noticed(place):
    wrong = copy.deepcopy(named("Deployment", "meridian-gateway"))
    wrong[place]["replica"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_a_wrong_probe_is_noticed():
    wrong = copy.deepcopy(named("StatefulSet", "meridian-think"))
    container(wrong["spec"]["template"])["readinessProbe"]["httpGet"].pop("port")
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


@pytest.mark.parametrize("files", SETS.values(), ids=SETS)
def test_selectors_find_their_pods(files):
    for each in objects(files):
        if each["kind"] in {"Deployment", "StatefulSet"}:
            wanted = each["spec"]["selector"]["matchLabels"]
            assert wanted.items() <= labels(each["spec"]["template"]).items()
        if each["kind"] == "Service":
            wanted = each["spec"]["selector"]
            (one,) = [p for p in pods(files) if wanted.items() <= labels(p).items()]
            assert {port["targetPort"] for port in each["spec"]["ports"]} <= set(ports(one))


def test_clients_reach_the_gateway_where_there_is_one():
    served = {}
    for name, files in SETS.items():
        selector = named("Service", "meridian", files)["spec"]["selector"]
        served[name] = selector["app.kubernetes.io/component"]
    assert served == {"engine": "engine", "handoff": "gateway"}


def test_each_asks_the_pods_of_the_next():
    """The gateway asks all think engines, and these all answer engines, by the pods' names."""
    asked = container(PODS["gateway"])["args"]
    assert [each for each in asked if each.startswith("http")] == addresses("think")
    answers = [f"--answer={url}" for url in addresses("answer")]
    think = container(PODS["think"])["args"]
    assert [each for each in think if each.startswith("--answer")] == answers


def test_policies_allow_what_engines_need():
    """Requests from the one before; KV reads of think engines by answer engines; nothing else."""
    allowed = set()
    for each in objects(HANDOFF):
        if each["kind"] != "NetworkPolicy":
            continue
        spec = each["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        (to,) = matched(spec["podSelector"])
        for rule in spec["ingress"]:
            (sender,) = [matched(peer["podSelector"])[0] for peer in rule["from"]]
            names = [port["port"] for port in rule.get("ports", ())]
            assert set(names) <= set(ports(PODS[to]))
            allowed.add((sender, to, *names))
    # Without ports: UCX opens its own.
    assert allowed == {("gateway", "think", "http"), ("answer", "think"), ("think", "answer")}


def matched(selector: dict) -> list[str]:
    wanted = selector["matchLabels"].items()
    return [name for name, template in PODS.items() if wanted <= labels(template).items()]


def test_commands_take_their_arguments(monkeypatch):
    # The package may be missing where no engine is tested.
    monkeypatch.setattr("importlib.util.find_spec", lambda _: sys)
    roles = {}
    for name, template in ENGINES.items():
        engine = container(template)
        assert engine["command"] == ["meridian", "serve"]
        made = split_role(engine["args"], environment(template))
        roles[name] = made.environment.get("MERIDIAN_PATCH_SET_HANDOFF__ROLE")
        assert ("--kv-transfer-config" in made.arguments) is bool(roles[name])
        assert f"--port={ports(template)['http']}" in engine["args"]
    assert roles == {"engine": None, "think": "think", "answer": "answer"}


def test_engines_of_both_roles_serve_the_same_model():
    models = {container(ENGINES[role])["args"][0] for role in ("think", "answer")}
    assert len(models) == 1


def test_answer_engines_find_think_engines(monkeypatch):
    """By the address of the pod, at a port that it names."""
    think = PODS["think"]
    monkeypatch.setattr("importlib.util.find_spec", lambda _: sys)
    (host,) = [
        each for each in container(think)["env"] if each["name"] == "VLLM_NIXL_SIDE_CHANNEL_HOST"
    ]
    assert host["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    port = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    assert int(environment(think)[port]) == ports(think)["kv"]
    # Ours would be another one.
    assert port not in split_role(container(think)["args"], environment(think)).environment


def test_the_gateway_is_started_as_the_tests_start_it():
    """With options of tests/engine/test_gateway.py alone."""
    functions = ast.walk(ast.parse(GATEWAY_TEST.read_text()))
    (start,) = [each for each in functions if getattr(each, "name", None) == "gateway"]
    texts = [each.value for each in ast.walk(start) if isinstance(each, ast.Constant)]
    known = {each for each in texts if isinstance(each, str) and each.startswith("--")}
    gateway = container(PODS["gateway"])
    assert gateway["command"] == ["vllm-router"]
    options = [each.partition("=") for each in gateway["args"] if each.startswith("--")]
    given = {name: value for name, _, value in options}
    assert {"--worker-urls", "--policy", "--host", "--port"} == set(given) <= known
    assert given["--policy"] in texts
    assert int(given["--port"]) == ports(PODS["gateway"])["http"]


def test_the_configuration_is_one_of_ours(tmp_path):
    ((key, text),) = named("ConfigMap", "meridian-config")["data"].items()
    file = tmp_path / key
    file.write_text(text)
    config = load_config({"MERIDIAN_PATCH_CONFIG": str(file)}).config
    assert config.handoff.offload_threshold_blocks == 16
    for template in ENGINES.values():
        (mount,) = [m for m in container(template)["volumeMounts"] if m["name"] == "config"]
        path = environment(template)["MERIDIAN_PATCH_CONFIG"]
        assert path == f"{mount['mountPath']}/{key}"


@pytest.mark.parametrize("template", PODS.values(), ids=PODS)
def test_mounts_and_probes_fit(template):
    only, spec = container(template), template["spec"]
    volumes = {each["name"]: each for each in spec.get("volumes", ())}
    assert {each["name"] for each in only.get("volumeMounts", ())} == set(volumes)
    if "config" in volumes:
        assert named("ConfigMap", volumes["config"]["configMap"]["name"])
    probes = {name: each["httpGet"] for name, each in only.items() if name.endswith("Probe")}
    assert set(probes) == {"startupProbe", "readinessProbe", "livenessProbe"}
    assert {probe["port"] for probe in probes.values()} == {"http"}
    paths = {probe["path"] for probe in probes.values()}
    is_gateway = component(template) == "gateway"
    assert paths == ({"/liveness", "/readiness"} if is_gateway else {"/health"})
    assert all(f"`{path}`" in README for path in paths)
    assert spec["enableServiceLinks"] is False
    ends = re.findall(r"--shutdown-timeout=(\d+)", " ".join(only["args"]))
    wait_s = int(only["lifecycle"]["preStop"]["exec"]["command"][1]) if "lifecycle" in only else 0
    assert all(int(each) + wait_s < spec["terminationGracePeriodSeconds"] for each in ends)


def test_readme_builds_the_images_of_the_pods():
    """Both commands name the Dockerfile, its stages, and the images that pods run."""
    builds = re.findall(r"^\$ docker build (.*) \.$", README, flags=re.MULTILINE)
    pushed = re.findall(r"^\$ docker push (\S+)$", README, flags=re.MULTILINE)
    engine, gateway = [
        dict(zip(words[::2], words[1::2], strict=True)) for words in map(str.split, builds)
    ]
    for build in (engine, gateway):
        assert ROOT / build["--file"] == EXAMPLE / "Dockerfile"
    assert "--target" not in engine
    assert {container(template)["image"] for template in ENGINES.values()} == {engine["--tag"]}
    assert container(PODS["gateway"])["image"] == gateway["--tag"]
    assert pushed == [engine["--tag"], gateway["--tag"]]
    stages = [line.split()[1:] for line in DOCKERFILE if line.startswith("FROM ")]
    # The last stage is built where none is named.
    assert [each[2:] for each in stages] == [[gateway["--target"]], []]
    assert f"`{stages[-1][0].replace('${VLLM}', VLLM)}`" in README


def test_the_image_has_the_releases_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (vllm,) = [
        each for each in project["project"]["optional-dependencies"]["cuda"] if "vllm=" in each
    ]
    release = vllm.partition("==")[2]
    assert f"v{release}" == VLLM
    for template in ENGINES.values():
        assert container(template)["image"].endswith(f":{release}")
    router = re.search(r"vllm-router==[\d.]+", (ROOT / "scripts" / "setup").read_text())
    (installed,) = [line for line in DOCKERFILE if "vllm-router" in line]
    assert installed.endswith(router.group())
    assert container(PODS["gateway"])["image"].endswith(f":{router.group().partition('==')[2]}")


def test_the_image_holds_the_package():
    """What pyproject.toml names is copied to where it is installed from, for a user not root."""
    copied = {}
    for line in DOCKERFILE:
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for source in sources:
                assert (ROOT / source).exists()
                copied[source] = target if target.endswith("/") else f"{target}/"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    folders = {each.split("/")[0] for each in project["tool"]["setuptools"]["package-dir"].values()}
    assert copied == dict.fromkeys(files, "/src/") | {each: f"/src/{each}/" for each in folders}
    assert "RUN uv pip install --system /src nixl==1.5.1" in DOCKERFILE
    users = [line.split()[1] for line in DOCKERFILE if line.startswith("USER ")]
    assert users == ["2000:0", "2000:0"]
    for template in PODS.values():
        user = template["spec"]["securityContext"]
        assert user["runAsNonRoot"] is True
        assert f"{user['runAsUser']}:{user['runAsGroup']}" == users[-1]
