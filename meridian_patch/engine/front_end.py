"""Which front end stands before the engine, and what does not work behind vLLM's own in Rust."""

from collections.abc import Mapping
from typing import Final

from meridian_patch import envs
from meridian_patch.config.schema import Config
from meridian_patch.errors import ConfigError

VARIABLE: Final = envs.RUST_FRONT_END
"""The variable that starts it."""

RUST: Final = "rust"
"""Its name in the status report."""

MISSING: Final = (
    "scheduling, KV tiers and early exit work; responses have no field meridian, usage has vLLM's "
    "own count of reasoning tokens, and there are no spans of phases, no think_stream_interval "
    "and no meridian_* metrics but those of EngineCore's own port"
)
"""What does not work behind it, for status, log and doctor."""


def is_rust() -> bool:
    """Whether a server of this environment has vLLM's front end in Rust."""
    # Load-bearing: vLLM starts it by the environment, which EngineCore shares with it.
    return envs.has_rust_front_end(envs.environment())


def name() -> str:
    """What the status report calls the front end."""
    return RUST if is_rust() else "python"


def check_config(config: Config, env: Mapping[str, str]) -> None:
    """Refuse what would go wrong silently behind the Rust front end.

    Args:
        config: of a process with this environment.
        env: names and values, for example ``envs.environment()``.

    Raises:
        ConfigError: the message names the field.
    """
    if not envs.has_rust_front_end(env):
        return
    if config.handoff.role != "none":
        raise ConfigError(
            f"handoff.role is {config.handoff.role!r}, expected 'none' with {VARIABLE}=1: vLLM's "
            "Rust front end passes no tickets on, so outputs would be lost or doubled; unset "
            f"{VARIABLE} on engines with a role"
        )
    if config.requests.stop_scope != "all":
        raise ConfigError(f"requests.stop_scope is {_scope_refused(config.requests.stop_scope)}")


def check_stop_scope(scope: str) -> None:
    """Refuse a request's ``meridian_stop_scope`` that the front end would ignore.

    Raises:
        ConfigError: the message names the field.
    """
    if scope != "all" and is_rust():
        raise ConfigError(f"vllm_xargs field meridian_stop_scope is {_scope_refused(scope)}")


def _scope_refused(scope: str) -> str:
    return (
        f"{scope!r}, expected 'all' with {VARIABLE}=1: vLLM's Rust front end matches stop strings "
        f"itself, in thoughts too; unset {VARIABLE} on the server, or leave the field out"
    )
