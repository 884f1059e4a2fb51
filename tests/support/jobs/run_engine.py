"""Starts engine jobs as child processes and reads what they report."""

import json
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from warm_process import WarmProcess

from meridian_patch.envs import environment

JOBS = Path(__file__).parent
LOG_TAIL_LINES = 40
# Active and inactive, as environments.
PATCHED = {"VLLM_PLUGINS": "meridian_patch"}
STOCK = {"VLLM_PLUGINS": ""}


@dataclass(frozen=True)
class Job:
    """What one child process does.

    Attributes:
        stages: one engine each: ``{"name", "engine": LLM's arguments, "runs": [...]}``.
        env: added to a clean environment; None takes a variable out of it.
        import_meridian_patch: import the package before vLLM, as a user's script would.
        model_runner_v2: run Model Runner V2, without CUDA its kernels in Triton's interpreter.
        allow_async: let ``async_scheduling=True`` stand on the CPU.
        in_process: keep the engine core in the child, where its scheduler can be watched.
        is_async: run the asynchronous engine, its cores in processes of their own, with streaming
            clients (see ``async_job.py``).
        ray_workers: start Ray with places for so many.
        share_experts: let data-parallel ranks of a mixture of experts work together on the CPU.
    """

    stages: list[dict]
    env: dict[str, str | None] = field(default_factory=dict)
    import_meridian_patch: bool = False
    model_runner_v2: bool = False
    allow_async: bool = False
    in_process: bool = True
    is_async: bool = False
    share_experts: bool = False
    ray_workers: int = 0

    @property
    def is_warm(self) -> bool:
        """Whether vLLM may be imported before the child has its environment."""
        return not (self.import_meridian_patch or self.model_runner_v2 or self.ray_workers)


def run_job(job: Job, folder: Path, limit_s: float = 400) -> dict:
    """Run the job to its end.

    Returns:
        The job's result (see ``engine_job.py``).

    Raises:
        AssertionError: the child failed; the message holds the end of its log.
    """
    folder.mkdir(parents=True, exist_ok=True)
    spec, result, log = (folder / name for name in ("job.json", "result.json", "log.txt"))
    env = job_environment(job, folder)
    spec.write_text(
        json.dumps(
            {
                "stages": job.stages,
                "import_meridian_patch": job.import_meridian_patch,
                "interpret_triton": job.model_runner_v2,
                "allow_async": job.allow_async,
                "share_experts": job.share_experts,
                "ray_workers": job.ray_workers,
                "side_port": _free_port() if job.is_async else None,
                "status_dir": env["MERIDIAN_PATCH_STATUS_DIR"],
            }
        )
    )
    script = JOBS / ("async_job.py" if job.is_async else "engine_job.py")
    command = [sys.executable, "-P", str(script), str(spec), str(result)]
    code = (_run_warm if job.is_warm else _run_cold)(command, env, log, folder, limit_s)
    assert code == 0, f"the engine job failed; the end of {log}:\n{log_tail(log)}"
    return json.loads(result.read_text())


def _run_warm(
    command: list[str], env: dict[str, str], log: Path, folder: Path, limit_s: float
) -> int:
    process = WarmProcess(command, env, log, folder)
    try:
        return process.wait(limit_s)
    except BaseException:
        # Also where the test is interrupted: multiprocessing waits for it at the end.
        process.send_signal(signal.SIGKILL)
        process.wait()
        raise


def _run_cold(
    command: list[str], env: dict[str, str], log: Path, folder: Path, limit_s: float
) -> int:
    with log.open("wb") as sink:
        return subprocess.run(
            command, env=env, stdout=sink, stderr=sink, timeout=limit_s, check=False, cwd=folder
        ).returncode


def job_environment(job: Job, folder: Path) -> dict[str, str]:
    """The child's environment."""
    # On CUDA vLLM would choose Model Runner V2 by itself.
    runner = {"VLLM_USE_V2_MODEL_RUNNER": "1" if job.model_runner_v2 else "0"}
    wanted = clean_environment(folder) | runner | job.env
    env = {name: value for name, value in wanted.items() if value is not None}
    env["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if job.in_process and not job.is_async else "1"
    if job.model_runner_v2 and not torch.cuda.is_available():
        env["TRITON_INTERPRET"] = "1"
    return env


def clean_environment(folder: Path) -> dict[str, str]:
    """This process's environment without activation, with what small CPU engines need.

    Importing ``meridian_patch`` here marked this process's own environment.
    """
    kept = {
        name: value
        for name, value in environment().items()
        if not name.startswith("MERIDIAN_PATCH") and name != "VLLM_PLUGINS"
    }
    return kept | {
        "MERIDIAN_PATCH_STATUS_DIR": str(folder / "status"),
        "PYTHONPATH": str(JOBS),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads of a second OpenMP worker spin against whatever else runs: 40 times slower here.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def log_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])
