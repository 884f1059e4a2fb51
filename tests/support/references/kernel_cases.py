"""Inputs for the kernels, and how near a result must be."""

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Models are served in the first two; the third one is as the second one in all but its range.
TYPES = (
    torch.float32,
    torch.bfloat16,
    pytest.param(torch.float16, marks=pytest.mark.nightly),
)
EPS = torch.finfo(torch.float32).eps


def random_logits(num_rows: int, n_cols: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Rows from nearly uniform to nearly certain, of any offset."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(num_rows, n_cols, generator=generator)
    scale = torch.logspace(-1, 1.3, num_rows)[torch.randperm(num_rows, generator=generator)]
    offset = 10 * torch.randn(num_rows, generator=generator)
    return (noise * scale[:, None] + offset[:, None]).to(DEVICE, dtype)


def indices(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def assert_accurate(got: torch.Tensor, exact: torch.Tensor, yardstick: torch.Tensor) -> None:
    """No more than twice as wrong as torch in float32, apart from a few roundings.

    Args:
        got: the kernel's.
        exact: in float64.
        yardstick: torch's in float32 for the same input.
    """
    assert torch.equal(got.isnan(), exact.isnan())
    exact = exact.nan_to_num()
    allowed = 2 * (yardstick.nan_to_num().double() - exact).abs() + 4 * EPS * (1 + exact.abs())
    error = (got.nan_to_num().double() - exact).abs()
    assert bool((error <= allowed).all()), f"off by {error.max()}, by column {error.amax(dim=0)}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))
