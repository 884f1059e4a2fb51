"""row_signals on rows whose answer is known, and on rows that hold what breaks a softmax."""

import math

import pytest
import torch
from kernel_cases import DEVICE, EPS, TYPES, indices, random_logits, same_bits

from meridian_patch.kernels.row_signals import Signal, row_signals, row_signals_ref

# One block, and three of which the last is not full.
WIDTHS = (1000, 20000)


def signals(logits: torch.Tensor, boundary_id: int, backend: str) -> torch.Tensor:
    return row_signals(logits, indices(*range(len(logits))), boundary_id, backend=backend)


def near(value: float) -> object:
    return pytest.approx(value, rel=8 * EPS, abs=8 * EPS)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n_cols", [1, *WIDTHS])
def test_uniform(n_cols: int, dtype: torch.dtype, backend: str) -> None:
    got = signals(torch.full((1, n_cols), 3.0, dtype=dtype, device=DEVICE), 0, backend)[0]
    log_n = math.log(n_cols)
    assert got.tolist() == [near(log_n), near(3 + log_n), near(1 / n_cols), near(1 / n_cols)]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("place", ["first", "last"])
def test_one_hot(place: str, n_cols: int, dtype: torch.dtype, backend: str) -> None:
    """One finite entry, in the first block or in the last: entropy exactly 0, probability 1."""
    hot = 0 if place == "first" else n_cols - 1
    logits = torch.full((1, n_cols), -torch.inf, dtype=dtype, device=DEVICE)
    logits[0, hot] = -5.0
    assert signals(logits, hot, backend).tolist() == [[0.0, -5.0, 1.0, 1.0]]
    assert signals(logits, n_cols // 2, backend).tolist() == [[0.0, -5.0, 1.0, 0.0]]


@pytest.mark.parametrize("n_cols", WIDTHS)
def test_two_equal(n_cols: int, backend: str) -> None:
    """Two equal entries in blocks far apart: log 2 nats, not 1 bit."""
    logits = torch.full((1, n_cols), -torch.inf, device=DEVICE)
    logits[0, 0] = logits[0, -1] = 2.0
    log_2 = math.log(2)
    assert signals(logits, 0, backend)[0].tolist() == [near(log_2), near(2 + log_2), 0.5, 0.5]


@pytest.mark.parametrize("n_cols", WIDTHS)
def test_one_missing(n_cols: int, backend: str) -> None:
    """An entry of -inf counts as if it were not there; its own probability is 0."""
    logits = random_logits(3, n_cols, torch.float32)
    logits[:, 5] = -torch.inf
    without = torch.cat([logits[:, :5], logits[:, 6:]], dim=1)
    got, want = signals(logits, 5, backend), row_signals_ref(without, indices(0, 1, 2), 0)
    torch.testing.assert_close(got[:, :3].double(), want[:, :3], rtol=1e-5, atol=1e-6)
    assert got[:, Signal.BOUNDARY_PROB].tolist() == [0, 0, 0]


@pytest.mark.parametrize("shift", [1e4, -1e4])
@pytest.mark.parametrize("n_cols", WIDTHS)
def test_shift(n_cols: int, shift: float, backend: str) -> None:
    """A constant added to a row changes its log-sum-exp by as much, and nothing else."""
    # Multiples of 2^-6 stay exact beside 1e4 in float32.
    logits = (random_logits(3, n_cols, torch.float32) * 64).round() / 64
    got, want = signals(logits + shift, 9, backend), signals(logits, 9, backend)
    want[:, Signal.LSE] += shift
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_float16_at_its_limits(backend: str) -> None:
    logits = torch.full((1, 1000), -65504.0, dtype=torch.float16, device=DEVICE)
    logits[0, 1] = 65504.0
    assert signals(logits, 1, backend).tolist() == [[0.0, 65504.0, 1.0, 1.0]]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("n_cols", WIDTHS)
@pytest.mark.parametrize("bad", ["all -inf", "NaN", "NaN after -inf", "+inf", "two +inf"])
# The interpreter is NumPy, which warns of inf - inf.
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_bad_row_is_nan_alone(bad: str, n_cols: int, dtype: torch.dtype, backend: str) -> None:
    logits = random_logits(3, n_cols, dtype)
    if bad == "all -inf":
        logits[1] = -torch.inf
    elif bad == "NaN after -inf":
        logits[1] = -torch.inf
        logits[1, -1] = torch.nan
    elif bad == "NaN":
        logits[1, 4] = torch.nan
    else:
        logits[1, 4] = torch.inf
        logits[1, -1 if bad == "two +inf" else 4] = torch.inf
    got = signals(logits, 9, backend)
    assert got[1].isnan().all(), got[1]
    logits[1] = 0.0
    mended = signals(logits, 9, backend)
    assert mended.isfinite().all()
    assert same_bits(got[::2].contiguous(), mended[::2].contiguous())


@pytest.mark.parametrize("n_cols", WIDTHS)
def test_bounds(n_cols: int) -> None:
    """Entropy is never below 0, and no probability above 1, also where rounding might do it."""
    logits = random_logits(40, n_cols, torch.float32, seed=3)
    logits *= torch.logspace(0, 4, 40, device=DEVICE)[:, None]
    got = signals(logits, 2, "triton")
    entropy, _, max_prob, boundary_prob = got.unbind(dim=1)
    assert bool((entropy >= 0).all())
    assert bool((entropy <= math.log(n_cols) * (1 + 8 * EPS)).all())
    assert bool(((max_prob <= 1) & (boundary_prob <= max_prob)).all())
