"""The matrix's engines."""

import pytest
from matrix_checks import Pair
from matrix_plans import ALL_ON, matrix_job
from run_engine import PATCHED, STOCK, run_job
from tiny_models import make_tiny


@pytest.fixture(scope="session")
def tiny(demo_model, tmp_path_factory):
    """``tiny(kind)`` is the folder of a tiny model."""
    folder = tmp_path_factory.mktemp("models")
    return lambda kind: make_tiny(kind, demo_model, folder)


@pytest.fixture(scope="session")
def both_jobs(tmp_path_factory):
    """``both_jobs(name, stages, ...)`` runs stages stock and patched: stage name -> its pair."""

    def run(name, stages, env=None, limit_s=540, **job):
        results, logs = [], []
        for kind, activation in (("stock", STOCK), ("patched", PATCHED | ALL_ON)):
            folder = tmp_path_factory.mktemp(f"{name}_{kind}")
            job_of_kind = matrix_job(stages, activation | (env or {}), **job)
            results.append(run_job(job_of_kind, folder, limit_s))
            logs.append((folder / "log.txt").read_text(errors="replace"))
        stock, patched = (result["stages"] for result in results)
        return {name: Pair(stock[name], patched[name], logs[1]) for name in stock}

    return run
