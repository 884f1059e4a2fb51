"""A served process group beside a bound worker: everybody but the worker leaves its core."""

import os
import subprocess
import sys

import pytest

from meridian_patch.engine import cores

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"
BOUND = f"import os; os.sched_setaffinity(0, {{int(__import__('sys').argv[1])}}); {SLEEP}"

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)


def start(code, worker, group):
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(worker)], stdout=subprocess.PIPE, process_group=group
    )
    process.stdout.readline()
    return process


@pytest.fixture
def served():
    """A leader, another process of its group, and a worker that is bound."""
    worker = int(cores.worker_core())
    leader = start(SLEEP, worker, 0)
    group = [leader, start(SLEEP, worker, leader.pid), start(BOUND, worker, leader.pid)]
    yield worker, group
    for process in group:
        process.kill()
        process.communicate()


def test_everybody_leaves_but_the_worker(served):
    worker, group = served
    mine = os.sched_getaffinity(0)
    cores.clear_the_workers_core(group[0].pid, {cores.VARIABLE: str(worker)})
    others, others_too, bound = (os.sched_getaffinity(process.pid) for process in group)
    assert others == others_too == mine - {worker}
    assert bound == {worker}
    assert os.sched_getaffinity(0) == mine


@pytest.mark.parametrize("environment", [{}, {cores.VARIABLE: "nobind"}, {cores.VARIABLE: "0-1"}])
def test_nothing_happens_where_no_single_core_is_the_workers(served, environment):
    _, group = served
    cores.clear_the_workers_core(group[0].pid, environment)
    assert os.sched_getaffinity(group[0].pid) == os.sched_getaffinity(0)


def test_a_group_that_is_gone_is_no_error(served):
    worker, group = served
    for process in group:
        process.kill()
        process.wait()
    cores.clear_the_workers_core(group[0].pid, {cores.VARIABLE: str(worker)})
