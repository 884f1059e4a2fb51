"""Who runs on which core when vLLM serves on a small CPU machine.

Worker and EngineCore wait for each other by spinning. On one core both crawl: steps take up to
twice as long, in some processes and not in others. So the worker gets a core that nobody else of
its server uses.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def worker_core() -> str:
    """Value of ``VLLM_CPU_OMP_THREADS_BIND``: the last core, where there are several."""
    cores = sorted(os.sched_getaffinity(0))
    return str(cores[-1]) if len(cores) > 1 else "nobind"


def leave_the_workers_core(environment: Mapping[str, str]) -> None:
    """This process, and what it starts from here on, keep off the core of the worker."""
    others = _others(environment)
    if others:
        os.sched_setaffinity(0, others)


def clear_the_workers_core(group: int, environment: Mapping[str, str]) -> None:
    """All of a process group keep off the core of its worker, but for the worker.

    Load-bearing: the worker's threads are those that vLLM has bound to that very core.

    Args:
        group: of a server that is up.
        environment: of the server.
    """
    others = _others(environment)
    if not others:
        return
    own = os.sched_getaffinity(0) - others
    for tasks in _processes(group):
        bound = {task: _cores(task) for task in tasks}
        if own in bound.values():
            continue
        for task, cores in bound.items():
            if cores:
                _bind(task, others)


def _others(environment: Mapping[str, str]) -> set[int]:
    worker = environment.get(VARIABLE, "")
    return os.sched_getaffinity(0) - {int(worker)} if worker.isdecimal() else set()


def _processes(group: int) -> Iterator[list[int]]:
    """The threads of each process of a group."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                yield [int(task.name) for task in (folder / "task").iterdir()]
        except OSError:
            continue


def _cores(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except OSError:
        return set()


def _bind(task: int, cores: set[int]) -> None:
    try:
        os.sched_setaffinity(task, cores)
    except OSError:
        return
