"""`scripts/get_prometheus`: what it fetches, and that it never fails a test run."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = ("prometheus", "promtool")
# Stands in for `dpkg-deb --fsys-tarfile`: the package's files as an archive.
UNPACK = 'cd "$(dirname "$2")" && mkdir -p usr/bin && touch {files} && tar -c ./usr'
TOOLS = ("bash", "cat", "chmod", "dirname", "id", "mkdir", "mktemp", "mv", "rm", "tail", "tar")


@pytest.fixture
def run(tmp_path):
    """``run(apt=script)``: exit code, output, and what is then in .venv/bin."""
    (tmp_path / "scripts").mkdir()
    here = tmp_path / ".venv" / "bin"
    here.mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "get_prometheus", tmp_path / "scripts")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in (*TOOLS, "timeout", "touch"):
        (programs / name).symlink_to(shutil.which(name))

    def command(apt=None, held=()):
        for name in held:
            (here / name).touch(0o755)
        files = " ".join(f"usr/bin/{name}" for name in PROGRAMS)
        if apt is not None:
            for name, text in {"apt-get": apt, "dpkg-deb": UNPACK.format(files=files)}.items():
                (programs / name).write_text(f"#!/bin/sh\n{text}\n")
                (programs / name).chmod(0o755)
        done = subprocess.run(
            [tmp_path / "scripts" / "get_prometheus"],
            env={"PATH": str(programs), "TMPDIR": os.fspath(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, sorted(path.name for path in here.iterdir())

    return command


def test_both_programs_come_from_the_package(run):
    assert run(apt='[ "$2" = download ] && touch prometheus_2.deb') == (0, "", list(PROGRAMS))


def test_what_is_there_is_left_alone(run):
    assert run(apt="echo asked", held=PROGRAMS) == (0, "", list(PROGRAMS))


def test_without_apt_it_says_what_is_skipped(run):
    code, said, held = run()
    assert (code, held) == (0, [])
    assert said.endswith(
        "there is no apt here; tests that need prometheus are skipped, or fail in CI\n"
    )


def test_a_mirror_that_does_not_answer_is_no_failure(run):
    code, said, held = run(apt="echo no route to the mirror; exit 100")
    assert (code, held) == (0, [])
    assert "apt cannot download prometheus (no route to the mirror)" in said
