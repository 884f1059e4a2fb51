"""scripts/gpu_kit without a GPU: the imports it follows, its refusals, the page."""

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "scripts" / "lab" / "gpu_kit"


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(KIT)


def write_package(site: Path) -> None:
    files = {
        "one/__init__.py": "from typing import TYPE_CHECKING\nfrom . import inner\n"
        "if TYPE_CHECKING:\n    import only_for_types\n",
        "one/inner.py": "import json, absent.deep\nfrom ..one.lazy import late\n"
        "try:\n    import optional\nexcept ImportError:\n    optional = None\n"
        "if json:\n    import sometimes\n",
        "one/lazy.py": "def late():\n    import never_run\n",
        "compiled.abi3.so": "",
        "space/leaf.py": "import compiled, torch\n",
    }
    for name, text in files.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text)


def test_missing_imports_are_named(tmp_path: Path) -> None:
    from imports import walk

    write_package(tmp_path)
    found = walk(["one", "space.leaf"], [tmp_path], frozenset({"torch"}))
    assert found.missing == {"absent": "one.inner"}
    assert found.conditional == {"sometimes": "one.inner"}
    assert found.image == {"torch"}
    assert {"one.inner", "one.lazy", "compiled", "space.leaf"} <= found.seen


def test_commands_fit() -> None:
    from prepare import command_of

    assert command_of("one", Path(".gpu")) == 'python3 -P .gpu/one/trip.py one "$OUT"'


def test_trip_two_needs_what_trip_one_left(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-P", str(KIT / "trip.py"), "two", str(tmp_path / "out"), "--rehearse"],
        env={"HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    assert "torch finds no GPU" in run.stdout
    [line] = run.stderr.splitlines()
    assert "what trip one leaves is not here" in line
    assert "Run trip one, then trip two right behind it" in line


def test_a_damaged_archive_is_one_sentence(tmp_path: Path) -> None:
    from trip import unpack_archive

    archive = tmp_path / "a.tar.xz"
    with tarfile.open(archive, "w:xz") as tar:
        tar.add(KIT / "trip.py", "trip.py")
    data = archive.read_bytes()
    archive.write_bytes(data[: len(data) // 2])
    with pytest.raises((EOFError, tarfile.TarError)):
        unpack_archive(archive, tmp_path / "to")


def report_of(verdict: str) -> dict:
    figure = {"name": "step", "unit": "s", "spread": {"median": 1, "low": 1, "high": 2, "count": 3}}
    part = {"name": "served", "shows": "it serves", "verdict": verdict, "seconds": 3.0}
    part |= {"reason": "one line\nand <more>", "figures": [figure], "notes": ["a note"]}
    return {
        "how": "rehearsed",
        "date": "2030-01-01T00:00:00",
        "machine": "m",
        "model": "tiny",
        "commit": "abc",
        "command": "gpu_suite",
        "versions": {"torch": "2"},
        "gpus": [],
        "surprises": ["torch finds no GPU"],
        "parts": [part],
    }


def test_an_early_end_is_a_page_too(tmp_path: Path) -> None:
    from page import lines_of

    text = "\n".join(lines_of([json.loads(json.dumps(report_of("not run")))]))
    assert "### served: not run" in text
    assert "| step | 1 | 1 | 2 | 3 | s |" in text
    assert "- surprise: torch finds no GPU" in text
    assert "more>" not in text
