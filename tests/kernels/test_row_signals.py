"""row_signals against the definitions in float64: sizes, types, layouts."""

import kernel_references
import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, TYPES, assert_accurate, indices, random_logits, same_bits

from meridian_patch.kernels.row_signals import row_signals, row_signals_ref

# One column; less than a block; no power of two; just a block; the vocabularies of Llama 2, GPT-2,
# Llama 3, Qwen 3 and Gemma 3.
COLUMNS = (1, 7, 1000, 1024, 32000, 50257, 128256, 151936, 262144)
# None; one; several; more than a GPU has multiprocessors.
ROWS = (0, 1, 37, 199)


def is_affordable(n_rows: int, n_cols: int) -> bool:
    """The interpreter takes milliseconds per block: wide rows few at a time, many rows once."""
    if DEVICE.type == "cuda":
        return True
    return n_rows * n_cols <= 600_000 and (n_rows < max(ROWS) or n_cols == 1000)


SIZES = [(n, c) for c in COLUMNS for n in ROWS if is_affordable(n, c)]


def check(logits: torch.Tensor, rows: torch.Tensor, boundary_id: int, backend="triton") -> None:
    got = row_signals(logits, rows, boundary_id, backend=backend)
    exact = row_signals_ref(logits, rows, boundary_id)
    in_float32 = row_signals_ref(logits, rows, boundary_id, dtype=torch.float32)
    assert_accurate(got, exact, in_float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("n_rows", "n_cols"), SIZES)
def test_accuracy(n_rows: int, n_cols: int, dtype: torch.dtype) -> None:
    logits = random_logits(n_rows + 3, n_cols, dtype, seed=n_cols)
    rows = torch.randint(n_rows + 3, (n_rows,), device=DEVICE)
    check(logits, rows, n_cols // 2)


@pytest.mark.parametrize("n_cols", [7, 1000, 9000])
def test_reference_agrees_with_numpy(n_cols: int) -> None:
    logits = random_logits(5, n_cols, torch.float32)
    logits[1, 3] = -torch.inf
    logits[2] = -torch.inf
    logits[3, 2] = torch.nan
    got = row_signals_ref(logits, indices(0, 1, 2, 3, 4), 3)
    rows = logits.double().cpu().numpy()
    want = [kernel_references.row_signals(row, 3) for row in rows]
    np.testing.assert_allclose(got.cpu().numpy(), np.array(want), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n_cols", [1000, 9001])
def test_padded_vocabulary(n_cols: int, dtype: torch.dtype, backend: str) -> None:
    """Columns behind the vocabulary, cut off by a slice, are not read."""
    wide = random_logits(6, n_cols + 23, dtype)
    wide[:, n_cols:] = torch.nan
    logits = wide[:, :n_cols]
    assert not logits.is_contiguous()
    check(logits, indices(5, 0, 3), n_cols - 1, backend)


def test_sliced_rows(backend: str) -> None:
    """Every other row of a tensor, from its third column on: only the stride differs."""
    logits = random_logits(9, 1003, torch.float32)
    view = logits[1::2, 3:]
    assert view.stride() == (2006, 1)
    check(view, indices(2, 0), 5, backend)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_in_any_order(dtype: torch.dtype, backend: str) -> None:
    """A row's signals do not depend on where, beside whom or how often it is asked for."""
    logits = random_logits(6, 1000, torch.bfloat16)
    whole = row_signals(logits, indices(*range(6), dtype=dtype), 9, backend=backend)
    rows = indices(4, 4, 0, 5, 4, 1, 0, dtype=dtype)
    got = row_signals(logits, rows, 9, backend=backend)
    if backend == "triton":
        assert same_bits(got, whole[rows.long()])
    torch.testing.assert_close(got, whole[rows.long()])


def test_index_outside_reads_nothing(backend: str) -> None:
    logits = random_logits(6, 9000, torch.float32)[1:5]
    got = row_signals(logits, indices(-1, 2, 4, 10**6, -(10**6)), 0, backend=backend)
    assert got.isnan().all(dim=1).tolist() == [True, False, True, True, True]
    none = row_signals(logits[:0], indices(0, -1), 0, backend=backend)
    assert none.isnan().all()


def test_out_is_written_again(backend: str) -> None:
    """``out`` is returned and all of it is written; its own padding stays."""
    logits = random_logits(4, 1000, torch.float32)
    wide = torch.full((3, 6), 77.0, device=DEVICE)
    out = wide[:, :4]
    for rows in (indices(0, 1, 2), indices(3, 2, -1)):
        got = row_signals(logits, rows, 3, out=out, backend=backend)
        assert got is out
        allocated = row_signals(logits, rows, 3, backend=backend)
        torch.testing.assert_close(out, allocated, equal_nan=True)
    assert bool((wide[:, 4:] == 77).all())


def test_input_stays(backend: str) -> None:
    logits, rows = random_logits(4, 1000, torch.float32), indices(1, 2)
    before = logits.clone(), rows.clone()
    row_signals(logits, rows, 3, backend=backend)
    assert torch.equal(logits, before[0])
    assert torch.equal(rows, before[1])


def test_repeat_gives_the_same_bits(backend: str) -> None:
    logits, rows = random_logits(9, 32000, torch.bfloat16), indices(*range(9))
    first = row_signals(logits, rows, 3, backend=backend)
    for _ in range(3):
        assert same_bits(first, row_signals(logits, rows, 3, backend=backend))
