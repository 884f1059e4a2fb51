"""Entropy, log-sum-exp, max probability and one token's probability of chosen rows of logits.

For a row ``x`` and ``p = softmax(x)``, before temperature and penalties::

    entropy = -sum p log p      lse = log sum e^x      max_prob = max p      boundary_prob = p[id]

All come from the three sums of ``_softmax.py``: entropy = log s - t/s, lse = m + log s,
max_prob = 1/s, p[id] = e^(x[id]-m)/s.

Each chosen row is read once: ``n_cols * itemsize`` bytes, and 16 bytes are written. One program
reads a row where there are rows enough to occupy the GPU. Where there are fewer, several programs
share each row: each writes the 12 bytes of its part's sums, and a second kernel merges them in the
order of the parts. The order is fixed, so equal calls give equal bits. How many programs share a
row depends on the number of rows, so calls with other numbers of rows may differ in the last bits.
"""

from enum import IntEnum

import torch

from meridian_patch.kernels._checks import check_index, check_logits, check_table
from meridian_patch.kernels._launch import (
    MAX_PARTS,
    Backend,
    LaunchConfig,
    can_launch,
    check_backend,
    config_for,
    on_device,
    rows_that_fill,
    split_row,
    tl,
    triton,
)
from meridian_patch.kernels._softmax import LOWEST, merge_sums, nan_if_empty, softmax_sums


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


@triton.jit()
def _store_signals(
    entry,  # the row's four float32
    m,  # sums of the row, as from softmax_sums
    s,
    t,
    boundary,  # logit of the boundary token, float32
):
    s = nan_if_empty(s)
    log_s = tl.log(s)
    tl.store(entry + _ENTROPY, log_s - t / s)
    tl.store(entry + _LSE, m + log_s)
    tl.store(entry + _MAX_PROB, 1.0 / s)
    tl.store(entry + _BOUNDARY_PROB, tl.exp(boundary - m) / s)


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
    m, s, t = softmax_sums(row_ptr, 0, tl.where(is_there, n_cols, 0), BLOCK_SIZE)
    boundary = tl.load(row_ptr + boundary_id, mask=is_there, other=float("-inf")).to(tl.float32)
    _store_signals(out_ptr + i * out_row_stride, m, s, t, boundary)


@triton.jit(
    do_not_specialize=("num_rows", "blocks_per_part"),
    do_not_specialize_on_alignment=("sums_ptr", "rows_ptr"),
)
def _part_sums_kernel(
    sums_ptr,  # [n_rows, n_parts, 3] float32: m, s and t of each part of each row
    logits_ptr,  # [num_rows, n_cols]
    logits_row_stride,  # elements
    rows_ptr,  # [n_rows] int32 or int64
    num_rows,  # rows of logits
    n_cols,  # columns of logits
    blocks_per_part,  # a part's columns, in blocks
    BLOCK_SIZE: tl.constexpr,  # columns per turn
):
    i = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = tl.load(rows_ptr + i).to(tl.int64)
    is_there = (row >= 0) & (row < num_rows)
    row_ptr = logits_ptr + row * logits_row_stride
    begin = part * blocks_per_part * BLOCK_SIZE
    end = tl.minimum(begin + blocks_per_part * BLOCK_SIZE, n_cols)
    m, s, t = softmax_sums(row_ptr, begin, tl.where(is_there, end, 0), BLOCK_SIZE)
    entry = sums_ptr + (i * tl.num_programs(1) + part) * 3
    tl.store(entry, m)
    tl.store(entry + 1, s)
    tl.store(entry + 2, t)


@triton.jit(
    do_not_specialize=("num_rows", "n_parts", "boundary_id"),
    do_not_specialize_on_alignment=("out_ptr", "sums_ptr", "rows_ptr"),
)
def _merge_parts_kernel(
    out_ptr,  # [n_rows, 4] float32
    out_row_stride,  # elements
    sums_ptr,  # [n_rows, n_parts, 3] float32, from _part_sums_kernel
    n_parts,  # at most MAX_PARTS
    logits_ptr,  # [num_rows, n_cols]
    logits_row_stride,  # elements
    rows_ptr,  # [n_rows] int32 or int64
    num_rows,  # rows of logits
    boundary_id,  # 0 <= boundary_id < n_cols
    MAX_PARTS: tl.constexpr,  # a power of two
):
    i = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, MAX_PARTS)
    exists = parts < n_parts
    entries = sums_ptr + (i * n_parts + parts) * 3
    # A part that does not exist counts as one that read nothing.
    m = tl.load(entries, mask=exists, other=LOWEST)
    s = tl.load(entries + 1, mask=exists, other=0.0)
    t = tl.load(entries + 2, mask=exists, other=0.0)
    m, s, t = merge_sums(m, s, t)
    row = tl.load(rows_ptr + i).to(tl.int64)
    is_there = (row >= 0) & (row < num_rows)
    boundary_ptr = logits_ptr + row * logits_row_stride + boundary_id
    boundary = tl.load(boundary_ptr, mask=is_there, other=float("-inf")).to(tl.float32)
    _store_signals(out_ptr + i * out_row_stride, m, s, t, boundary)


def _launch_row_signals(
    out: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    boundary_id: int,
    config: LaunchConfig,
    wanted_programs: int,
) -> None:
    if not len(rows):
        return
    n_cols = logits.shape[1]
    split = split_row(len(rows), n_cols, config, wanted_programs)
    source = (logits, logits.stride(0), rows, len(logits))
    shape = {"BLOCK_SIZE": config.block_size, "num_warps": config.num_warps}
    with on_device(logits):
        if split.parts == 1:
            _row_signals_kernel[(len(rows),)](
                out, out.stride(0), *source, n_cols, boundary_id, **shape
            )
            return
        sums = torch.empty((len(rows), split.parts, 3), dtype=torch.float32, device=logits.device)
        _part_sums_kernel[(len(rows), split.parts)](
            sums, *source, n_cols, split.blocks_per_part, **shape
        )
        _merge_parts_kernel[(len(rows),)](
            out,
            out.stride(0),
            sums,
            split.parts,
            *source,
            boundary_id,
            MAX_PARTS=MAX_PARTS,
            num_warps=1,
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
        The kernels run asynchronously on the current stream, without a host synchronisation, and
        can be captured in a CUDA graph. With ``out``, a call allocates nothing but the sums of
        rows that programs share, 12 bytes per program, from torch's caching allocator. For each
        type and vocabulary, the first call with few rows compiles, and so does the first call
        with at least ``rows_that_fill(device)``; a capture does not allow that.
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
    wanted = rows_that_fill(logits.device)
    _launch_row_signals(out, logits, rows, boundary_id, config_for(n_cols), wanted)
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
