"""Applies the declared patches to the installed vLLM, in this process."""

from meridian_patch import envs
from meridian_patch.config.load import process_config
from meridian_patch.engine import front_end, status
from meridian_patch.engine.handoff.nixl_wait import let_nixl_poll
from meridian_patch.engine.upstream import installed_vllm
from meridian_patch.patches import PATCHES
from meridian_patch.patches.lock import load_lock
from meridian_patch.patching.registry import Registry, Reports

_registry = Registry()


def apply_patches() -> Reports:
    """Check the environment and the configuration, apply all patches, publish the outcome.

    A second call is a no-op and returns the same outcome.
    """
    env = envs.environment()
    envs.check_names(env)
    config = process_config().config
    upstream = installed_vllm(load_lock())
    front_end.check_config(config, env)
    reports = _registry.apply(PATCHES, upstream, strict=envs.is_strict(env))
    status.publish(
        vllm_version=upstream.version,
        mode="strict" if envs.is_strict(env) else "lenient",
        patches=[report.as_dict() for report in reports],
        front_end=front_end.name(),
    )
    return reports


def undo_patches() -> Reports:
    """Restore vLLM's own names in this process; engines built before keep their classes."""
    # It is bound for one engine, and is no patch of its own.
    let_nixl_poll()
    return _registry.undo()
