"""Assigns cores to the processes of a vLLM server on a small CPU machine.

The model runs within EngineCore there, as on a single GPU, and EngineCore's thread has a core that
no other process of its server uses. API server and clients read each token of a step while the next
one is computed; on EngineCore's core they would lengthen its steps.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
# With more cores than these, the processes do not share a core.
_MOST_CORES = 4
# Load-bearing: vLLM names its processes, and Linux keeps 15 characters.
_ENGINE_CORE = "VLLM::EngineCor"


def environment() -> dict[str, str]:
    """Variables of a server on a CPU: no worker process, and the last core for the engine.

    As a process of its own the worker would wait for EngineCore by spinning, and EngineCore for it.
    """
    # Load-bearing: the CPU platform keeps the worker within EngineCore under the first of these,
    # and then binds no thread by the second.
    cores = sorted(os.sched_getaffinity(0))
    engine = str(cores[-1]) if 1 < len(cores) <= _MOST_CORES else "nobind"
    return {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", VARIABLE: engine}


def keep_to_the_engines_core(environment: Mapping[str, str]) -> None:
    """Bind this process, an engine without a server, to the engine's core."""
    own = _own(environment)
    if own:
        os.sched_setaffinity(0, own)


def separate(group: int, environment: Mapping[str, str]) -> None:
    """Bind the engine of a process group to its core, and all other processes to the others.

    The engine is the process that vLLM has bound to that core already, such as a worker; otherwise
    EngineCore's first thread.

    Args:
        group: of a server that is up.
        environment: of the server.
    """
    own = _own(environment)
    if not own:
        return
    others = os.sched_getaffinity(0) - own
    processes = dict(_processes(group))
    bound = [process for process, tasks in processes.items() if own in map(_cores, tasks)]
    for process, tasks in processes.items():
        if process in bound:
            continue
        is_engine = not bound and _name(process) == _ENGINE_CORE
        for task in tasks:
            _bind(task, own if is_engine and task == process else others)


def _own(environment: Mapping[str, str]) -> set[int]:
    """The engine's core; empty where none is reserved for it."""
    engine = environment.get(VARIABLE, "")
    return {int(engine)} & os.sched_getaffinity(0) if engine.isdecimal() else set()


def _processes(group: int) -> Iterator[tuple[int, list[int]]]:
    """The processes of a group, and the threads of each."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(folder.name)) == group:
                yield int(folder.name), [int(task.name) for task in (folder / "task").iterdir()]
        except OSError:
            continue


def _name(process: int) -> str:
    try:
        return Path(f"/proc/{process}/comm").read_text().strip()
    except OSError:
        return ""


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
