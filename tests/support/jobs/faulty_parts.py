"""A plug-in of vLLM that breaks parts of ours while a file of a fault's name is there.

slow   decisions of the policy take 5 ms longer
tiers  the KV tiers raise
lost   a worker measures nothing
"""

import time
from collections.abc import Callable
from pathlib import Path

from meridian_patch.envs import environment

FOLDER = "FAULTS_FOLDER"
NAME = "faulty_parts"
_ENTRY_POINTS = f"[vllm.general_plugins]\n{NAME} = {NAME}:register\n"


def faults_environment(folder: Path) -> dict[str, str]:
    """What a server's environment needs so that faults can be switched on in it.

    Args:
        folder: takes the plug-in's entry point; faults are files in it.
    """
    metadata = folder / f"{NAME}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(_ENTRY_POINTS)
    return {
        "PYTHONPATH": f"{Path(__file__).parent}:{folder}",
        "VLLM_PLUGINS": f"meridian_patch,{NAME}",
        FOLDER: str(folder),
    }


def register() -> None:
    """The entry point; vLLM calls it in every process."""
    from meridian_patch.engine.kv_cache.tiers import KVTiers
    from meridian_patch.engine.scheduler.queue_part import QueuePart
    from meridian_patch.engine.worker.logits_tap import Tap

    folder = Path(environment()[FOLDER])

    def break_with(owner: type, method: str, name: str, goes_on: Callable[[], bool]) -> None:
        """In the fault of this name, call ``goes_on`` first: whether the usual call follows."""
        usual = getattr(owner, method)

        def call(*args, **kwargs):
            if (folder / name).exists() and not goes_on():
                return None
            return usual(*args, **kwargs)

        setattr(owner, method, call)

    break_with(QueuePart, "_order_waiting", "slow", _dawdle)
    break_with(KVTiers, "before_stats", "tiers", _fail)
    break_with(Tap, "_attach", "lost", lambda: False)


def _dawdle() -> bool:
    time.sleep(0.005)
    return True


def _fail() -> bool:
    raise RuntimeError("a fault of the test")
