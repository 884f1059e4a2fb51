"""``meridian serve``: vLLM's own server, patched, on both of its builds."""

import importlib.metadata
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, get_args

from meridian_patch import envs
from meridian_patch.activation import check_entry_point
from meridian_patch.config.family_files import exit_config, get_family, load_families
from meridian_patch.config.load import load_config
from meridian_patch.config.policy import PolicyName
from meridian_patch.config.schema import ExitConfig
from meridian_patch.config.validate import shown
from meridian_patch.emulation.options import split_emulation
from meridian_patch.engine.upstream import installed_vllm
from meridian_patch.errors import ConfigError
from meridian_patch.patches.lock import load_lock
from meridian_patch.serve_roles import OF_ROLES, ServeParser, split_role

# The module is imported in the server's process alone: it is that program.
EMULATING_SERVER = "meridian_patch.emulation.server"
# Of the emulation's variables those that a server may not inherit.
_OURS = frozenset((envs.EMULATE, envs.EMULATE_TOKENS, envs.EMULATE_REPORT))

_POLICY: Final = "MERIDIAN_PATCH_SET_POLICY__NAME"
_EXIT: Final = "MERIDIAN_PATCH_SET_EXIT__MODE"
# What the two variables may be: options that set them name what they take.
_VALUES: Final[Mapping[str, Sequence[str]]] = {
    "--policy": get_args(PolicyName),
    "--exit": get_args(ExitConfig.model_fields["mode"].annotation),
}
OF_SETTINGS: Final = ("--policy", "--exit", "--meridian-config")
"""Options by which ``split_settings`` sets our configuration."""
_THREADS: Final = "OMP_NUM_THREADS"
# With more cores than these, vLLM's own choice of threads leaves cores for the other processes.
_FEW_CORES: Final = 4

USAGE = """\
usage: meridian serve MODEL [--role think --answer URL... | --role answer]
                      [--fabric nixl|mooncake] [--offload-threshold-blocks N]
                      [--policy NAME] [--exit MODE] [--meridian-config FILE]
                      [--emulate DEVICE [--emulate-tokens N] [--emulate-report FILE]]
                      [vLLM's own options, as for 'vllm serve']

  --role ROLE   requests think on engines of role think and answer on engines of role answer;
                unset: both happen here
  --answer URL  of a think engine: where its requests answer; may be given several times
  --fabric F    what moves the KV cache between the two: nixl (default) or mooncake
  --offload-threshold-blocks N
                requests with fewer KV blocks after their thought answer where they thought
  --policy NAME latency (default) or noop, which decides as stock vLLM
  --exit MODE   early exit of thoughts: off, observe (default) or enforce, which alone takes
                thresholds that were not calibrated for the model, and no bound
  --meridian-config FILE
                configuration of meridian_patch (--config is vLLM's own); each of these three takes
                precedence over the environment variable that sets the same
  --emulate D   no GPU: steps last as long as those of device D, a cost model such as
                h100-32b-dense or a file; without MODEL the packaged tiny reasoner is served
  --emulate-tokens N
                one token of the model stands for N of the device's (default: 1)
  --emulate-report FILE
                takes how late the machine was, as JSON

With MERIDIAN_PATCH=0 the server is stock vLLM; of these options, those of emulation count."""


def serve(arguments: list[str]) -> int:  # noqa: RET503 - ends in another program
    """Replace this process by vLLM's server with the patches active.

    Args:
        arguments: what ``vllm serve`` takes: a model, then options.
    """
    if not arguments or arguments[0] in {"-h", "--help"}:
        print(USAGE)
        return 0 if arguments else 2
    is_off = envs.activation(envs.environment()) is False
    rest = _without_ours(arguments) if is_off else _activate(arguments)
    emulation = split_emulation(rest)
    if emulation is None:
        envs.set_for_children(_threads(envs.environment()))
        command = _server(rest)
    else:
        print(emulation.banner)
        inherited = envs.environment()
        wanted = emulation.environment.items()
        envs.set_for_children({n: v for n, v in wanted if n in _OURS or n not in inherited})
        command = ["-m", EMULATING_SERVER, "--model", *emulation.arguments]
    command = [sys.executable, "-P", *command]
    sys.stdout.flush()
    os.execv(sys.executable, command)  # noqa: S606 - no shell on purpose


def _activate(arguments: list[str]) -> list[str]:
    """Have the server run patched; returns its arguments without ours."""
    rest, settings = split_settings(arguments)
    role = split_role(rest, envs.environment())
    settings |= role.environment
    check_entry_point()
    _check_configuration({**envs.environment(), **settings})
    installed_vllm(load_lock())
    envs.activate_children()
    envs.set_for_children(settings)
    return role.arguments


def _without_ours(arguments: list[str]) -> list[str]:
    """Arguments of a stock server: whatever is wrong with ours must not keep it from starting."""
    print("meridian serve: MERIDIAN_PATCH is 0: stock vLLM serves, without options of ours")
    parser = ServeParser(add_help=False, allow_abbrev=False)
    for option in (*OF_SETTINGS, *OF_ROLES):
        parser.add_argument(option, nargs="?", action="append")
    return parser.parse_known_args(arguments)[1]


def split_settings(arguments: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Take the options that set our configuration out of the arguments of ``meridian serve``.

    Args:
        arguments: a model, vLLM's options and ours.

    Returns:
        The other arguments, and the variables to set for the server.

    Raises:
        ConfigError: a value that is not known, or missing.
    """
    parser = ServeParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--policy")
    parser.add_argument("--exit")
    parser.add_argument("--meridian-config", type=Path)
    ours, rest = parser.parse_known_args(list(arguments))
    for option, allowed in _VALUES.items():
        value = getattr(ours, option.removeprefix("--"))
        if value is not None and value not in allowed:
            expected = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
            raise ConfigError(f"meridian serve: {option} is {shown(value)}, expected {expected}")
    file = ours.meridian_config
    wanted = {
        _POLICY: ours.policy,
        _EXIT: ours.exit,
        "MERIDIAN_PATCH_CONFIG": None if file is None else str(file.absolute()),
    }
    return rest, {name: value for name, value in wanted.items() if value is not None}


def _threads(env: Mapping[str, str]) -> dict[str, str]:
    """Variables without which vLLM's CPU build is slow on few cores; says which it sets.

    Args:
        env: the environment of the server; a variable that is set there is kept.
    """
    cores = len(os.sched_getaffinity(0))
    is_unbound = env.get("VLLM_CPU_OMP_THREADS_BIND") == "nobind"
    if _THREADS in env or is_unbound or cores > _FEW_CORES or not _is_cpu_build():
        return {}
    # Load-bearing: torch computes with as many threads as this variable says, in API server and
    # EngineCore, and with one per core where it is unset; they wait for each other by spinning.
    # vLLM sets it anew for workers in processes of their own, which it binds to cores.
    print(
        f"meridian serve: {_THREADS}=1, because vLLM is built for CPUs and has {cores} cores here; "
        "set the variable for another number of threads"
    )
    return {_THREADS: "1"}


def _is_cpu_build() -> bool:
    """Whether the installed vLLM is built for CPUs, by its distribution."""
    try:
        return "+cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        # Load-bearing: the CPU build is distributed as vllm-cpu.
        return True


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
        if arguments and not arguments[0].startswith("-"):
            arguments = ["--model", *arguments]
        return ["-m", module, *arguments]
    return ["-m", "vllm.entrypoints.cli.main", "serve", *arguments]
