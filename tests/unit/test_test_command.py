"""`scripts/test`: which tests its lanes run, and that none fails unseen."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Stands in for .venv/bin/python: notes what it is asked for, and fails where it is told to.
PYTHON = """#!/bin/sh
echo "$*" >> calls
echo "said by: $*"
case "$*" in
*"${FAILS:-nothing}"*) exit 1 ;;
esac
"""


@pytest.fixture
def run(tmp_path):
    """``run(*options, fails=text)``: exit code, output, and the calls of pytest.

    A call fails where ``text`` is in its arguments.
    """
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    nothing = dict.fromkeys(("scripts/setup", "scripts/get_prometheus"), "#!/bin/sh\n")
    for name, text in {".venv/bin/python": PYTHON, **nothing}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def command(*options, fails="nothing"):
        calls = tmp_path / "calls"
        calls.unlink(missing_ok=True)
        done = subprocess.run(
            [tmp_path / "scripts" / "test", *options],
            env=os.environ | {"FAILS": fails},  # noqa: TID251 - handed on
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        asked = [line.partition("-m pytest ")[2] for line in calls.read_text().splitlines()]
        return done.returncode, done.stdout, sorted(filter(None, asked))

    return command


@pytest.mark.parametrize(
    ("options", "kernels", "marked", "beside"),
    [
        ([], "", "not nightly", "tests/engine"),
        (["--all"], "", "", "tests/engine"),
        (["--fast"], "not slow", "not engine and not slow and not nightly", "tests/contract"),
    ],
)
def test_every_test_is_in_one_lane(run, options, kernels, marked, beside):
    """One lane takes a folder, the other one all but that."""
    code, said, asked = run(*options)
    assert code == 0
    wanted = [f"-m {kernels} tests/kernels", f"-m {marked} --ignore {beside}"]
    assert asked == sorted([*wanted, f"-m {marked} {beside}"])
    assert "every gate passed" in said


def test_arguments_go_to_pytest_as_they_are(run):
    """Types are checked beside it."""
    _, said, asked = run("tests/unit/test_policy.py", "-x")
    assert "== mypy passed" in said
    assert asked == ["-m not nightly tests/unit/test_policy.py -x"]
    _, _, asked = run("--pure", "-x")
    [pure] = asked
    assert pure.endswith("-p without_vllm tests/unit tests/property -x")


def test_properties_and_benches_are_tested_beside_the_other_unit_tests(run):
    """Neither lane has vLLM, and types are checked once."""
    code, said, asked = run("--pure")
    assert code == 0
    chosen = [each.partition("-p without_vllm ")[2] for each in asked]
    benches = "tests/unit/test_bench_*"
    assert chosen == [f"tests/property {benches}.py", f"tests/unit --ignore-glob {benches}"]
    assert said.count("== mypy passed") == 1
    _, said, asked = run("--pure", fails="tests/property")
    assert len(asked) == 2
    assert said.endswith("scripts/test: FAILED: pytest tests/property\n")


@pytest.mark.parametrize(
    ("fails", "gate"),
    [
        ("ruff check", "ruff check"),
        ("mypy", "mypy"),
        ("tests/kernels", "pytest tests/kernels"),
        ("--ignore tests/engine", "pytest, all but tests/engine"),
        ("not nightly tests/engine", "pytest tests/engine"),
        ("import vllm", "vLLM can be imported"),
    ],
)
def test_a_gate_that_fails_is_named(run, fails, gate):
    """In either lane; all others are run, and what they print is shown."""
    code, said, asked = run(fails=fails)
    assert code == 1
    assert said.count("FAILED in") == 1
    assert f"scripts/test: FAILED: {gate}\n" in said
    assert len(asked) == 3
    assert all(f"-m pytest {each}" in said for each in asked)


def test_failures_of_both_lanes_are_named(run):
    """First those of the first lane."""
    code, said, _ = run("-x", fails="-m")
    assert code == 1
    assert said.endswith("scripts/test: FAILED: ruff check, ruff format, pytest, mypy\n")
    code, said, _ = run(fails="m")
    lanes = "pytest, all but tests/engine, vLLM can be imported, pytest tests/engine\n"
    assert said.endswith(lanes)
