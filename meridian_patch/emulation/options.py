"""``meridian serve --emulate``: vLLM's options for an engine on an emulated device."""

import argparse
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple, NoReturn

from meridian_patch import envs
from meridian_patch.emulation.device import WHOLE, EmulatedDevice, check_machine, load_device
from meridian_patch.errors import ConfigError
from meridian_patch.replay import cpu_affinity

DEFAULT_DEVICE: Final = "h100-32b-dense"
WORKER: Final = "meridian_patch.emulation.worker.EmulatedWorker"
# Load-bearing: CPU attention takes blocks of a multiple of 32 tokens.
BLOCK_SIZE: Final = 32
# What two cores keep up with, on the default device.
MOST_SEQS: Final = 16
_POOL: Final = "--num-gpu-blocks-override"
_TINY_REASONER: Final = (
    ("--served-model-name", "tiny-reasoner"),
    ("--dtype", "float32"),
    ("--reasoning-parser", "deepseek_r1"),
    ("--enforce-eager",),
    ("--max-num-seqs", str(MOST_SEQS)),
)


class Emulation(NamedTuple):
    """What ``--emulate`` changes.

    Attributes:
        arguments: vLLM's own.
        environment: variables to set for the server.
        banner: says what is served.
    """

    arguments: list[str]
    environment: dict[str, str]
    banner: str


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"meridian serve: {message}")


def split_emulation(arguments: Sequence[str]) -> Emulation | None:
    """Take our options out of the arguments of ``meridian serve``; None without ``--emulate``.

    Without a model, the tiny reasoner is served.

    Args:
        arguments: a model, vLLM's options and ours.

    Raises:
        BenchError, ConfigError: a device that cannot be emulated, or a real GPU in this machine.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--emulate", metavar="DEVICE")
    parser.add_argument("--emulate-tokens", default="1", metavar="N")
    parser.add_argument("--emulate-report", type=Path, metavar="FILE")
    parser.add_argument("--emulate-beside-gpu", action="store_true")
    ours, rest = parser.parse_known_args(list(arguments))
    if ours.emulate is None:
        if len(rest) < len(arguments):
            raise ConfigError("meridian serve: --emulate-... needs --emulate DEVICE")
        return None
    check_machine(is_allowed_beside_gpu=ours.emulate_beside_gpu)
    device = load_device(ours.emulate, ours.emulate_tokens)
    if not rest or rest[0].startswith("-"):
        model = str(files("meridian_patch.demo").joinpath("tiny-reasoner"))
        # vLLM takes the last of two equal options: the user's own.
        rest = [model, *(part for option in _TINY_REASONER for part in option), *rest]
    options = device_options(device, rest[1:])
    return Emulation(
        [rest[0], *options, *rest[1:]],
        device_environment(device, ours.emulate_report),
        _banner(device, [*options, *rest[1:]]),
    )


def device_options(device: EmulatedDevice, given: Sequence[str]) -> list[str]:
    """VLLM's options for a device: its worker, and its KV pool unless one is given."""
    names = [each.partition("=")[0].replace("_", "-") for each in given]
    size = BLOCK_SIZE
    if "--block-size" in names:
        size = _block_size(given, names.index("--block-size"))
    pool = [] if _POOL in names else [_POOL, str(device.kv_blocks(size))]
    blocks = [] if "--block-size" in names else ["--block-size", str(size)]
    return ["--worker-cls", WORKER, *blocks, *pool]


def device_environment(device: EmulatedDevice, report: Path | None) -> dict[str, str]:
    """Variables of a server on a device: which one it is, and all work in EngineCore's thread."""
    wanted = {
        envs.EMULATE: device.name,
        envs.EMULATE_TOKENS: str(device.tokens),
        "OMP_NUM_THREADS": "1",
        **cpu_affinity.environment(),
        # The pool is given in blocks; vLLM wants a size in GiB all the same.
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    if report is not None:
        wanted[envs.EMULATE_REPORT] = str(report.resolve())
    return wanted


def _block_size(given: Sequence[str], place: int) -> int:
    name, equals, value = given[place].partition("=")
    text = value if equals else (given[place + 1] if place + 1 < len(given) else "")
    if not WHOLE.fullmatch(text) or int(text) % BLOCK_SIZE:
        raise ConfigError(
            f"meridian serve: {name} is {text!r}, expected a multiple of {BLOCK_SIZE}, which is "
            "what attention on a CPU takes"
        )
    return int(text)


def _banner(device: EmulatedDevice, options: Sequence[str]) -> str:
    pool = options[options.index(_POOL) + 1] if _POOL in options else "a given number of"
    scale = f" One token of the model stands for {device.tokens}." if device.tokens > 1 else ""
    return (
        f"meridian serve: no GPU runs here. Steps last as the cost model {device.name} says "
        f"({device.cost.provenance}); the tokens are the served model's own.{scale} KV pool: "
        f"{pool} blocks. Figures of this server are `{device.provenance}`. Its log says "
        "whether this machine is fast enough."
    )
