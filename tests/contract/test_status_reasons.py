"""What an engine cannot have is published with its reason, and shown by `meridian status`."""

import io

import pytest
from rich.console import Console
from tier_driver import driver_for

from meridian_patch.engine import status
from meridian_patch.operate.status_view import Process, print_blocks


@pytest.fixture(autouse=True)
def reports(monkeypatch, tmp_path):
    monkeypatch.setenv("MERIDIAN_PATCH_STATUS_DIR", str(tmp_path / "status"))
    monkeypatch.setattr(status, "_report", {})


def shown():
    """The status of this process, in one line."""
    stream = io.StringIO()
    processes = list(map(Process, status.read_all()))
    print_blocks(Console(file=stream, width=80), processes, verbose=False)
    return " ".join(stream.getvalue().split())


def test_an_engine_without_obstacles_names_none(demo_model):
    driver_for(demo_model)
    assert "policy latency: order, step_cut, time_sharing" in shown()
    assert " off " not in shown()


def test_without_prefix_caching_the_tiers_are_off(demo_model):
    """And an engine that is built after it in the same process has them."""
    driver_for(demo_model, enable_prefix_caching=False)
    assert "KV tiers off off KV tiers: prefix caching is off" in shown()
    driver_for(demo_model)
    assert "prefix caching" not in shown()


def test_by_the_operators_priorities_no_time_is_shared(demo_model):
    driver_for(demo_model, scheduling_policy="priority")
    assert "off rule time_sharing: vLLM schedules by the operator's priorities" in shown()
