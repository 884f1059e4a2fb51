"""`scripts/ci_packages`: what it installs, and that it never fails continuous integration."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
DPKG_QUERY = """
for last; do :; done
[ "$last" = held ] && echo 'install ok installed'
"""


@pytest.fixture
def run(tmp_path):
    """``run(*packages, user=id, apt=exit code)``: exit code, output, and the calls of apt-get."""

    def command(*packages, user=0, apt=0):
        calls = tmp_path / "calls"
        calls.write_text("")
        programs = {
            "id": f"echo {user}",
            "dpkg-query": DPKG_QUERY,
            "apt-get": f'echo "$*" >> {calls}; echo why it failed; exit {apt}',
        }
        for name, text in programs.items():
            (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / name).chmod(0o755)
        path = f"{tmp_path}:{os.environ['PATH']}"  # noqa: TID251 - handed on
        done = subprocess.run(
            [ROOT / "scripts" / "ci_packages", *packages],
            env={"PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        return done.returncode, done.stdout, calls.read_text().splitlines()

    return command


def test_only_what_is_missing_is_installed(run):
    code, said, calls = run("held", "browser", "database")
    assert code == 0
    assert calls[0].endswith(" update")
    assert calls[1].endswith(" install --no-install-recommends browser database")
    assert "installed browser database in" in said


def test_nothing_is_asked_for_where_all_is_installed(run):
    assert run("held") == (0, "", [])


def test_without_root_it_says_what_is_skipped(run):
    code, said, calls = run("browser", user=1000)
    assert (code, calls) == (0, [])
    assert "tests that need browser are skipped" in said


def test_a_mirror_that_does_not_answer_is_no_failure(run):
    code, said, _ = run("browser", apt=100)
    assert code == 0
    assert "why it failed" in said
    assert "browser cannot be installed; tests that need them are skipped" in said
