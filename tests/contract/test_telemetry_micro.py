"""`benches.py telemetry-micro` switches telemetry, and times what it says it times."""

import json
from contextlib import closing

import benches
import pytest
from micro.policy import ARMS, ChatLoad
from micro.telemetry_switch import (
    CORE,
    SERVER,
    WIRE,
    SwitchedEngine,
    patched_api,
)
from prometheus_client import REGISTRY

from meridian_patch.replay.engine import ReplayEngine
from meridian_patch.replay.scheduler import read_template_tokens
from meridian_patch.replay.types import EngineLimits, ReplayArm

RUNNING = 4


@pytest.fixture
def switched():
    engine = ReplayEngine(
        ReplayArm("latency", True, ARMS["latency"]),
        2000,
        lambda _: 0.02,
        read_template_tokens(),
        limits=EngineLimits(max_num_seqs=RUNNING),
    )
    with (
        patched_api(),
        closing(SwitchedEngine(engine, ChatLoad(RUNNING, 1).draw, RUNNING)) as built,
    ):
        for _ in range(40):
            built.step(is_on=True)
        yield built


def tokens():
    """Output tokens on the registry."""
    name = "meridian_output_tokens_total"
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name
    )


def test_steps_without_telemetry_export_nothing_and_steps_with_it_all(switched):
    """The same requests go on; each step is timed in both processes."""
    for is_on in (True, False, True):
        before = tokens()
        seconds = switched.step(is_on=is_on)
        assert set(seconds) == {CORE, WIRE, SERVER}
        assert min(seconds.values()) > 0
        # Under async scheduling a step may bring the tokens of two.
        assert tokens() - before in ((RUNNING, 2 * RUNNING) if is_on else (0,))


def test_the_command_writes_its_figures(tmp_path, capsys):
    """Per process and in all, on and off, and the share of a step."""
    options = ["--running", "4", "--pairs", "6", "--out", str(tmp_path)]
    with pytest.raises(SystemExit) as ended:
        benches.main(["telemetry-micro", *options])
    assert ended.value.code == 0
    report = json.loads((tmp_path / "telemetry-micro.json").read_text())
    assert report["provenance"] == "measured-cpu"
    assert [row["process"] for row in report["rows"]] == [CORE, WIRE, SERVER, "all"]
    for row in report["rows"]:
        assert row["running"] == 4
        assert row["share_of_step"] == pytest.approx(row["extra_us"]["p50"] / row["step_us"])
    assert "telemetry" in capsys.readouterr().out
