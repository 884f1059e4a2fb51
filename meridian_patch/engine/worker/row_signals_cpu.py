"""``row_signals`` for logits in main memory, on machines without Triton.

Numba is a dependency of vLLM.
"""

import numba
import numpy as np
import torch
from llvmlite.binding import ffi

# Load-bearing: an engine that starts on a CPU reads `__dict__` of every global of every module. The
# handle of LLVM's library treats that as the name of an LLVM function, and without this line a
# second engine in a process would not start.
ffi.lib._fntab["__dict__"] = {}


def row_signals_cpu(
    logits: torch.Tensor, rows: np.ndarray, boundary_id: int, n_cols: int
) -> np.ndarray:
    """Compute the signals of ``triton_kernels.row_signals`` for logits in main memory, in one call.

    A step of a small model takes about 1 ms and fills the CPU caches with its weights. A dozen
    calls of NumPy or torch, which take 1 us each in a loop, take 5 us each after it.

    Args:
        logits: [n_rows, n_cols or more] of any floating dtype.
        rows: indices of the rows to compute; int64.
        boundary_id: the token whose probability is wanted.
        n_cols: how many columns take part.

    Returns:
        [len(rows), 4] float32: entropy in nats, log-sum-exp, highest probability, probability of
        ``boundary_id``. Four NaN for a row with NaN, with +inf, or with -inf alone.

    Raises:
        ValueError: ``boundary_id`` is not in [0, n_cols).
    """
    if not 0 <= boundary_id < n_cols:
        raise ValueError(f"boundary_id is {boundary_id}, expected 0 to {n_cols - 1}")
    out = np.empty((len(rows), 4), np.float32)
    # Checked first, because the call takes time and is rarely needed.
    if logits.dtype is not torch.float32:
        logits = logits.float()
    _row_signals(logits.numpy(), rows, boundary_id, n_cols, out)
    return out


_LEAST = np.float32(-87.0)
_LOG2_E = np.float32(1.44269504)
# The natural logarithm of 2 as a sum; the last bits of the first part are zero.
_LN_2_HIGH, _LN_2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_ONE, _HALF, _ZERO = np.float32(1), np.float32(0.5), np.float32(0)
# Coefficients of (e^x - 1 - x) / x^2 between -ln 2 / 2 and ln 2 / 2, the highest power first.
_C5, _C4, _C3 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
)
_C2, _C1, _C0 = (
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)


@numba.njit(inline="always")
def _exp(x: np.float32) -> np.float32:
    """e^x for x >= -87, to 1e-7 (``expf`` of Cephes); a library call would not be vectorised."""
    power = np.floor(x * _LOG2_E + _HALF)
    r = x - power * _LN_2_HIGH - power * _LN_2_LOW
    series = ((((_C5 * r + _C4) * r + _C3) * r + _C2) * r + _C1) * r + _C0
    bits = np.int32((np.int32(power) + np.int32(127)) << np.int32(23))
    return (series * r * r + r + _ONE) * bits.view(np.float32)


# Compiled when this module is imported, for rows that may be part of a padded table. Sums may be
# reordered, which vectorisation needs.
@numba.njit(
    "void(float32[:, :], int64[:], int64, int64, float32[:, ::1])",
    fastmath={"reassoc", "nsz", "contract"},
)
def _row_signals(
    logits: np.ndarray, rows: np.ndarray, boundary_id: int, n_cols: int, out: np.ndarray
) -> None:
    """Computes the sums of ``triton_kernels/_softmax.py`` in float64.

    A row that contains NaN or +inf, or only -inf, gives four NaN.
    """
    for i in range(len(rows)):
        x = logits[rows[i], :n_cols]
        m = x[0]
        for value in x:
            m = max(m, value)
        # In float64, so that small terms are not lost beside a probability near 1.
        s = t = 0.0
        for value in x:
            distance = value - m
            near = max(distance, _LEAST)
            e = _exp(near)
            if distance < _LEAST:
                e = _ZERO
            s += e
            t += e * near
        log_s = np.log(s)
        out[i, 0] = log_s - t / s
        out[i, 1] = m + log_s
        out[i, 2] = 1 / s
        out[i, 3] = np.exp(x[boundary_id] - m) / s
