"""Starts a real vLLM API server as a child process, and ends it with all its children."""

import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from meridian_patch.bench.child import Child, log_tail
from meridian_patch.emulation.device import EmulatedDevice
from meridian_patch.emulation.options import device_options
from meridian_patch.engine.model_files import model_name
from meridian_patch.errors import BenchError
from meridian_patch.replay import cpu_affinity as cores

HOST = "127.0.0.1"
_TERMINATE_S = 20.0
_SERVER = "vllm.entrypoints.openai.api_server"
_EMULATING_SERVER = "meridian_patch.emulation.server"
_POLL_S = 0.25
# In the errors of a server that did not start.
NOT_STARTED = re.compile("the vLLM server (ended with exit code|was not healthy after)")


@dataclass(frozen=True)
class ServerSettings:
    """What all arms of a comparison share; None leaves a setting to vLLM.

    Attributes:
        model: directory.
        kv_blocks: size of the KV pool in blocks.
        block_size: tokens per block.
        max_num_seqs: most requests that run at once.
        max_num_batched_tokens: token budget of one step.
        max_model_len: most tokens of one request, prompt included.
        dtype: of weights and activations.
        reasoning_parser: splits thoughts from answers.
        extra: further options of the server, which win over the ones above.
        device: on whose time the server's steps run; None: they take what they take.
    """

    model: Path
    kv_blocks: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    reasoning_parser: str | None = None
    extra: tuple[str, ...] = ()
    device: EmulatedDevice | None = None

    @property
    def served_name(self) -> str:
        """Name of the model in requests; model families are found by it too."""
        return model_name(self.model)

    @property
    def options(self) -> list[str]:
        """Options of the server beside model and address."""
        chosen = {
            "--num-gpu-blocks-override": self.kv_blocks,
            "--block-size": self.block_size,
            "--max-num-seqs": self.max_num_seqs,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--max-model-len": self.max_model_len,
            "--dtype": self.dtype,
            "--reasoning-parser": self.reasoning_parser,
        }
        pairs = [(name, str(value)) for name, value in chosen.items() if value is not None]
        options = [*(text for pair in pairs for text in pair), *self.extra]
        return [*device_options(self.device, options), *options] if self.device else options

    def arguments(self, port: int) -> list[str]:
        """Command line of the server."""
        return [
            # -P keeps the working directory off sys.path: vLLM would take a folder named
            # triton_kernels there for the package it knows under that name.
            *(sys.executable, "-P", "-m", _EMULATING_SERVER if self.device else _SERVER),
            *("--model", str(self.model), "--served-model-name", self.served_name),
            *("--host", HOST, "--port", str(port)),
            *self.options,
            "--disable-uvicorn-access-log",
        ]


def server_environment(base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a server: ``base`` plus what a small CPU server needs."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # One OpenMP thread: the model is tiny, and the other cores feed the streams.
        **cores.environment(),
        "OMP_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        # The dev endpoints include the one that empties the prefix cache between seeds.
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        **base,
    }


def pick_port(wanted: int = 0) -> int:
    """``wanted`` when it is free, any free port for 0.

    Raises:
        BenchError: the wanted port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, wanted))
        except OSError as error:
            raise BenchError(
                f"port {wanted} on {HOST} cannot be used: {error.strerror}; choose another, or 0 "
                "for any free one"
            ) from None
        port: int = probe.getsockname()[1]
        return port


class ServerProcess(Child):
    """Launches a server on entry, ends it and everything it started on exit.

    On entry it does not wait: several servers can start beside each other.

    Args:
        settings: shared settings.
        env: complete environment of the server.
        log_path: file that takes the server's output.
        port: from ``pick_port``.
        start_limit_s: how long the server may take to become healthy.
        on_wait: called with the seconds waited so far while it starts.
        stop_limit_s: how long it may take to end before it is killed.
    """

    def __init__(
        self,
        settings: ServerSettings,
        env: Mapping[str, str],
        log_path: Path,
        port: int,
        start_limit_s: float = 600.0,
        on_wait: Callable[[float], None] = lambda _: None,
        stop_limit_s: float = _TERMINATE_S,
    ) -> None:
        super().__init__(settings.arguments(port), env, log_path, stop_limit_s)
        self._start_limit_s = start_limit_s
        self._on_wait = on_wait
        self._launched_at = 0.0
        self.url = f"http://{HOST}:{port}"

    def start(self) -> None:
        """Launch it; it is not healthy yet."""
        self._launched_at = time.monotonic()
        super().start()

    def check_alive(self) -> None:
        """Raise BenchError with the last log lines when the server has ended."""
        if self.code is not None:
            raise BenchError(
                f"the vLLM server ended with exit code {self.code}. {log_tail(self.log)}"
            )

    def wait_until_healthy(self) -> None:
        """Return once it serves, on cores of its own where that was asked for; else it is ended.

        Raises:
            BenchError: it ended, or took longer than ``start_limit_s`` since its launch.
        """
        try:
            self._poll_health()
        except BaseException:
            self.stop()
            raise
        cores.separate(self.pid, self._env)

    def _poll_health(self) -> None:
        while True:
            self.check_alive()
            waited = time.monotonic() - self._launched_at
            self._on_wait(waited)
            if self._is_healthy():
                return
            if waited > self._start_limit_s:
                raise BenchError(
                    f"the vLLM server was not healthy after {self._start_limit_s:.0f} s. "
                    f"{log_tail(self.log)}"
                )
            time.sleep(_POLL_S)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=2) as reply:  # noqa: S310 - our own http address
                return bool(reply.status == 200)  # noqa: PLR2004 - HTTP OK
        except (urllib.error.URLError, OSError):
            return False
