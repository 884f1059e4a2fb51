"""The device that an emulated worker stands for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.config.validate import shown
from meridian_patch.errors import BenchError, ConfigError
from meridian_patch.replay.cost import CostModel, cost_path, load_cost
from meridian_patch.replay.types import StepWork

# A number that is given as text; Python refuses to read thousands of digits.
WHOLE = re.compile("[0-9]{1,15}")
# Device files of NVIDIA's and AMD's drivers.
_GPU_FILES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
# Draft tokens without a model of their own.
_NO_DRAFT_MODEL = frozenset(("ngram", "ngram_gpu", "suffix"))


@dataclass(frozen=True)
class EmulatedDevice:
    """A cost model, and how coarsely it is played.

    Attributes:
        name: packaged cost model, or path of one.
        cost: times of its steps.
        tokens: that one token of the served model stands for.
    """

    name: str
    cost: CostModel
    tokens: int = 1

    def step_seconds(self, work: StepWork) -> float:
        """Seconds of a step of the served model, which stands for as many steps as tokens.

        In each of them a sequence decodes one token, beside contexts that are as many times longer.
        """
        scaled = replace(
            work,
            context_tokens=work.context_tokens * self.tokens,
            attended_tokens=work.attended_tokens * self.tokens,
        )
        return self.tokens * self.cost.step_seconds(scaled)

    def launch_seconds(self, work: StepWork) -> float:
        """Seconds of such a step in which the engine does nothing but launch it; mostly 0."""
        return self.tokens * self.cost.launch_seconds(work)

    @property
    def graph_tokens(self) -> int | None:
        """Most tokens of a step that a captured graph runs."""
        return self.cost.graph_tokens

    def kv_blocks(self, block_size: int) -> int:
        """Blocks of the KV pool that the device has, and one that holds no tokens.

        Raises:
            BenchError: the cost model does not say how much the device holds.
        """
        if self.cost.kv_tokens is None:
            raise BenchError(
                f"cost model {cost_path(self.name)}: kv_tokens is missing, which says how many "
                "tokens the device holds; add it, or give the pool with --num-gpu-blocks-override"
            )
        # Load-bearing: vLLM keeps one block of the pool as the null block.
        return self.cost.kv_tokens // (self.tokens * block_size) + 1

    def __str__(self) -> str:
        scale = f", 1 token for {self.tokens}" if self.tokens > 1 else ""
        return f"{self.cost.name} ({self.cost.provenance}{scale})"

    @property
    def provenance(self) -> str:
        """How its figures are obtained, as reports say it."""
        return f"emulated {self}"


def load_device(name: str, tokens: str = "1") -> EmulatedDevice:
    """The device of a cost model.

    Args:
        name: packaged cost model, or path of one.
        tokens: a whole number above 0.

    Raises:
        BenchError: the cost model is unknown or incomplete; the message names file and field.
        ConfigError: the number is none.
    """
    if not WHOLE.fullmatch(tokens) or int(tokens) < 1:
        raise ConfigError(
            f"one token is to stand for {shown(tokens)} tokens of the emulated device, expected a "
            "whole number above 0"
        )
    return EmulatedDevice(name, load_cost(name), int(tokens))


def device_of(env: Mapping[str, str]) -> EmulatedDevice:
    """The device that the environment of a server names.

    Raises:
        BenchError, ConfigError: as of ``load_device``, or none is named.
    """
    name, tokens = envs.emulated_device(env)
    if name is None:
        raise ConfigError(
            f"environment variable {envs.EMULATE} is not set, which names the device that this "
            "worker emulates; serve with 'meridian serve --emulate DEVICE'"
        )
    return load_device(name, tokens)


def check_machine(*, is_allowed_beside_gpu: bool) -> None:
    """Refuse to emulate a GPU where there is a real one.

    Raises:
        ConfigError: a GPU's driver is here, and nothing says that it may be left idle.
    """
    found = next((path for path in _GPU_FILES if path.exists()), None)
    if found is not None and not is_allowed_beside_gpu:
        raise ConfigError(
            f"this machine has a GPU ({found}), and --emulate would leave it idle; serve without "
            "--emulate, or add --emulate-beside-gpu"
        )


def check_supported(device: EmulatedDevice, config: Any) -> None:
    """Refuse what the cost model does not cover.

    Args:
        device: that is emulated.
        config: vLLM's, complete.

    Raises:
        ConfigError: names the option and what to do.
    """
    wrong = next(_unsupported(config), None)
    if wrong is not None:
        raise ConfigError(f"emulated device {device.name}: {wrong}")


def _unsupported(config: Any) -> Iterator[str]:
    """What the cost model does not cover, in words."""
    parallel, speculative = config.parallel_config, config.speculative_config
    if parallel.pipeline_parallel_size > 1:
        yield (
            "--pipeline-parallel-size is above 1, and the device runs one step at a time, as no "
            "pipeline does; leave it out"
        )
    if parallel.tensor_parallel_size > 1:
        yield (
            "--tensor-parallel-size is above 1, and its cost model holds all GPUs of an engine "
            "already; leave it out"
        )
    if parallel.data_parallel_size > 1 and config.model_config.is_moe:
        yield (
            "--data-parallel-size is above 1 for a mixture of experts, and its cost model has no "
            "time for ranks that wait for each other; leave it out"
        )
    if speculative is not None and speculative.method not in _NO_DRAFT_MODEL:
        yield (
            "--speculative-config has a draft model, and its cost model has no time for that "
            "model's passes; use the method ngram, or leave it out"
        )
    if config.model_config.runner_type != "generate":
        yield "the model generates no text; an emulated device serves models that do"
    # Load-bearing: the platform has chosen the executor by now.
    if parallel.distributed_executor_backend != "uni":
        yield (
            f"the executor is {parallel.distributed_executor_backend!r}, and the device runs "
            "within EngineCore; set VLLM_ENABLE_V1_MULTIPROCESSING=0, as 'meridian serve "
            "--emulate' does"
        )
