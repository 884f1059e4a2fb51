"""Reports of living processes, and `meridian status`."""

import json
import os

import pytest

from meridian_patch import cli
from meridian_patch.engine import status
from meridian_patch.errors import MeridianError


@pytest.fixture(autouse=True)
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(tmp_path))
    monkeypatch.setattr(status, "_report", {})
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


def test_reports_of_ended_processes_are_removed(directory):
    """A reused process id does not pass for the process that wrote the report."""
    ended = directory / "1.json"
    ended.write_text(json.dumps({"pid": 1, "role": "launcher", "started": "never"}))
    assert status.read_all() == []
    assert not ended.exists()


def test_an_unreadable_report_is_named(directory):
    """A broken status file is one clear error."""
    (directory / "7.json").write_text("{")
    with pytest.raises(MeridianError, match=r"7\.json cannot be read.*delete it"):
        status.read_all()


def test_an_unwritable_directory_does_not_stop_the_process(directory, monkeypatch):
    """The report is a convenience: an engine starts without it."""
    blocked = directory / "file"
    blocked.write_text("")
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(blocked / "inside"))
    status.publish(role="engine_core")
    assert "unpublished" in status._report


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
