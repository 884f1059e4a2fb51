"""vLLM's API server, with an engine on an emulated device.

    python -P -m meridian_patch.emulation.server OPTIONS

The options are vLLM's; 'meridian serve --emulate' and 'meridian bench serve --emulate' start it.
"""

import runpy
import sys
from typing import Any

from meridian_patch import envs
from meridian_patch.emulation.device import EmulatedDevice, check_supported, device_of
from meridian_patch.engine import wire
from meridian_patch.errors import ConfigError, MeridianError

MODULE = "meridian_patch.emulation.server"


def main() -> None:
    """Serve until the server ends; exits with 1 and one sentence on an error of ours."""
    try:
        keep_async_scheduling(device_of(envs.environment()))
        # Load-bearing: this module serves on both of vLLM's builds; see meridian_patch.serve.
        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
    except MeridianError as error:
        print(f"meridian: {error}", file=sys.stderr)
        sys.exit(1)


def keep_async_scheduling(device: EmulatedDevice) -> None:
    """Let engines of this process schedule asynchronously on the CPU, as on a GPU.

    Raises:
        ConfigError: vLLM runs on something else than the CPU here.
    """
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    if not current_platform.is_cpu():
        raise ConfigError(
            f"emulated device {device.name}: this vLLM runs on {current_platform.device_type}, and "
            "only its CPU build can emulate (pip install meridian-patch[cpu]); serve without "
            "--emulate"
        )
    check = platform.check_and_update_config.__func__

    def check_and_keep(cls: type, vllm_config: Any) -> None:
        # Load-bearing: vLLM has decided by now, and the platform then switches it off. EngineCore
        # gets the configuration of this process.
        is_async = vllm_config.scheduler_config.async_scheduling
        check(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = is_async
        if device.graph_tokens is not None:
            vllm_config.additional_config[wire.GRAPH_TOKENS] = device.graph_tokens
        check_supported(device, vllm_config)

    platform.check_and_update_config = classmethod(check_and_keep)


if __name__ == "__main__":
    main()
