"""Child processes that begin with vLLM imported, which takes a small engine most of its start.

They are forked from a process that has imported vLLM and nothing of ours, and then run a program
as a new interpreter would: with its arguments, environment, folder and log. The first process that
the program spawns begins in the same way. What is read from the environment while vLLM is imported
needs an interpreter of its own.
"""

import atexit
import fcntl
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path

# What vLLM has imported before it loads plug-ins; classes made from others would not be ours.
MODULES = [
    "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_model_runner",
]
MOST_FILES = 64
READ_BY_IMPORTS = ("OMP_NUM_THREADS", "HF_HUB_OFFLINE", "VLLM_NO_USAGE_STATS")
# Two servers may be started at once, by threads that share one environment.
_STARTING = threading.Lock()


class WarmProcess:
    """A running program; its methods are those of ``subprocess.Popen``.

    Args:
        command: as for a new interpreter: ``[sys.executable, "-P", "-m", MODULE, ...]`` or
            ``[sys.executable, "-P", SCRIPT, ...]``.
        env: its whole environment.
        log: takes what it prints.
        folder: where it works.
    """

    def __init__(self, command: list[str], env: dict[str, str], log: Path, folder: Path) -> None:
        assert command[:2] == [sys.executable, "-P"]
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(MODULES)
        given = (command[2:], env, str(log), str(folder))
        self._process = context.Process(target=_run, args=given)
        with _STARTING:
            # Read where PyTorch and the hub's client are loaded, in the process that all begin in.
            before = {name: os.environ.get(name) for name in READ_BY_IMPORTS}  # noqa: TID251
            _set({name: env.get(name) for name in READ_BY_IMPORTS})
            try:
                self._process.start()
            finally:
                _set(before)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("the program", timeout)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _run(program: list[str], env: dict[str, str], log: str, folder: str) -> None:
    sink = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for stream in (1, 2):
        os.dup2(sink, stream)
    os.close(sink)
    os.chdir(folder)
    _set_environment(env)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    own = filter(None, env.get("PYTHONPATH", "").split(":"))
    roots = (sys.base_prefix, sys.prefix)
    sys.path[:] = [*own, *(each for each in sys.path if each.startswith(roots))]
    _keep_a_spare()
    _end_with(lambda: _run_as_main(program))


def _run_as_main(program: list[str]) -> None:
    if program[0] == "-m":
        sys.argv = ["", *program[2:]]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _keep_a_spare() -> None:
    """Fork a process that becomes the first one spawned here, which would import vLLM again."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        ours.close()
        _end_with(lambda: _become_spawned(theirs))
    theirs.close()
    spawn = util.spawnv_passfds

    def hand_over(path: str, args: list[str], files: list[int]) -> int:
        if "--multiprocessing-fork" not in args:
            return spawn(path, args, files)
        util.spawnv_passfds = spawn
        socket.send_fds(ours, [b"."], files)
        task = {"env": dict(os.environ), "files": files, "code": args[args.index("-c") + 1]}  # noqa: TID251
        ours.sendall(json.dumps(task).encode())
        ours.close()
        return pid

    util.spawnv_passfds = hand_over


def _become_spawned(theirs: socket.socket) -> None:
    _, files, *_ = socket.recv_fds(theirs, 1, MOST_FILES)
    with theirs.makefile("r") as stream:
        text = stream.read()
    theirs.close()
    # The program has ended, or spawned nothing.
    if not text:
        return
    task = json.loads(text)
    _set_environment(task["env"])
    _renumber(files, task["files"])
    sys.argv = ["-c", "--multiprocessing-fork"]
    exec(task["code"], {"__name__": "__main__"})


def _renumber(files: list[int], numbers: list[int]) -> None:
    """Give open files these numbers; first others, as one may stand where another belongs."""
    above = max([*files, *numbers], default=0) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _set(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)  # noqa: TID251
        else:
            os.environ[name] = value  # noqa: TID251


def _set_environment(env: dict[str, str]) -> None:
    os.environ.clear()  # noqa: TID251 - as a new interpreter has it
    os.environ.update(env)  # noqa: TID251


def _end_with(run: Callable[[], None]) -> None:
    """End this process as an interpreter does, which one of multiprocessing does not by itself."""
    code = 1
    try:
        run()
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
