"""`scripts/test`: which tests its lanes run, and that none fails unseen."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
# Stands in for .venv/bin/python: notes what it is asked for, and fails where it is told to.
PYTHON = """#!/bin/sh
echo "$*" >> calls
echo "said by $0: $*"
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
    pythons = [f"{venv}/bin/python" for venv in (".venv", ".venv-0.33.0")]
    for name in pythons:
        (tmp_path / name).parent.mkdir(parents=True)
    for name in pythons:
        (tmp_path / name).parent.parent.joinpath("meridian-setup").touch()
    shutil.copy(ROOT / "scripts" / "test", tmp_path / "scripts" / "test")
    for folder, text in (("unit", 'pytest.importorskip("vllm")'), ("property", "")):
        (tmp_path / "tests" / folder).mkdir(parents=True)
        (tmp_path / "tests" / folder / "test_asks.py").write_text(text)
    scripts = ("scripts/setup", "scripts/get_prometheus", "scripts/vllm_on_cpu")
    nothing = dict.fromkeys(scripts, "#!/bin/sh\n")
    for name, text in {**dict.fromkeys(pythons, PYTHON), **nothing}.items():
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
        ([], "not nightly", "not nightly", "tests/engine"),
        (["--all"], "", "", "tests/engine"),
        (
            ["--fast"],
            "not slow and not nightly",
            "not engine and not slow and not nightly",
            "tests/contract",
        ),
    ],
)
def test_every_test_is_in_one_lane(run, options, kernels, marked, beside):
    """One lane takes a folder, the other one all but that; runners of their own are for others."""
    code, said, asked = run(*options)
    assert code == 0
    wanted = [f"-m {kernels} tests/kernels", f"-m {marked} --ignore {beside}"]
    runners = "" if options else " --ignore=tests/engine/matrix/test_runners.py"
    assert asked == sorted([*wanted, f"-m {marked} {beside}{runners}"])
    assert "every gate passed" in said


RUNNERS = "tests/engine/matrix/test_runners.py"


def test_another_release_is_tested_in_its_own_environment(run):
    """With the engine tests of model runners, and without what reads no other release."""
    code, said, asked = run("--vllm", "0.33")
    others = f"-m not nightly tests/unit tests/property tests/simulation {RUNNERS}"
    assert code == 0
    assert asked == ["-m not nightly tests/contract", others]
    assert "said by .venv-0.33.0/bin/python: " in said
    assert "said by .venv/bin/python: " not in said
    _, _, asked = run("--vllm", "0.33", "--all")
    assert asked == ["-m  --ignore tests/engine", "-m  tests/engine", "-m  tests/kernels"]
    _, _, asked = run("--vllm", "0.33.0", "tests/unit/test_policy.py")
    assert asked == ["-m not nightly tests/unit/test_policy.py"]


def test_another_release_is_tested_beside_the_engines_of_this_one(run):
    """Behind all other tests, by the lane that is done first; where one fails it is named."""
    code, said, asked = run("--and-vllm", "0.33", fails="tests/contract")
    assert code == 1
    assert len(asked) == 6
    others = "tests/simulation tests/unit/test_asks.py"
    for chosen in ("tests/contract --ignore", f"{others}\n", f"{RUNNERS}::test_runner_v2\n"):
        quick = f"-m pytest -m not slow and not nightly -k not ([sync or -sync) {chosen}"
        assert f"said by .venv-0.33.0/bin/python: -P {quick}" in said
    (left,) = (call for call in asked if "--ignore tests/contract/" in call)
    paths = re.findall(r"--ignore (\S+)", left)
    assert len(paths) == 5
    assert all((ROOT / path).is_file() for path in paths)
    assert said.endswith("scripts/test: FAILED: pytest on vLLM 0.33.0, tests/contract\n")


def test_an_environment_that_cannot_be_made_is_a_failure(run, tmp_path):
    """What it said is shown, and each gate that needs it fails."""
    (tmp_path / "scripts" / "vllm_on_cpu").write_text("#!/bin/sh\necho no such release\nexit 3\n")
    code, said, _ = run("--and-vllm", "0.33")
    assert code == 1
    assert "no such release" in said
    assert "vLLM 0.33.0 for CPUs FAILED" in said


def test_the_engine_of_another_release_follows_the_engines_of_this_one(run):
    """In their own lane: no two engines run at once."""
    _, said, _ = run("--and-vllm", "0.33")
    after = said.partition("== pytest tests/engine passed")[2]
    assert after.partition("\n== pytest on vLLM 0.33.0, ")[2].startswith(RUNNERS)


def test_a_release_is_a_number(run, tmp_path):
    (tmp_path / "calls").touch()
    done = subprocess.run(
        [tmp_path / "scripts" / "test", "--vllm", "--fast"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "--vllm is followed by '--fast', expected a release such as 0.33" in done.stderr


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
    """Whichever lane ran them."""
    code, said, _ = run("-x", fails="-m")
    assert code == 1
    assert said.endswith("scripts/test: FAILED: ruff check, ruff format, pytest, mypy\n")
    _, said, _ = run(fails="m")
    named = said.rstrip().rpartition("scripts/test: FAILED: ")[2]
    for gate in ("all but tests/engine", "vLLM can be imported", "tests/engine", "mypy", "kernels"):
        assert gate in named
