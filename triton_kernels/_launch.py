"""What a launch needs: Triton where it is installed, block sizes, the device, the backend.

Without Triton the kernel modules import all the same, and ``backend="torch"`` works.
"""

from contextlib import AbstractContextManager, nullcontext
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
    """How a program walks over a row.

    Attributes:
        block_size: columns per turn of the loop, a power of two.
        num_warps: warps of the one program that reads a row.
    """

    block_size: int
    num_warps: int


# Widest row that it is for -> how to read it. `scripts/bench_kernels.py --tune` prints this table;
# autotuning would stall the first calls of a serving engine.
_CONFIGS: Final = (
    (1024, LaunchConfig(1024, 4)),
    (8192, LaunchConfig(4096, 8)),
)
_WIDEST: Final = LaunchConfig(8192, 16)


def config_for(n_cols: int) -> LaunchConfig:
    """The block size and the warps for rows of so many columns."""
    return next((config for most, config in _CONFIGS if n_cols <= most), _WIDEST)


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
