"""Arms of served conversations: the same users, on servers that differ in one thing.

The servers of all arms are up at once and are used in turn, so that an arm and the one it is
compared with meet the same machine. An idle one sleeps.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from meridian_patch.bench.served.arms import ARM_ENVIRONMENTS
from meridian_patch.bench.served.client import RequestRecord
from meridian_patch.bench.served.conversation_client import TurnsClient
from meridian_patch.bench.served.conversation_figures import read_turn_counters, served_figures
from meridian_patch.bench.served.conversation_script import Conversation, ServedHistory
from meridian_patch.bench.served.counters import difference
from meridian_patch.bench.served.metrics import Figures
from meridian_patch.bench.served.server import (
    MODEL_NAME,
    ServerProcess,
    ServerSettings,
    pick_port,
    server_environment,
)
from meridian_patch.bench.served.workload import Mix, make_trace
from meridian_patch.errors import BenchError

STOCK, AMPLE, MERIDIAN, TIERS_OFF = "stock", "ample", "meridian", "tiers-off"
_OURS = ARM_ENVIRONMENTS["patched"]
_SERVED_ENVIRONMENTS: Mapping[str, Mapping[str, str]] = {
    AMPLE: ARM_ENVIRONMENTS["stock"],
    STOCK: ARM_ENVIRONMENTS["stock"],
    TIERS_OFF: {**_OURS, "MERIDIAN_PATCH_SET_KV__TIERS": "false"},
    MERIDIAN: _OURS,
    "wrong-rule": {**_OURS, "MERIDIAN_PATCH_SET_KV__HISTORY": "strip"},
}
ARM_WORDS: Mapping[str, str] = {
    AMPLE: "stock with a pool so large that nothing is evicted: the upper bound of hits",
    STOCK: "vLLM without us",
    TIERS_OFF: "ours, with kv.tiers off: scheduling by phase alone",
    MERIDIAN: "ours, by default; with kept thoughts, told so by kv.history",
    "wrong-rule": "ours, told that thoughts are stripped whatever the clients do",
}
DEFAULT_ARMS = (AMPLE, STOCK, TIERS_OFF, MERIDIAN)
_WARM_UP = Mix(requests=6, rate_per_s=6.0, max_tokens=64)
_WARM_UP_SEED = 1_000_003
_KEEP_TEMPLATE = "chat_template_keep_thinking.jinja"


@dataclass(frozen=True)
class TurnsServerSettings(ServerSettings):
    """Settings of a server for conversations.

    Attributes:
        chat_template: file in place of the model's own template.
    """

    max_model_len: int = 4096
    chat_template: Path | None = None

    def arguments(self, port: int) -> list[str]:
        template = ["--chat-template", str(self.chat_template)] if self.chat_template else []
        return super().arguments(port) + template


@dataclass
class ServedRun:
    """One seed's conversations on one arm, as far as they got.

    Attributes:
        end_marker: token ids that end thinking; empty when there is no thinking.
        counters: what the server's counters rose by.
        pool_use: share of KV blocks in use, once a second.
        error: what ended the run early.
    """

    arm: str
    seed: int
    end_marker: tuple[int, ...] = ()
    records: list[RequestRecord] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=dict)
    pool_use: list[float] = field(default_factory=list)
    error: str | None = None

    def figures(self) -> Figures:
        return served_figures(self.records, self.end_marker, self.counters, self.pool_use)


@dataclass(frozen=True)
class Stage:
    """What all runs of a comparison share.

    Attributes:
        model: directory of the model.
        history: what clients do with thoughts.
        kv_blocks: pool of every arm but ``ample``.
        ample_blocks: pool of ``ample``.
        max_tokens: of one request.
    """

    model: Path
    history: ServedHistory
    kv_blocks: int
    ample_blocks: int
    max_tokens: int

    def settings(self, arm: str) -> TurnsServerSettings:
        """The arm's server; only the pool differs between arms."""
        is_kept = self.history is ServedHistory.KEPT
        return TurnsServerSettings(
            self.model,
            self.ample_blocks if arm == AMPLE else self.kv_blocks,
            chat_template=self.model / _KEEP_TEMPLATE if is_kept else None,
        )


def served_environment(arm: str, history: ServedHistory, base: Mapping[str, str]) -> dict[str, str]:
    """Complete environment of an arm's server: ``base`` but for what decides about us.

    The family file of the tiny reasoner goes by its own template, so a server with the other
    template is told.
    """
    inherited = {name: value for name, value in base.items() if name != "VLLM_PLUGINS"}
    told = {"MERIDIAN_PATCH_SET_KV__HISTORY": "keep"} if history is ServedHistory.KEPT else {}
    return server_environment(inherited) | told | dict(_SERVED_ENVIRONMENTS[arm])


@dataclass(frozen=True)
class ServedArm:
    """An arm whose server is up.

    Attributes:
        end_marker: token ids that end thinking; empty when there is no thinking.
    """

    name: str
    server: ServerProcess
    client: TurnsClient
    end_marker: tuple[int, ...]


@contextmanager
def serve_arm(
    name: str, stage: Stage, base_env: Mapping[str, str], log_path: Path
) -> Iterator[ServedArm]:
    """Start an arm's server, warm it up, and end it on exit.

    Args:
        name: of the arm.
        stage: shared by all arms.
        base_env: environment the server's is built from.
        log_path: takes the server's output.

    Raises:
        BenchError: the server did not start, or serves something unexpected.
    """
    settings = stage.settings(name)
    env = served_environment(name, stage.history, base_env)
    with ServerProcess(settings, env, log_path, pick_port()) as server:
        client = TurnsClient(
            server.url,
            MODEL_NAME,
            max_tokens=stage.max_tokens,
            max_model_len=settings.max_model_len,
        )
        marker = () if stage.history is ServedHistory.PLAIN else client.end_marker()
        client.play(make_trace(_WARM_UP, _WARM_UP_SEED), [], server.check_alive)
        _counters(client, name)
        yield ServedArm(name, server, client, marker)


def run_served(
    run: ServedRun,
    arm: ServedArm,
    history: ServedHistory,
    conversations: Sequence[Conversation],
    on_request: Callable[[], None],
) -> None:
    """Hold the conversations with an arm whose prefix cache has just been emptied.

    Args:
        run: is filled as the run goes on, so that it keeps what there is when it breaks off.
        arm: of the run.
        history: what clients do with thoughts.
        conversations: of the run's seed.
        on_request: called when a request has ended.

    Raises:
        BenchError: the server died.
    """
    run.end_marker = arm.end_marker
    arm.client.reset_prefix_cache()
    before = _counters(arm.client, run.arm)
    arm.client.converse(
        conversations,
        history,
        run.records,
        run.pool_use,
        arm.server.check_alive,
        lambda _: on_request(),
    )
    run.counters = difference(before, _counters(arm.client, run.arm))


def served_arm_names() -> list[str]:
    """All arms there are."""
    return list(_SERVED_ENVIRONMENTS)


def _counters(client: TurnsClient, arm: str) -> dict[str, float]:
    """The server's counters.

    Raises:
        BenchError: a stock server exports our metrics, or a patched one does not: the comparison
            would be a lie.
    """
    counters = read_turn_counters(client.metrics_text())
    is_ours = "preemptions_think" in counters
    if is_ours == (arm in {STOCK, AMPLE}):
        raise BenchError(
            f"the server of arm {arm} runs {'patched' if is_ours else 'stock'}, expected the "
            "other. Run 'meridian status' to see what is loaded"
        )
    return counters
