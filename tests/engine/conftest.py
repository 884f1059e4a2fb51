"""One run of each engine job for all tests here, and the record of the compatibility page."""

import sys
from dataclasses import replace

import pytest
from engine_plans import NOOP, PATIENT, PROBING, v1_job, v2_job
from matrix_record import INACTIVE, NOT_RUN, REFUSED, WORKS, CellResult, write
from rank_runs import RankArms
from run_engine import PATCHED, STOCK, Job, run_job
from run_server import Server
from trace_collector import TraceCollector


class Stages(dict):
    """What an engine did, by stage; the synchronous one runs when a test asks for it."""

    def __init__(self, job: Job, folders) -> None:
        self._late = [stage for stage in job.stages if stage["name"] == "sync"]
        soon = [stage for stage in job.stages if stage["name"] != "sync"]
        self._job, self._folders = job, folders
        super().__init__(self._run(soon))

    def __missing__(self, name: str) -> dict:
        self.update(self._run(self._late))
        return dict.__getitem__(self, name)

    def _run(self, stages: list[dict]) -> dict:
        return run_job(replace(self._job, stages=stages), self._folders.mktemp("v1"))["stages"]


@pytest.fixture(scope="session")
def v1_stock(demo_model, tmp_path_factory):
    return {"stages": Stages(v1_job(demo_model, STOCK), tmp_path_factory)}


@pytest.fixture(scope="session")
def v1_patched(demo_model, tmp_path_factory):
    job = v1_job(demo_model, PATCHED | PATIENT | PROBING)
    return {"stages": Stages(job, tmp_path_factory)}


@pytest.fixture(scope="session")
def v1_noop(demo_model, tmp_path_factory):
    job = v1_job(demo_model, PATCHED | PATIENT | NOOP, pressure_only=True)
    return {"stages": Stages(job, tmp_path_factory)}


@pytest.fixture(scope="session")
def v2_stock(demo_model, tmp_path_factory):
    return run_job(v2_job(demo_model, STOCK), tmp_path_factory.mktemp("v2_stock"))


@pytest.fixture(scope="session")
def v2_patched(demo_model, tmp_path_factory):
    job = v2_job(demo_model, PATCHED | PATIENT | PROBING)
    return run_job(job, tmp_path_factory.mktemp("v2_patched"))


@pytest.fixture(scope="session")
def served(demo_model, tmp_path_factory):
    """A patched server of the tiny reasoner, by the name of m."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(demo_model), "--served-model-name", "m"]
    command += ["--enable-per-request-metrics"]
    command += ["--middleware", "meridian_patch.telemetry.load_report.LoadReport"]
    with Server(command, PATCHED, tmp_path_factory.mktemp("served")) as started:
        yield started


@pytest.fixture(scope="session")
def collector():
    """Takes the spans of `traced`."""
    with TraceCollector() as listening:
        yield listening


@pytest.fixture(scope="session")
def traced(demo_model, collector, tmp_path_factory):
    """A server that exports spans, and streams thoughts in pieces of 8 tokens."""
    command = [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(demo_model), "--served-model-name", "m"]
    command += ["--reasoning-parser", "qwen3", "--otlp-traces-endpoint", collector.endpoint]
    env = PATCHED | collector.env | {"MERIDIAN_PATCH_SET_RESPONSES__THINK_STREAM_INTERVAL": "8"}
    with Server(command, env, tmp_path_factory.mktemp("traced")) as started:
        yield started


@pytest.fixture(scope="session")
def rank_arms(demo_model, tmp_path_factory):
    """Two ranks in lock step, by the name of an arm."""
    return RankArms(demo_model, tmp_path_factory.mktemp)


class Cell:
    """Records what a test has shown of a cell; called last, when all was asserted."""

    def __init__(self, test: str) -> None:
        self._test = test

    def works(self, name, note, probes):
        write(name, CellResult(WORKS, probes, note, self._test))

    def is_inactive(self, name, notice, probes="none"):
        write(name, CellResult(INACTIVE, probes, notice, self._test))

    def is_refused(self, name, reason):
        write(name, CellResult(REFUSED, "none", reason, self._test))

    def cannot_run(self, name, reason):
        write(name, CellResult(NOT_RUN, "none", reason, self._test))


@pytest.fixture
def cell(request):
    path = request.node.path.relative_to(request.config.rootpath)
    return Cell(f"{path}::{request.node.originalname}")
