"""row_signals where several programs share a row: what one program per row would give."""

import itertools

import kernel_references
import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, TYPES, assert_accurate, indices, random_logits, same_bits

from meridian_patch.kernels._launch import (
    MAX_PARTS,
    LaunchConfig,
    Split,
    config_for,
    rows_that_fill,
    split_row,
)
from meridian_patch.kernels.row_signals import _launch_row_signals, row_signals, row_signals_ref

# The interpreter takes as long for a narrow block as for a wide one.
NARROW = LaunchConfig(64, 1)
# The last block of a row of this width has 5 columns.
N_COLS = 9 * 64 + 5
PARTS = (1, 2, 3, 4, 5, 10)
NIGHTLY = pytest.mark.nightly
# The interpreter is NumPy, which warns of inf - inf and of the distance of the lowest number.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def in_parts(logits: torch.Tensor, boundary_id: int, parts: int) -> torch.Tensor:
    """The signals of all rows with so many programs per row, or the next number that fits."""
    rows = indices(*range(len(logits)))
    out = torch.empty(len(rows), 4, device=DEVICE)
    _launch_row_signals(out, logits, rows, boundary_id, NARROW, parts * len(rows))
    return out


def assert_right(got: torch.Tensor, logits: torch.Tensor, boundary_id: int) -> None:
    rows = indices(*range(len(logits)))
    exact = row_signals_ref(logits, rows, boundary_id)
    in_float32 = row_signals_ref(logits, rows, boundary_id, dtype=torch.float32)
    assert_accurate(got, exact, in_float32)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", PARTS)
def test_every_number_of_parts(parts: int, dtype: torch.dtype) -> None:
    logits = random_logits(5, N_COLS, dtype, seed=parts)
    assert_right(in_parts(logits, 70, parts), logits, 70)


@pytest.mark.parametrize("parts", [1, 4, 10])
def test_boundary_in_every_part(parts: int) -> None:
    """The first column of each block, the last ones, and the last one of the row."""
    logits = random_logits(1, N_COLS, torch.bfloat16)
    for boundary_id in (*range(0, N_COLS, 64), 63, 191, N_COLS - 1):
        assert_right(in_parts(logits, boundary_id, parts), logits, boundary_id)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("place", [0, 63, 64, 300, N_COLS - 1])
def test_only_one_part_has_an_entry(place: int, parts: int) -> None:
    """All other parts are -inf: they must not turn the row into NaN, nor move its numbers."""
    logits = torch.full((2, N_COLS), -torch.inf, device=DEVICE)
    logits[0, place] = -5.0
    logits[1, [place, 1]] = 2.0
    got = in_parts(logits, place, parts)
    assert got[0].tolist() == [0.0, -5.0, 1.0, 1.0]
    assert_right(got, logits, place)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize(
    "place", [0, *(pytest.param(p, marks=NIGHTLY) for p in (64, 300)), N_COLS - 1]
)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_entry_in_any_part(bad: float, place: int, parts: int) -> None:
    """Four NaN for its row, and the bits of its neighbours as without it."""
    logits = random_logits(3, N_COLS, torch.float32)
    good = in_parts(logits, 9, parts)
    logits[1, place] = bad
    got = in_parts(logits, 9, parts)
    assert got[1].isnan().all()
    assert same_bits(got[::2].contiguous(), good[::2].contiguous())


@pytest.mark.parametrize("parts", PARTS)
def test_rows_without_a_number(parts: int) -> None:
    """All -inf, all NaN, -inf with NaN, +inf twice."""
    logits = torch.full((4, N_COLS), -torch.inf, device=DEVICE)
    logits[1] = torch.nan
    logits[2, 100] = torch.nan
    logits[3, [3, 400]] = torch.inf
    assert in_parts(logits, 9, parts).isnan().all()


@pytest.mark.parametrize("parts", PARTS)
def test_extreme_entries(parts: int) -> None:
    """Lowest and highest finite float32, and maxima that rise and fall from part to part."""
    lowest = torch.finfo(torch.float32).min
    logits = torch.full((4, N_COLS), lowest, device=DEVICE)
    logits[1, 200] = 3.0
    logits[2] = torch.linspace(-300, 300, N_COLS)
    logits[3] = torch.linspace(300, -300, N_COLS)
    got = in_parts(logits, 200, parts)
    rows = logits.double().cpu().numpy()
    want = np.array([kernel_references.row_signals(row, 200) for row in rows])
    np.testing.assert_allclose(got.cpu().numpy(), want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("parts", PARTS)
def test_padded_vocabulary_and_rows_outside(parts: int) -> None:
    """Columns behind the vocabulary are not read, -1 gives NaN, rows keep their own padding."""
    wide = random_logits(6, N_COLS + 23, torch.bfloat16)
    wide[:, N_COLS:] = torch.nan
    logits, rows = wide[:, :N_COLS], indices(5, -1, 0, 6, 3)
    storage = torch.full((5, 6), 77.0, device=DEVICE)
    out = storage[:, :4]
    _launch_row_signals(out, logits, rows, N_COLS - 1, NARROW, parts * len(rows))
    exact = row_signals_ref(logits, rows, N_COLS - 1)
    in_float32 = row_signals_ref(logits, rows, N_COLS - 1, dtype=torch.float32)
    assert_accurate(out, exact, in_float32)
    assert out.isnan().all(dim=1).tolist() == [False, True, False, True, False]
    assert bool((storage[:, 4:] == 77).all())


# Most rows take the interpreter half a minute; a GPU runs all of them.
MANY_ROWS = [pytest.param(n, marks=pytest.mark.nightly) for n in (527, 528, 1024)]


@pytest.mark.parametrize("n_rows", [1, 2, 8, 64, 263, *MANY_ROWS])
def test_any_number_of_rows(n_rows: int) -> None:
    """From one row that many programs share to one program per row, as the product launches it."""
    n_cols = 2 * 4096 + 9
    if DEVICE.type != "cuda":
        # Two blocks per row in place of three where the interpreter has many.
        n_cols = n_cols if n_rows <= 64 else 4096 + 9
    logits = random_logits(5, n_cols, torch.bfloat16)
    rows = torch.arange(n_rows, device=DEVICE) % 5
    got = row_signals(logits, rows, 4096)
    exact = row_signals_ref(logits, indices(*range(5)), 4096)[rows]
    in_float32 = row_signals_ref(logits, indices(*range(5)), 4096, dtype=torch.float32)[rows]
    assert_accurate(got, exact, in_float32)
    # Equal rows have equal bits wherever in the batch they stand.
    assert same_bits(got, got[rows])


def test_equal_calls_give_equal_bits() -> None:
    logits = random_logits(3, N_COLS, torch.bfloat16)
    first = in_parts(logits, 3, 5)
    assert all(same_bits(first, in_parts(logits, 3, 5)) for _ in range(3))


@pytest.mark.parametrize(
    ("n_rows", "n_cols"),
    itertools.product(
        (1, 2, 8, 37, 64, 256, 263, 264, 527, 528, 1024, 10**5),
        (1, 1000, 4096, 4097, 151936, 262144, 10**6),
    ),
)
def test_a_split_covers_the_row(n_rows: int, n_cols: int) -> None:
    """Each part has a column, all columns have a part, and few rows occupy the device."""
    config, wanted = config_for(n_cols), 528
    split = split_row(n_rows, n_cols, config, wanted)
    part_columns = split.blocks_per_part * config.block_size
    assert (split.parts - 1) * part_columns < n_cols <= split.parts * part_columns
    assert split.parts <= MAX_PARTS
    if n_rows >= wanted:
        assert split.parts == 1
    blocks = -(-n_cols // config.block_size)
    # Blocks are dealt out whole, so up to half of the programs that would be right may be missing.
    assert split.parts * n_rows >= min(wanted, n_rows * min(blocks, MAX_PARTS)) / 2


def test_splits_of_a_served_vocabulary() -> None:
    """8, 64, 256 and 1,024 rows of Qwen 3 on 132 multiprocessors, four programs for each."""
    config, wanted = config_for(151936), rows_that_fill(torch.device("cpu"))
    assert (config, wanted) == (LaunchConfig(4096, 8), 528)
    splits = [split_row(n_rows, 151936, config, wanted) for n_rows in (1, 8, 64, 256, 1024)]
    assert splits == [Split(38, 1), Split(38, 1), Split(8, 5), Split(3, 13), Split(1, 38)]
