"""The rehearsal of scripts/gpu_suite: the same code on real servers, with tiny sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meridian_patch.envs import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
SUITE = ROOT / "scripts" / "lab" / "gpu_suite" / "command.py"
COMMAND = (sys.executable, "-P", str(SUITE), "--rehearse")


@pytest.mark.timeout(900)
def test_rehearsal(tmp_path: Path) -> None:
    """Every part passes and has figures; the report is one page and one file of data."""
    run = subprocess.run(
        [*COMMAND, "--out", str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=840,
        # A busy machine must not make a policy step count as slow and run as stock.
        env={**environment(), "MERIDIAN_PATCH_SET_POLICY__TIME_BUDGET_US": "100000"},
    )
    assert run.returncode == 0, run.stdout + run.stderr
    data = json.loads((tmp_path / "report.json").read_text())
    assert data["how"] == "rehearsed"
    verdicts = {part["name"]: (part["verdict"], part["reason"]) for part in data["parts"]}
    assert {verdict for verdict, _ in verdicts.values()} == {"passed"}, verdicts
    figures = {
        part["name"]: {figure["name"]: figure["spread"] for figure in part["figures"]}
        for part in data["parts"]
    }
    assert all(figures.values())
    # Without a batch nothing may change a text.
    alone = [
        figures["defaults"][f"texts {word} stock's, alone"]
        for word in ("compared with", "equal to")
    ]
    assert alone[0] == alone[1]
    assert "tokens per second, 4 rows, default over off" in figures["observing"]
    assert figures["sync-check"]["probes measured, a gap of 1"]["median"] > 0
    assert any(name.endswith("one request") for name in figures["close-lag"])
    assert "tokens_per_s, busy, stock-again over stock" in figures["served"]
    assert "tokens_per_s, busy, patched over stock" in figures["served"]
    assert figures["cost-model"]["token_s"]["median"] > 0
    page = (tmp_path / "index.html").read_text()
    assert "probes measured, a gap of 1" in page
