"""Reports of living processes, and `meridian status`."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from meridian_patch import cli, envs
from meridian_patch.engine import status
from meridian_patch.errors import MeridianError


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(tmp_path))
    monkeypatch.setattr(status, "_report", {})
    tmp_path.chmod(0o700)
    return tmp_path


def test_facts_are_merged_into_one_report():
    """A process publishes what it learns as it goes."""
    status.publish(vllm_version="0.32.0")
    status.publish(role="engine_core", scheduler="PhaseScheduler")
    (report,) = status.read_all()
    assert report["pid"] == os.getpid()
    assert report["role"] == "engine_core"
    assert report["vllm_version"] == "0.32.0"
    assert report["scheduler"] == "PhaseScheduler"


def test_a_forked_child_has_its_parents_patches():
    """vLLM loads no plug-in in it again, and so publishes them no second time."""
    patches = [{"patch": "one", "outcome": "applied"}]
    status.publish(role="launcher", vllm_version="0.32.0", mode="strict", patches=patches)
    child = os.fork()
    if child == 0:
        status.publish(role="engine_core")
        os._exit(0 if status._report["patches"] == patches else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert status._report["role"] == "launcher"


def test_reports_of_ended_processes_are_removed(directory):
    """A reused process id does not pass for the process that wrote the report."""
    ended = directory / "1.json"
    ended.write_text(json.dumps({"pid": 1, "role": "launcher", "started": "never"}))
    assert status.read_all() == []
    assert not ended.exists()


@pytest.fixture
def server():
    """A process that has written its report, and started one that has written an engine's."""
    script = (
        "import subprocess, sys, time; from meridian_patch.engine import status;"
        "role = sys.argv[1]; status.publish(role=role, data_parallel_index=0);"
        "child = role == 'launcher' and subprocess.Popen([*sys.orig_argv[:-1], 'engine_core']);"
        "time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-P", "-c", script, "launcher"])
    deadline = time.monotonic() + 30
    while len(reports := status.read_all()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    yield [report["pid"] for report in reports]
    with suppress(ProcessLookupError):
        os.kill(reports[1]["pid"], signal.SIGKILL)
    process.kill()
    process.wait()


def wait_until_ended(pid):
    deadline = time.monotonic() + 30
    while status._start_time(pid):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_engine_that_ends_before_its_server_is_remembered(server, directory):
    """Killed, it is shown to who asks until its server ends or has another engine."""
    engine = server[1]
    ended = directory / f"{engine}.json"
    # An engine of another rank of the same server is no successor, nor is one that began before.
    before = json.loads(ended.read_text()) | of_process(os.getpid())
    (directory / "before.json").write_text(json.dumps(before))
    after = subprocess.Popen(["sleep", "60"])
    try:
        sibling = before | of_process(after.pid) | {"data_parallel_index": 1}
        (directory / "after.json").write_text(json.dumps(sibling))
        os.kill(engine, signal.SIGKILL)
        wait_until_ended(engine)
        for _ in range(2):
            found = [each for each in status.read_all(with_ended=True) if each.get("has_ended")]
            assert [each["pid"] for each in found] == [engine]
            assert engine not in [each["pid"] for each in status.read_all()]
        (directory / "after.json").write_text(json.dumps(before | of_process(after.pid)))
        assert engine not in [each["pid"] for each in status.read_all(with_ended=True)]
        assert not ended.exists()
    finally:
        after.kill()
        after.wait()


def of_process(pid):
    return {"pid": pid, "started": status._start_time(pid)}


def test_an_engine_that_ends_behind_its_server_is_forgotten(server):
    """No process depends on it."""
    launcher, engine = server
    os.kill(launcher, signal.SIGKILL)
    os.kill(engine, signal.SIGKILL)
    for pid in server:
        wait_until_ended(pid)
    assert status.read_all() == []


def test_an_unreadable_report_is_named(directory):
    """A broken status file is one clear error."""
    (directory / "7.json").write_text("{")
    with pytest.raises(MeridianError, match=r"7\.json cannot be read.*delete it"):
        status.read_all()
    (directory / "7.json").write_text("[]")
    with pytest.raises(MeridianError, match=r"7\.json cannot be read.*delete it"):
        status.read_all()


@pytest.mark.parametrize(
    "fact",
    ({"pid": "7"}, {"pid": [1]}, {"started": None}, {"role": 3}, {"role": ""}, {"parent_pid": [5]}),
    ids=str,
)
def test_a_report_with_a_wrong_field_is_named_with_what_was_expected(directory, fact):
    report = {"pid": 7, "started": "1", "role": "launcher", "parent_pid": 1} | fact
    (directory / "7.json").write_text(json.dumps(report))
    [name] = fact
    with pytest.raises(MeridianError, match=rf"7\.json cannot be read.*{name} is.*expected"):
        status.read_all(with_ended=True)


def test_an_unwritable_directory_does_not_stop_the_process(directory, monkeypatch):
    """The report is a convenience: an engine starts without it."""
    blocked = directory / "file"
    blocked.write_text("")
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(blocked / "inside"))
    status.publish(role="engine_core")
    assert "unpublished" in status._report


def warnings_of(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.fixture
def victim(tmp_path_factory):
    """A folder of the user's that status has no business in."""
    folder = tmp_path_factory.mktemp("victim")
    (folder / "precious").write_text("kept")
    return folder


def assert_unharmed(victim):
    assert {path.name: path.read_text() for path in victim.iterdir()} == {"precious": "kept"}


def test_a_link_in_place_of_the_directory_is_not_followed(
    directory, victim, monkeypatch, caplog, capsys
):
    """Another user may have put it there: one warning, no write, and nothing is read from it."""
    link = directory / "link"
    link.symlink_to(victim)
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(link))
    status.publish(role="engine_core")
    status.publish(scheduler="PhaseScheduler")
    (warning,) = warnings_of(caplog)
    assert f"{link} is a symbolic link" in warning
    assert "MERIDIAN_PATCH_STATUS_DIR" in warning
    assert_unharmed(victim)
    (victim / "1.json").write_text("{")
    assert status.read_all() == []
    assert run(["status"], capsys)[0] == 1


@pytest.mark.parametrize("suffix", ["json", "partial", "json.partial"])
def test_a_link_in_place_of_a_file_is_not_followed(directory, victim, suffix):
    """The names of files are predictable, so what stands there is replaced, never written to."""
    (directory / f"{os.getpid()}.{suffix}").symlink_to(victim / "precious")
    status.publish(role="engine_core")
    assert_unharmed(victim)
    (report,) = status.read_all()
    assert report["role"] == "engine_core"


def test_a_linked_report_is_not_read(directory, victim):
    """It could be a file of anything; its content does not appear in the error."""
    (directory / "7.json").symlink_to(victim / "precious")
    with pytest.raises(MeridianError, match=r"7\.json cannot be read") as error:
        status.read_all()
    assert "kept" not in str(error.value)


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_a_directory_that_others_may_write_in_is_not_used(directory, mode, caplog):
    """A user who may write there may replace reports."""
    directory.chmod(mode)
    status.publish(role="engine_core")
    (warning,) = warnings_of(caplog)
    assert f"its mode is {mode:o}, expected 700" in warning
    assert not list(directory.iterdir())
    (directory / "1.json").write_text("{")
    assert status.read_all() == []


def test_a_directory_of_another_user_is_not_used(directory, monkeypatch, caplog):
    """Its owner could read and replace what is in it."""
    owner = os.getuid()
    monkeypatch.setattr(status.os, "getuid", lambda: owner + 1)
    status.publish(role="engine_core")
    (warning,) = warnings_of(caplog)
    assert f"belongs to user {owner}, expected {owner + 1}" in warning
    assert not list(directory.iterdir())


def test_no_temporary_directory_does_not_stop_the_process(monkeypatch, caplog):
    """A read-only container without /tmp still serves."""

    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.delenv("MERIDIAN_PATCH_STATUS_DIR")
    monkeypatch.setattr(envs.tempfile, "gettempdir", refuse)
    status.publish(role="engine_core")
    assert "No usable temporary directory" in warnings_of(caplog)[0]


@pytest.fixture
def places(tmp_path, monkeypatch):
    """The user's runtime directory and the temporary one."""
    runtime, temporary = tmp_path / "runtime", tmp_path / "temporary"
    runtime.mkdir(mode=0o700)
    temporary.mkdir(mode=0o700)
    monkeypatch.delenv("MERIDIAN_PATCH_STATUS_DIR")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(envs.tempfile, "gettempdir", lambda: str(temporary))
    return runtime, temporary


def test_the_users_runtime_directory_is_preferred(places):
    """Other users cannot even name files in it; what we make is the user's alone."""
    runtime, temporary = places
    status.publish(role="engine_core")
    (report,) = runtime.glob("meridian_patch/*.json")
    assert report.stat().st_mode & 0o777 == 0o600
    assert report.parent.stat().st_mode & 0o777 == 0o700
    assert not list(temporary.iterdir())


@pytest.mark.parametrize("value", ["", "relative", "/nonexistent"])
def test_without_a_runtime_directory_the_temporary_one_is_used(places, monkeypatch, value):
    """A directory of the user's own in it, which a later reader finds wherever it runs."""
    runtime, temporary = places
    monkeypatch.setenv("XDG_RUNTIME_DIR", value)
    status.publish(role="engine_core")
    (report,) = temporary.glob(f"meridian_patch-{os.getuid()}/*.json")
    assert report.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert [each["role"] for each in status.read_all()] == ["engine_core"]


def test_a_hostile_directory_does_not_hide_the_safe_one(places, victim, caplog):
    """It may be put into the temporary directory by any user of the machine."""
    _, temporary = places
    (temporary / f"meridian_patch-{os.getuid()}").symlink_to(victim)
    status.publish(role="engine_core")
    assert not warnings_of(caplog)
    assert [each["role"] for each in status.read_all()] == ["engine_core"]
    assert "is a symbolic link" in warnings_of(caplog)[0]
    assert_unharmed(victim)


def run(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code, capsys.readouterr()


def test_command_prints_what_is_live(capsys):
    """`meridian status` shows process, patches and scheduler, and succeeds when all are live."""
    status.publish(
        role="engine_core",
        scheduler="AsyncPhaseScheduler",
        vllm_version="0.32.0",
        patches=[{"patch": "scheduler", "outcome": "applied"}],
    )
    code, printed = run(["status", "--json"], capsys)
    assert code == 0
    assert json.loads(printed.out)[0]["scheduler"] == "AsyncPhaseScheduler"
    code, printed = run(["status"], capsys)
    assert "engine_core" in printed.out


def test_command_fails_when_a_patch_is_not_live(capsys):
    """A refused patch, or no process at all, is a non-zero exit."""
    assert run(["status"], capsys)[0] == 1
    status.publish(patches=[{"patch": "scheduler", "outcome": "contract_broken"}])
    assert run(["status"], capsys)[0] == 1


def test_a_part_that_is_off_is_shown(capsys):
    """A line of the process's block names the parts."""
    applied = [{"patch": "scheduler", "outcome": "applied"}]
    status.publish(role="engine_core", patches=applied, parts_off=["the policy", "early exit"])
    code, printed = run(["status"], capsys)
    assert code == 0
    shown = " ".join(printed.out.split())
    assert "off the policy, early exit: failed in 10 of 100 steps, off until" in shown
