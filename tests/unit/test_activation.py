"""When this package is active, asked in fresh processes."""

import subprocess
import sys

import pytest

from meridian_patch import envs
from meridian_patch.activation import is_active

SHOW = (
    "import os; from meridian_patch.activation import is_active; "
    "print(is_active(), os.environ.get('VLLM_PLUGINS'))"
)


def run(code, **env):
    clean = {k: v for k, v in envs.environment().items() if not k.startswith(("MERIDIAN", "VLLM"))}
    result = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=clean | env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_import_activates_the_process_and_its_children():
    """A user's import makes this process active and tells its children."""
    assert run(f"import meridian_patch; {SHOW}") == "True None"


def test_import_adds_itself_to_a_plugin_list():
    """A list of plugins that leaves us out would silently serve stock: the import joins it."""
    assert run(f"import meridian_patch; {SHOW}", VLLM_PLUGINS="other") == (
        "True other,meridian_patch"
    )


def test_off_switch_wins_over_the_import():
    """MERIDIAN_PATCH=0 leaves an importing process inactive."""
    assert run(f"import meridian_patch; {SHOW}", MERIDIAN_PATCH="0") == "False None"


def test_import_without_installation_is_refused():
    """A checkout on the path that vLLM's processes would not load is no silent stock server."""
    uninstalled = (
        "import importlib.metadata as m; m.entry_points = lambda **_: ()\n"
        "try:\n import meridian_patch\n"
        "except Exception as e: print(type(e).__name__, 'pip install .' in str(e))"
    )
    assert run(uninstalled) == "PatchRefused True"
    assert run(uninstalled, MERIDIAN_PATCH="yes") == "PatchRefused True"
    assert run(uninstalled, MERIDIAN_PATCH="0") == ""


def test_a_wrong_switch_is_refused_by_vllms_processes_and_not_by_the_import():
    """`meridian doctor` must start to name it; vLLM loads the plug-in, and that refuses."""
    register = (
        "import meridian_patch, os\n"
        "from meridian_patch.plugin import register\n"
        "try:\n register()\n"
        "except Exception as e: print(type(e).__name__, os.environ['VLLM_PLUGINS'])"
    )
    shown = run(register, MERIDIAN_PATCH="yes", VLLM_PLUGINS="other")
    assert shown == "ConfigError other,meridian_patch"


def test_the_given_environment_is_without_the_activation():
    """What an import sets for its children is not what the user set."""
    show = (
        "import meridian_patch; from meridian_patch import envs; given = envs.given_environment(); "
        "print(given.get('MERIDIAN_PATCH'), given.get('VLLM_PLUGINS'))"
    )
    assert run(show) == "None None"
    assert run(show, VLLM_PLUGINS="other") == "None other"
    assert run(show, MERIDIAN_PATCH="1", VLLM_PLUGINS="meridian_patch") == "1 meridian_patch"


def test_loading_by_vllm_alone_activates_nothing():
    """vLLM imports the package to load its entry point; installing must change nothing."""
    as_vllm = (
        "import sys, types; plugins = types.ModuleType('vllm.plugins'); "
        "plugins.plugins_loaded = True; sys.modules['vllm.plugins'] = plugins; "
    )
    assert run(f"{as_vllm}{SHOW}") == "False None"
    assert run(f"{as_vllm}{SHOW}", VLLM_PLUGINS="a,meridian_patch") == "True a,meridian_patch"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"VLLM_PLUGINS": "meridian_patch"}, True),
        ({"VLLM_PLUGINS": ""}, False),
        ({"VLLM_PLUGINS": "meridian_patch", "MERIDIAN_PATCH": "0"}, False),
        ({"VLLM_PLUGINS": "other", "MERIDIAN_PATCH": "1"}, True),
    ],
)
def test_precedence(monkeypatch, values, expected):
    """MERIDIAN_PATCH decides; without it the plugin list does."""
    for name in ("MERIDIAN_PATCH", "VLLM_PLUGINS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert is_active() is expected
