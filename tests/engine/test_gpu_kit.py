"""The GPU kit as it travels: both folders, packed here and played from a scratch environment."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from meridian_patch.envs import environment

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "scripts" / "gpu_kit"
PARTS = {
    "one": {"kernel-tests", "kernel-bench"},
    "two": {"served", "sync-check", "close-lag"},
}


def run_kit(*arguments: str) -> str:
    run = subprocess.run(
        [str(KIT), *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=3600,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.timeout(7200)
def test_both_trips(tmp_path: Path) -> None:
    """Nothing is missing in the pack, and each part of both trips passes and has figures."""
    told = run_kit("prepare", "--out", str(tmp_path / "kit"))
    assert "none is missing" in told
    sizes = [float(size) for size in re.findall(r"(\d+\.\d) MiB with the checkout", told)]
    assert len(sizes) == 2
    assert max(sizes) <= 64
    told = run_kit("rehearse", "--kit", str(tmp_path / "kit"), "--out", str(tmp_path / "out"))
    assert "the product that ran: meridian-gpu-kit/product/meridian_patch/__init__.py" in told
    for trip, names in PARTS.items():
        data = json.loads((tmp_path / "out" / trip / "report.json").read_text())
        assert data["how"] == "rehearsed"
        assert data["surprises"]
        found = {part["name"]: part for part in data["parts"]}
        assert set(found) == names
        for part in found.values():
            assert part["verdict"] == "passed", part
            assert part["figures"], part
        files = [*(tmp_path / "out" / trip).iterdir()]
        assert len(files) <= 8
        assert sum(file.stat().st_size for file in files) < 16 * 2**20
    page = tmp_path / "page.md"
    folders = [str(tmp_path / "out" / trip) for trip in PARTS]
    run_kit("page", *folders, "--out", str(page))
    assert "### served: passed" in page.read_text()
