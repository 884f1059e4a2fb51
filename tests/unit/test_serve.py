"""`meridian serve`: options that set our configuration, and threads on a few cores."""

import importlib.metadata
import os
import re
from pathlib import Path
from typing import NoReturn

import pytest

from meridian_patch import envs, serve
from meridian_patch.errors import ConfigError
from meridian_patch.serve import split_settings
from meridian_patch.serve_roles import OF_ROLES

POLICY, EXIT = "MERIDIAN_PATCH_SET_POLICY__NAME", "MERIDIAN_PATCH_SET_EXIT__MODE"
THREADS = "OMP_NUM_THREADS"


def test_without_an_option_nothing_changes() -> None:
    arguments = ["m", "--port", "8001", "--scheduling-policy", "priority"]
    assert split_settings(arguments) == (arguments, {})


def test_options_are_the_variables_of_the_same_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of vLLM stay; a file is named from anywhere."""
    monkeypatch.chdir(tmp_path)
    given = [
        "m",
        "--policy",
        "noop",
        "--port=8001",
        "--exit=enforce",
        "--meridian-config",
        "a.yaml",
    ]
    assert split_settings(given) == (
        ["m", "--port=8001"],
        {POLICY: "noop", EXIT: "enforce", "MERIDIAN_PATCH_CONFIG": str(tmp_path / "a.yaml")},
    )


def test_vllms_own_configuration_file_is_left_to_it() -> None:
    arguments = ["m", "--config", "vllm.yaml"]
    assert split_settings(arguments) == (arguments, {})


@pytest.mark.parametrize(
    ("given", "message"),
    (
        (["--policy", "fast"], "--policy is 'fast', expected latency or noop"),
        (["--exit", "on"], "--exit is 'on', expected off, observe or enforce"),
        (["--policy"], "argument --policy: expected one argument"),
    ),
)
def test_a_wrong_value_names_the_option_and_what_it_takes(given: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        split_settings(["m", *given])
    assert str(error.value) == f"meridian serve: {message}"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A CPU build of vLLM on two cores, whose server is not started."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(serve, "_is_cpu_build", lambda: True)
    monkeypatch.setattr(serve, "check_entry_point", lambda: None)
    monkeypatch.setattr(serve, "installed_vllm", lambda _: None)
    monkeypatch.setattr(serve, "_server", lambda arguments: arguments)
    monkeypatch.setattr(os, "execv", stop)
    for name in ("MERIDIAN_PATCH", "VLLM_PLUGINS", THREADS, POLICY, EXIT):
        # Set and taken away: what the command sets is undone after the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(envs, "_replaced", {})
    return monkeypatch


def stop(*_: object) -> NoReturn:
    raise SystemExit(0)


def start(*arguments: str) -> dict[str, str]:
    """The environment in which vLLM's server would start."""
    with pytest.raises(SystemExit):
        serve.serve(["m", *arguments])
    return dict(envs.environment())


def test_few_cores_of_a_cpu_build_get_one_thread(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said in one line."""
    del machine
    assert start()[THREADS] == "1"
    printed = capsys.readouterr().out
    assert printed.startswith("meridian serve: OMP_NUM_THREADS=1, because vLLM is built for CPUs")
    assert printed.count("\n") == 1


def test_threads_of_the_users_own_are_kept(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.setenv(THREADS, "2")
    assert start()[THREADS] == "2"
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("cores", "is_cpu_build"), ((5, True), (2, False)))
def test_other_machines_keep_vllms_choice(
    machine: pytest.MonkeyPatch, cores: int, is_cpu_build: bool
) -> None:
    machine.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    machine.setattr(serve, "_is_cpu_build", lambda: is_cpu_build)
    assert THREADS not in start()


def test_unbound_threads_are_the_users_choice(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    assert THREADS not in start()


def test_an_option_takes_precedence_over_the_environment(machine: pytest.MonkeyPatch) -> None:
    machine.setenv(POLICY, "latency")
    assert start("--policy", "noop")[POLICY] == "noop"


@pytest.mark.parametrize(
    "ours",
    (
        (),
        ("--policy", "latency", "--meridian-config=a.yaml"),
        ("--role", "think", "--answer", "http://a", "--answer", "http://b", "--fabric", "nixl"),
        ("--policy", "Latency", "--exit"),
        ("--answer", "http://a"),
        ("--offload-threshold-blocks", "x"),
    ),
)
def test_switched_off_it_serves_stock_whatever_is_given(
    machine: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ours: tuple[str, ...]
) -> None:
    """The command of the patched server is the one of the stock server at three in the morning."""
    started: list[list[str]] = []
    machine.setattr(os, "execv", lambda _, command: (started.append(command), stop()))
    machine.setenv("MERIDIAN_PATCH", "0")
    machine.setenv("MERIDIAN_PATCH_SET_NO__SUCH_KEY", "1")
    environment = start("--port", "8001", *ours)
    assert started[0][2:] == ["m", "--port", "8001"]
    assert "VLLM_PLUGINS" not in environment
    assert environment["MERIDIAN_PATCH"] == "0"
    assert POLICY not in environment
    assert "MERIDIAN_PATCH is 0: stock vLLM serves" in capsys.readouterr().out


def test_switched_off_every_option_of_ours_is_left_out() -> None:
    """But for those of emulation; an option that the usage names is one of these."""
    named = re.findall(r"^  (--[a-z-]+)", serve.USAGE, flags=re.MULTILINE)
    own = {name for name in named if not name.startswith("--emulate")}
    assert own == {*serve.OF_SETTINGS, *OF_ROLES}


@pytest.mark.parametrize(
    ("version", "is_cpu_build"), ((None, True), ("0.33.0+cpu", True), ("0.32.0", False))
)
def test_the_build_is_told_by_its_distribution(
    monkeypatch: pytest.MonkeyPatch, version: str | None, is_cpu_build: bool
) -> None:
    """The CPU build has none named vllm, or a version that ends in +cpu."""

    def installed(_: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", installed)
    assert serve._is_cpu_build() is is_cpu_build
