"""``bench serve --emulate``: its servers, its provenance, and figures that do not count."""

import argparse
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from meridian_patch.bench.machine import Machine
from meridian_patch.bench.served import plan, plots
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.command import add_serve
from meridian_patch.bench.served.fidelity import Fidelity
from meridian_patch.bench.served.plan import plan_comparison
from meridian_patch.bench.served.report import (
    Origin,
    emulation_in_words,
    headline_table,
    terminal_table,
    write_report,
)
from meridian_patch.bench.served.server import ServerSettings
from meridian_patch.bench.served.summary import ArmRun, SeedRun, is_certified, summarise
from meridian_patch.bench.served.workload import ServedRequest
from meridian_patch.emulation import device as devices
from meridian_patch.emulation.device import load_device
from meridian_patch.emulation.options import WORKER
from meridian_patch.errors import BenchError, ConfigError

DEVICE = load_device("h100-32b-dense")
END = (257,)


def arm(name: str, late_s: float, overslept_s: float = 0.0) -> ArmRun:
    """One request on a device that ran for 10 s."""
    request = ServedRequest("1", 0.0, (), "", 64)
    record = RequestRecord(request, 0.0, [10, 257, 54, 259], [0.1, 0.2, 0.3, 0.4], "6", "stop")
    counters = {
        "emulated_prefill_device_s": 4.0,
        "emulated_prefill_late_s": late_s,
        "emulated_decode_device_s": 6.0,
        "emulated_decode_late_s": 0.0,
        "emulated_decode_overslept_s": overslept_s,
    }
    return ArmRun(name, [SeedRun(1, END, [record], counters, is_complete=True)])


def origin() -> Origin:
    settings = ServerSettings(Path("/model"), block_size=32, device=DEVICE)
    machine = Machine("a CPU", 2, 8.0, 0.1, "3.11", "vllm 1", emulates=str(DEVICE))
    return Origin("2026-01-02", "bench", machine, settings, "One.")


@pytest.fixture(autouse=True)
def undrawn(monkeypatch):
    """Leaves plots out of pages: to draw one takes a second."""
    for plot in ("requests_over_time", "gap_timeline", "distributions"):
        monkeypatch.setattr(plots, plot, lambda *_: b"")
    monkeypatch.setattr(devices, "_GPU_FILES", ())


def test_every_place_says_emulated(tmp_path):
    """Page and data name the device and how its cost model came about; nothing was measured."""
    runs = [arm("stock", 0.01), arm("patched", 0.0, 0.05)]
    fidelity = [Fidelity("stock", "tokens_per_s", 101.0, 100.0, 0.02)]
    page = write_report(tmp_path, runs, origin(), fidelity).read_text()
    data = json.loads((tmp_path / "results.json").read_text())
    assert data["how"] == "emulated h100-32b-dense (derived)"
    assert data["settings"]["device"]["fixed_s"] == DEVICE.cost.fixed_s
    assert data["is_certified"] is True
    assert data["fidelity"][0]["error"] == pytest.approx(0.01)
    assert data["arms"]["patched"]["by_seed"]["1"]["late_share"] == pytest.approx(0.005)
    assert "emulated h100-32b-dense (derived)" in page
    assert "Emulated device, certified" in page
    assert "stock 0.10%, patched 0.50%" in page
    assert "measured" not in page.replace("is measured where", "")


def test_figures_of_a_machine_that_is_too_slow_are_grey(tmp_path):
    """One arm is enough, and the page warns."""
    runs = [arm("stock", 0.01), arm("patched", 0.12)]
    arms = [summarise(run) for run in runs]
    assert not is_certified(arms)
    assert "not certified: this machine is too slow for this device" in emulation_in_words(arms)
    for table in (terminal_table, headline_table):
        assert table(arms, "").style == "bright_black"
        assert table(arms[:1], "").style == ""
    page = write_report(tmp_path, runs, origin()).read_text()
    assert '<p class="warn">Emulated device, not certified' in page
    assert page.count('<div class="wide same">') == 2
    assert json.loads((tmp_path / "results.json").read_text())["is_certified"] is False


def test_a_coarse_device_has_no_stalls_to_count():
    """Every gap is one of several tokens; the worst one still stands."""
    run = arm("stock", 0.0)
    assert run.seeds[0].figures()["answer_stalls"] == 0
    figures = replace(run.seeds[0], tokens=8).figures()
    assert (figures["answer_stalls"], figures["answer_pauses_s"]) == (None, None)
    assert figures["answer_gap_max_s"] == pytest.approx(0.1)


def test_without_a_device_nothing_is_said_of_one(tmp_path):
    plain = origin()
    machine = replace(plain.machine, emulates=None)
    plain = replace(plain, machine=machine, settings=replace(plain.settings, device=None))
    runs = [arm("stock", 0.0)]
    runs[0].seeds[0].counters.clear()
    page = write_report(tmp_path, runs, plain).read_text()
    assert "mulated" not in page
    assert "measured-cpu" in page
    assert json.loads((tmp_path / "results.json").read_text())["is_certified"] is None


def planned(monkeypatch, *options: str):
    monkeypatch.setattr(plan, "accelerator_name", lambda: None)
    serve = add_serve(argparse.ArgumentParser().add_subparsers())
    parsed = serve.parse_args([*options, "--pairs", "1", "--requests", "2"])
    return plan_comparison(parsed, "serve", Console(file=io.StringIO()))


def test_servers_run_on_the_device(monkeypatch):
    """Its worker and its pool, unless one is given; one token may stand for several."""
    comparison = planned(monkeypatch, "--emulate", "h100-32b-dense", "--emulate-tokens", "2")
    command = comparison.settings.arguments(8000)
    assert command[3] == "meridian_patch.emulation.server"
    assert command[command.index("--worker-cls") + 1] == WORKER
    assert command[command.index("--num-gpu-blocks-override") + 1] == str(140_000 // 32 + 1)
    assert command[command.index("--max-num-seqs") + 1] == "16"
    given = planned(monkeypatch, "--emulate", "h100-32b-dense", "--blocks", "96")
    assert given.settings.arguments(8000).count("--num-gpu-blocks-override") == 1
    assert given.settings.kv_blocks == 96


def test_wrong_options_are_one_sentence(monkeypatch, tmp_path):
    with pytest.raises(BenchError, match="unknown cost model 'h300'"):
        planned(monkeypatch, "--emulate", "h300")
    with pytest.raises(BenchError, match="--fidelity replays what emulated servers"):
        planned(monkeypatch, "--fidelity")
    with pytest.raises(BenchError, match="give theirs with --blocks"):
        planned(monkeypatch, "--emulate", "h100-32b-dense", "--arms", "stock,ample")
    gpu = tmp_path / "nvidiactl"
    gpu.touch()
    monkeypatch.setattr(devices, "_GPU_FILES", (gpu,))
    with pytest.raises(ConfigError, match="has a GPU"):
        planned(monkeypatch, "--emulate", "h100-32b-dense")
    planned(monkeypatch, "--emulate", "h100-32b-dense", "--emulate-beside-gpu")
