"""A served process group: the engine has a core, and everybody else of the group leaves it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meridian_patch.replay import cpu_affinity

SLEEP = "import threading, time; [threading.Thread(target=time.sleep, args=(60,)).start()]"
UP = "print('up', flush=True); time.sleep(60)"
BOUND = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})"
NAMED = "open('/proc/self/comm', 'w').write('VLLM::EngineCore')"

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs Linux and two cores",
)


def start(group, engine, *before):
    code = "; ".join([*before, SLEEP, UP])
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(engine)], stdout=subprocess.PIPE, process_group=group
    )
    process.stdout.readline()
    return process


def threads(process):
    """Cores of the first thread, and of the others."""
    tasks = [int(task.name) for task in Path(f"/proc/{process.pid}/task").iterdir()]
    others = [os.sched_getaffinity(task) for task in tasks if task != process.pid]
    assert others
    return os.sched_getaffinity(process.pid), *others


@pytest.fixture
def engine():
    return max(os.sched_getaffinity(0))


@pytest.fixture
def environment(engine):
    return {cpu_affinity.VARIABLE: str(engine)}


@pytest.fixture
def group(engine):
    """Starts processes of one group; the first leads it."""
    started = []

    def add(*before):
        started.append(start(started[0].pid if started else 0, engine, *before))
        return started[-1]

    yield add
    for process in started:
        process.kill()
        process.communicate()


def test_the_engines_thread_has_its_core(group, engine, environment):
    """Not so its other threads, which talk to the API server, nor the API server."""
    server, core = group(), group(NAMED)
    mine = os.sched_getaffinity(0)
    cpu_affinity.separate(server.pid, environment)
    assert threads(server) == (mine - {engine}, mine - {engine})
    assert threads(core) == ({engine}, mine - {engine})
    assert os.sched_getaffinity(0) == mine


def test_a_worker_that_vllm_has_bound_is_the_engine(group, engine, environment):
    """As with a worker process of its own: EngineCore leaves that core too."""
    server, core, worker = group(), group(NAMED), group(BOUND)
    cpu_affinity.separate(server.pid, environment)
    others = os.sched_getaffinity(0) - {engine}
    assert threads(server) == threads(core) == (others, others)
    assert threads(worker) == ({engine}, {engine})


@pytest.mark.parametrize(
    "environment", [{}, {cpu_affinity.VARIABLE: "nobind"}, {cpu_affinity.VARIABLE: "0-1"}]
)
def test_nothing_happens_where_the_engine_has_no_core(group, environment):
    server = group(NAMED)
    cpu_affinity.separate(server.pid, environment)
    assert set(map(frozenset, threads(server))) == {frozenset(os.sched_getaffinity(0))}


def test_a_group_that_is_gone_is_no_error(group, environment):
    server = group()
    server.kill()
    server.wait()
    cpu_affinity.separate(server.pid, environment)
