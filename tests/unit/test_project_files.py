"""Files for those who join: workflows, forms, hooks and the container fit the scripts."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from meridian_patch import cli

ROOT = Path(__file__).resolve().parent.parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted(
    set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {GITHUB / "ISSUE_TEMPLATE/config.yml"}
)
HOOKS = ROOT / ".pre-commit-config.yaml"
# A script of this repository that a command starts.
SCRIPT = re.compile(r"(?<![\w/])(?:\.ci|scripts)/\w+(?:\.py)?")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", [*sorted(GITHUB.rglob("*.yml")), HOOKS, ROOT / "mkdocs.yml"])
def test_yaml_parses(path: Path) -> None:
    # The site's configuration names a function, which a safe loader does not read.
    yaml.compose(path.read_text())


def test_ci_runs_what_a_developer_runs() -> None:
    """On a Linux runner, in a clean environment."""
    (job,) = read(GITHUB / "workflows" / "ci.yml")["jobs"].values()
    assert job["runs-on"].startswith("ubuntu")
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert runs == [".ci/run $LANE"]
    lanes = re.findall(r"'(--\w+)'", str(job["steps"]))
    assert lanes
    assert all(lane in (ROOT / ".ci" / "run").read_text() for lane in lanes)


def test_a_release_is_attested() -> None:
    """Wheel and sdist, and what the wheel installs; no job has more rights than it needs."""
    path = GITHUB / "workflows" / "release.yml"
    used = {step["uses"].partition("@")[0] for step in steps(path) if "uses" in step}
    assert {"actions/attest-build-provenance", "actions/attest-sbom"} <= used
    assert any("python -m build" in step.get("run", "") for step in steps(path))
    assert read(path)["permissions"] == {}
    (job,) = read(path)["jobs"].values()
    assert job["permissions"] == dict.fromkeys(("attestations", "contents", "id-token"), "write")
    assert read(GITHUB / "workflows" / "ci.yml")["permissions"] == {"contents": "read"}


def test_alerts_of_a_release_name_whole_addresses(tmp_path: Path) -> None:
    """The step itself, on the alerts themselves."""
    (run,) = (
        step["run"] for step in steps(GITHUB / "workflows" / "release.yml")
        if "runbook_url" in step.get("run", "")
    )  # fmt: skip
    given = {"SERVER_URL": "https://example.com", "REPOSITORY": "o/r", "REF_NAME": "v1.2.3"}
    env = {"PATH": "/usr/bin:/bin", **{f"GITHUB_{name}": value for name, value in given.items()}}
    shutil.copytree(ROOT / "configs" / "prometheus", tmp_path / "configs" / "prometheus")
    subprocess.run(["bash", "-euc", run], cwd=tmp_path, env=env, check=True)
    rules = [rule for group in read(tmp_path / "alerts.yml")["groups"] for rule in group["rules"]]
    pages = {rule["annotations"]["runbook_url"] for rule in rules}
    begin = "https://example.com/o/r/blob/v1.2.3/"
    assert pages
    assert all((ROOT / page.removeprefix(begin)).is_file() for page in pages)
    assert all(page.startswith(begin) for page in pages)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_those_that_were_looked_at(path: Path) -> None:
    """A tag may be moved to other code, a commit not."""
    used = [step["uses"] for step in steps(path) if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_every_script_of_a_workflow_exists(path: Path) -> None:
    for step in steps(path):
        for name in SCRIPT.findall(step.get("run", "")):
            assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_asks_for_what_doctor_says(path: Path) -> None:
    """The command that it names exists."""
    fields = {field.get("id"): field for field in read(path)["body"]}
    label = fields["doctor"]["attributes"]["label"]
    (command,) = re.findall(r"`meridian (doctor --json[^`]*)`", label)
    assert cli._parser().parse_args(command.split()).as_json


def test_every_hook_is_a_program_of_the_environment() -> None:
    """Hooks fetch nothing from elsewhere."""
    (repository,) = read(HOOKS)["repos"]
    assert repository["repo"] == "local"
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert set(hooks) == {"ruff", "ruff-format", "gen-docs"}
    for hook in hooks.values():
        assert hook["entry"].startswith(".venv/bin/python -P ")
        assert all((ROOT / name).is_file() for name in SCRIPT.findall(hook["entry"]))
    assert "--check" in hooks["gen-docs"]["entry"]


def test_the_container_is_set_up_and_names_the_two_commands() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    assert container["postCreateCommand"] == "scripts/setup --cpu"
    assert {"scripts/demo", "scripts/test"} <= set(SCRIPT.findall(container["postAttachCommand"]))


def test_the_licence_is_shipped_with_its_notice() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["license-files"] == ["LICENSE", "NOTICE"]
    assert all((ROOT / name).is_file() for name in project["license-files"])
