"""What a launch needs: Triton where it is installed, block sizes, the device, the backend.

Without Triton the kernel modules import all the same, and ``backend="torch"`` works.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple, get_args

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    HAS_TRITON = False
    triton = SimpleNamespace(jit=lambda *_, **__: lambda function: function)
    tl = SimpleNamespace(constexpr=lambda value: value)
else:
    HAS_TRITON = True

Backend = Literal["triton", "torch"]


class LaunchConfig(NamedTuple):
    """How a program walks over its columns.

    Attributes:
        block_size: columns per turn of the loop, a power of two and at least 64.
        num_warps: warps of a program.
    """

    block_size: int
    num_warps: int


# Widest row that it is for -> how to read it. With 4096 columns and 8 warps a thread of a 16-bit
# type reads two 16-byte words per turn, and 8 programs of 32 registers fit on a multiprocessor.
# `scripts/bench_kernels.py --tune` times the choices; autotuning would stall the first calls of a
# serving engine.
_CONFIGS: Final = ((1024, LaunchConfig(1024, 2)),)
_WIDEST: Final = LaunchConfig(4096, 8)

# Most programs that share a row; the second kernel merges so many sums at once.
MAX_PARTS: Final = 64
PROGRAMS_PER_MULTIPROCESSOR: Final = 4
# Of an H100 and an H200; counts where there is no GPU.
_MULTIPROCESSORS: Final = 132


class Split(NamedTuple):
    """How a row is shared.

    Attributes:
        parts: programs per row.
        blocks_per_part: blocks of columns that each of them reads; the last may read fewer.
    """

    parts: int
    blocks_per_part: int


def config_for(n_cols: int) -> LaunchConfig:
    """The block size and the warps for rows of so many columns."""
    return next((config for most, config in _CONFIGS if n_cols <= most), _WIDEST)


@cache
def rows_that_fill(device: torch.device) -> int:
    """Fewest rows of which one program each occupies the device.

    Asks the driver once, without synchronisation.
    """
    if device.type != "cuda":
        return PROGRAMS_PER_MULTIPROCESSOR * _MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(device)
    return PROGRAMS_PER_MULTIPROCESSOR * properties.multi_processor_count


def split_row(n_rows: int, n_cols: int, config: LaunchConfig, wanted_programs: int) -> Split:
    """Share rows so that there are ``wanted_programs``, as far as the rows have blocks for it.

    Args:
        n_rows: rows to read, at least 1.
        n_cols: columns of each.
        config: gives the columns of a block.
        wanted_programs: of all rows together.
    """
    blocks = -(-n_cols // config.block_size)
    most = min(blocks, MAX_PARTS, -(-wanted_programs // n_rows))
    blocks_per_part = -(-blocks // most)
    return Split(-(-blocks // blocks_per_part), blocks_per_part)


def on_device(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Makes the tensor's GPU the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_backend(backend: Backend, kernel: Any, device: torch.device) -> None:
    """Raise unless ``kernel`` can run on ``device`` with this backend.

    Raises:
        ValueError: an unknown backend, or Triton on a CPU outside of its interpreter.
        RuntimeError: Triton is not installed.
    """
    if backend not in get_args(Backend):
        raise ValueError(f"backend is {backend!r}, expected 'triton' or 'torch'")
    if backend == "torch":
        return
    if not HAS_TRITON:
        raise RuntimeError("backend is 'triton', but Triton is not installed; pass backend='torch'")
    if not can_launch(kernel, device):
        raise ValueError(
            "logits is on cpu, expected a GPU for backend='triton'; pass backend='torch', or set "
            "TRITON_INTERPRET=1 before triton is imported"
        )


def can_launch(kernel: Any, device: torch.device) -> bool:
    """True when Triton is there, and on a CPU its interpreter."""
    return HAS_TRITON and not (isinstance(kernel, triton.JITFunction) and device.type == "cpu")
