"""Entropy, log-sum-exp, max probability and one token's probability of chosen rows of logits.

For a row ``x`` and ``p = softmax(x)``, before temperature and penalties::

    entropy = -sum p log p      lse = log sum e^x      max_prob = max p      boundary_prob = p[id]

All come from the three sums of ``_softmax.py``: entropy = log s - t/s, lse = m + log s,
max_prob = 1/s, p[id] = e^(x[id]-m)/s.

Each chosen row is read once: ``n_cols * itemsize`` bytes, and 16 bytes are written.
"""

from enum import IntEnum

import torch

from meridian_patch.kernels._checks import check_index, check_logits, check_table
from meridian_patch.kernels._launch import (
    Backend,
    LaunchConfig,
    can_launch,
    check_backend,
    config_for,
    on_device,
    tl,
    triton,
)
from meridian_patch.kernels._softmax import softmax_sums


class Signal(IntEnum):
    """Columns of the result.

    Attributes:
        ENTROPY: Shannon entropy in nats, within [0, log(n_cols)] up to rounding.
        LSE: log-sum-exp, natural logarithm.
        MAX_PROB: the largest probability.
        BOUNDARY_PROB: the probability of the boundary token.
    """

    ENTROPY = 0
    LSE = 1
    MAX_PROB = 2
    BOUNDARY_PROB = 3


_ENTROPY = tl.constexpr(Signal.ENTROPY.value)
_LSE = tl.constexpr(Signal.LSE.value)
_MAX_PROB = tl.constexpr(Signal.MAX_PROB.value)
_BOUNDARY_PROB = tl.constexpr(Signal.BOUNDARY_PROB.value)


# What changes between steps must not choose another variant: that would compile while serving.
@triton.jit(
    do_not_specialize=("num_rows", "boundary_id"),
    do_not_specialize_on_alignment=("out_ptr", "rows_ptr"),
)
def _row_signals_kernel(
    out_ptr,  # [n_rows, 4] float32
    out_row_stride,  # elements
    logits_ptr,  # [num_rows, n_cols]
    logits_row_stride,  # elements
    rows_ptr,  # [n_rows] int32 or int64
    num_rows,  # rows of logits
    n_cols,  # columns of logits
    boundary_id,  # 0 <= boundary_id < n_cols
    BLOCK_SIZE: tl.constexpr,  # columns per turn
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    is_there = (row >= 0) & (row < num_rows)
    row_ptr = logits_ptr + row * logits_row_stride
    m, s, t = softmax_sums(row_ptr, tl.where(is_there, n_cols, 0), BLOCK_SIZE)
    boundary = tl.load(row_ptr + boundary_id, mask=is_there, other=float("-inf")).to(tl.float32)
    log_s = tl.log(s)
    entry = out_ptr + i * out_row_stride
    tl.store(entry + _ENTROPY, log_s - t / s)
    tl.store(entry + _LSE, m + log_s)
    tl.store(entry + _MAX_PROB, 1.0 / s)
    tl.store(entry + _BOUNDARY_PROB, tl.exp(boundary - m) / s)


def _launch_row_signals(
    out: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    boundary_id: int,
    config: LaunchConfig,
) -> None:
    if not len(rows):
        return
    num_rows, n_cols = logits.shape
    with on_device(logits):
        _row_signals_kernel[(len(rows),)](
            out,
            out.stride(0),
            logits,
            logits.stride(0),
            rows,
            num_rows,
            n_cols,
            boundary_id,
            BLOCK_SIZE=config.block_size,
            num_warps=config.num_warps,
        )


def row_signals(
    logits: torch.Tensor,
    rows: torch.Tensor,
    boundary_id: int,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = "triton",
) -> torch.Tensor:
    """The four signals of each requested row of softmax(logits); see ``Signal`` for the columns.

    Accumulates in float32 whatever the input type. Entries of -inf have probability zero. A row
    that is all -inf, or has NaN or +inf in it, gives four NaN and touches no other row.

    Args:
        logits: [num_rows, n_cols], float32, bfloat16 or float16; the last dimension contiguous,
            rows may be padded. Cut a padded vocabulary off before. Not modified.
        rows: [n_rows], int32 or int64, on the same device: which rows, in any order, also twice.
            An index outside [0, num_rows) reads nothing and gives NaN, so -1 may fill up a batch.
        boundary_id: the token whose probability is wanted; one engine serves one model, and so
            has one.
        out: [n_rows, 4] float32 to write into, on the same device, rows may be padded; None
            allocates.
        backend: "triton", or "torch" for the reference in float32. Never falls back by itself.

    Returns:
        ``out``, or a new tensor of its shape.

    Raises:
        ValueError: an argument's shape, type, stride, device or range.
        RuntimeError: "triton" where Triton is not installed.

    Note:
        The kernel runs asynchronously on the current stream, without a host synchronisation; with
        ``out`` it allocates nothing and can be captured in a CUDA graph. The first call for a type
        and a vocabulary compiles, which a capture does not allow.
    """
    check_logits(logits)
    check_index("rows", rows, logits)
    check_backend(backend, _row_signals_kernel, logits.device)
    n_cols = logits.shape[1]
    if not 0 <= boundary_id < n_cols:
        raise ValueError(f"boundary_id is {boundary_id}, expected 0 to {n_cols - 1}")
    shape = (len(rows), len(Signal))
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=logits.device)
    check_table("out", out, shape, logits)
    if backend == "torch":
        return out.copy_(row_signals_ref(logits, rows, boundary_id, dtype=torch.float32))
    _launch_row_signals(out, logits, rows, boundary_id, config_for(n_cols))
    return out


def usable_backend(device: torch.device) -> Backend:
    """Say "triton" where its kernel can run on the device, else "torch"."""
    return "triton" if can_launch(_row_signals_kernel, device) else "torch"


def row_signals_ref(
    logits: torch.Tensor,
    rows: torch.Tensor,
    boundary_id: int,
    *,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``row_signals`` from the definitions, in torch; [n_rows, 4] of ``dtype``, on any device."""
    x = pick_rows(logits, rows).to(dtype)
    lse = torch.logsumexp(x, dim=1)
    lse = torch.where(lse.isinf(), torch.nan, lse)
    p = torch.softmax(x, dim=1)
    entropy = torch.special.entr(p).sum(dim=1)
    return torch.stack([entropy, lse, p.amax(dim=1), p[:, boundary_id]], dim=1)


def pick_rows(logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n_rows, n_cols]: the requested rows, -inf for an index outside of logits."""
    if not len(logits):
        return logits.new_full((len(rows), logits.shape[1]), -torch.inf)
    is_there = (rows >= 0) & (rows < len(logits))
    return torch.where(is_there[:, None], logits[torch.where(is_there, rows, 0)], -torch.inf)
