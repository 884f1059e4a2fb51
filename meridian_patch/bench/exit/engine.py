"""The patched engine that ends thoughts, as a child process."""

import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from meridian_patch import envs
from meridian_patch.bench.child import JsonChild
from meridian_patch.errors import BenchError

_MODULE = "meridian_patch.bench.exit.engine_main"
_SET = f"{envs.OVERRIDE_PREFIX}EXIT__"


class Ask(NamedTuple):
    """One request: a name of its own, token ids, and fields of ``SamplingParams``."""

    key: str
    prompt: Sequence[int]
    params: Mapping[str, Any]


class Reply(NamedTuple):
    """What came of a request.

    Attributes:
        key: its name.
        ids: output tokens.
        finish_reason: as vLLM says it.
        told: what the caller is told of the thought; empty while none has ended.
        forced: output indices of tokens that a mask of ours decided.
    """

    key: str
    ids: list[int]
    finish_reason: str
    told: Mapping[str, Any]
    forced: list[int]


class ExitEngineProcess:
    """A patched vLLM engine in a process of its own, for arm after arm.

    Args:
        arguments: of ``vllm.LLM``.
        reasoning: start and end marker for vLLM's own thinking budget; None: not used.
        concurrency: most requests at a time.
        settings: of section ``exit``, in place of what the profile says.
        profile: configuration file.
        log: file that takes what the engine prints.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        reasoning: tuple[str, str] | None,
        concurrency: int,
        settings: Mapping[str, str],
        profile: Path,
        log: Path,
    ) -> None:
        # By event, what the last arm did in the engine.
        self.totals: dict[str, int] = {}
        self._child = JsonChild(_MODULE, _environment(settings, profile), log, BenchError)
        try:
            job = {"engine": dict(arguments), "reasoning": reasoning, "concurrency": concurrency}
            self._child.send(job)
            self._child.receive()
        except BaseException:
            self._child.end(signal.SIGKILL)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._child.end()

    def run(self, asks: Sequence[Ask]) -> Iterator[Reply]:
        """Replies as they come; ``totals`` are those of this arm when it has ended.

        Raises:
            BenchError: the engine ended; the message holds its last lines.
        """
        self._child.send({"requests": [ask._asdict() for ask in asks]})
        for _ in asks:
            yield Reply(**self._child.receive())
        self.totals = self._child.receive()["totals"]


def _environment(settings: Mapping[str, str], profile: Path) -> dict[str, str]:
    env = envs.environment()
    kept = {name: value for name, value in env.items() if not name.startswith(envs.PREFIX)}
    kept |= {f"{_SET}{name.upper()}": value for name, value in settings.items()}
    return kept | {
        "MERIDIAN_PATCH": "1",
        "MERIDIAN_PATCH_CONFIG": str(profile.resolve()),
        "VLLM_PLUGINS": envs.PLUGIN_NAME,
        # The scheduler is watched from within the process.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Threads of a second OpenMP worker spin against whatever else runs.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    }
