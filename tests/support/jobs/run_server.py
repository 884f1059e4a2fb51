"""A real API server as a child process."""

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Self

import psutil
from run_engine import clean_environment, log_tail
from warm_process import WarmProcess

API_SERVER = (sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server")
START_LIMIT_S = 240
STOP_LIMIT_S = 30
# Of a server whose command does not set them.
SMALL_SERVER = (
    ("--dtype", "float32"),
    ("--block-size", "32"),
    ("--max-model-len", "1024"),
    ("--num-gpu-blocks-override", "65"),
    ("--max-num-seqs", "8"),
    ("--enforce-eager",),
)


class Server:
    """Starts on entry and is ready then; ends on exit.

    Args:
        command: program and its arguments, without the port.
        env: added to a clean environment.
        folder: takes the log and the status files.
        is_cold: let the program import vLLM itself; a command of ours always does.
    """

    def __init__(
        self, command: list[str], env: dict[str, str], folder: Path, *, is_cold: bool = False
    ) -> None:
        self.port = free_port()
        self.log = folder / "server.log"
        folder.mkdir(parents=True, exist_ok=True)
        small = [part for option in SMALL_SERVER if option[0] not in command for part in option]
        self._command = [*command, *small, "--port", str(self.port)]
        self._env = clean_environment(folder) | {
            # The worker then shares the EngineCore process, which saves the import of a third.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            **env,
        }
        self._folder = folder
        self._is_warm = not is_cold and command[: len(API_SERVER)] == list(API_SERVER)
        self._process: subprocess.Popen | WarmProcess | None = None

    def __enter__(self) -> Self:
        self._launch()
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_) -> None:
        self._stop()

    @property
    def pid(self) -> int:
        return self._process.pid

    def processes(self) -> list[psutil.Process]:
        """The API server's first, then EngineCore's and all others."""
        server = psutil.Process(self.pid)
        return [server, *server.children(recursive=True)]

    def kill(self) -> None:
        """End all of its processes at once, as when its machine is lost."""
        # An EngineCore whose API server was killed alone stays, and keeps a core busy.
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        """As a supervisor does; ``wait`` says when it has ended."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, limit_s: float) -> int:
        """Its exit code, once it has ended."""
        return self._process.wait(limit_s)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def status_directory(self) -> Path:
        """Where its processes write what is live in them."""
        return self._folder / "status"

    def run_to_its_end(self) -> tuple[int, bool]:
        """Wait for a server that should refuse to start.

        Returns:
            The exit code, and whether it ever answered a request.
        """
        self._launch()
        has_served = False
        try:
            deadline = time.monotonic() + START_LIMIT_S
            while self._process.poll() is None and time.monotonic() < deadline:
                has_served |= self._is_healthy()
                time.sleep(0.25)
            assert self._process.poll() is not None, f"still running:\n{log_tail(self.log)}"
            return self._process.returncode, has_served
        finally:
            self._stop()

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as reply:
            return reply.read().decode()

    def chat(self, question: str, **body) -> dict:
        """One chat completion, not streamed."""
        message = {"role": "user", "content": question}
        status, text = self.post(
            "/v1/chat/completions", {"messages": [message], "temperature": 0} | body
        )
        assert status == HTTPStatus.OK, text
        return json.loads(text)

    def post(self, path: str, body: dict) -> tuple[int, str]:
        """Status and text of any reply, a stream's whole text included."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def status(self) -> list[dict]:
        """What the product says is live, by process."""
        files = sorted(self.status_directory.glob("*.json"))
        return [json.loads(file.read_text()) for file in files]

    def _launch(self) -> None:
        if self._is_warm:
            self._process = WarmProcess(self._command, self._env, self.log, self._folder)
            return
        with self.log.open("wb") as sink:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=sink, stderr=sink, cwd=self._folder
            )

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not self._is_healthy():
            ended = self._process.poll() is not None
            assert not ended, f"the server ended; the end of its log:\n{log_tail(self.log)}"
            assert time.monotonic() < deadline, f"not ready in time:\n{log_tail(self.log)}"
            time.sleep(0.25)

    def _is_healthy(self) -> bool:
        try:
            self.get("/health")
        except (urllib.error.URLError, OSError):
            return False
        return True

    def _stop(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                # With its EngineCore, which would stay and keep a core busy.
                self.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
