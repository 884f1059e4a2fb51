"""Finds the GPUs of this machine without importing torch."""

import shutil
import subprocess
from pathlib import Path

_LIMIT_S = 20


def find_gpus() -> list[str]:
    """Names of the GPUs; of AMD's only that there is one."""
    program = shutil.which("nvidia-smi")
    if program:
        command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
        try:
            run = subprocess.run(
                command, check=False, capture_output=True, text=True, timeout=_LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return []
        if run.returncode == 0:
            return [line.strip() for line in run.stdout.splitlines() if line.strip()]
    # Load-bearing: the device node of AMD's compute driver.
    return ["AMD GPU (/dev/kfd)"] if Path("/dev/kfd").exists() else []
