"""EAT's running statistics, updated on the device from the logits of probe rows.

EAT (arXiv:2509.26522) watches ``x``, the entropy of the next token after a chain of thought that a
probe has closed. Mean and variance are exponential moving averages, the deviation taken from the
updated mean, as in the authors' code (github.com/xidulu/EAT)::

    first probe:  m = x                        v = 0
    later:        m <- a x + (1-a) m           v <- a (x-m)^2 + (1-a) v
    debiased:     v / (1 - (1-a)^count)

The debiasing is that of github.com/xidulu/reasoning_risk_control; after one probe, where v is 0 by
definition and not by observation, it is +inf here.
A chain has converged when the debiased variance is below the slot's delta after more probes than
the warm-up, and the entropy itself is low: a model that is stably confused has a flat entropy, too.

The entropy is that of ``row_signals``. Each probe row is read once, ``n_cols * itemsize`` bytes;
beside it 16 bytes of state are read and 24 written.
"""

import math
from enum import IntEnum

import torch

from meridian_patch.kernels._checks import check_index, check_logits, check_table
from meridian_patch.kernels._launch import (
    Backend,
    LaunchConfig,
    check_backend,
    config_for,
    on_device,
    tl,
    triton,
)
from meridian_patch.kernels._softmax import nan_if_empty, softmax_sums
from meridian_patch.kernels.row_signals import Signal, row_signals_ref


class EatColumn(IntEnum):
    """Columns of the state, a float32 tensor [num_slots, 7] with one slot per request.

    Attributes:
        COUNT: probes so far.
        ENTROPY: of the last probe, in nats.
        MEAN: moving average of the entropy, in nats.
        VARIANCE: moving average of the squared deviation, in nats^2.
        DEBIASED_VARIANCE: the same without the weight of its start, in nats^2.
        DELTA: the chain has converged below this debiased variance, in nats^2. Read, not written.
        CONVERGED: 1.0 when the last probe met every condition, else 0.0.
    """

    COUNT = 0
    ENTROPY = 1
    MEAN = 2
    VARIANCE = 3
    DEBIASED_VARIANCE = 4
    DELTA = 5
    CONVERGED = 6


_COUNT = tl.constexpr(EatColumn.COUNT.value)
_ENTROPY = tl.constexpr(EatColumn.ENTROPY.value)
_MEAN = tl.constexpr(EatColumn.MEAN.value)
_VARIANCE = tl.constexpr(EatColumn.VARIANCE.value)
_DEBIASED_VARIANCE = tl.constexpr(EatColumn.DEBIASED_VARIANCE.value)
_DELTA = tl.constexpr(EatColumn.DELTA.value)
_CONVERGED = tl.constexpr(EatColumn.CONVERGED.value)


# What changes between steps must not choose another variant: that would compile while serving.
@triton.jit(
    do_not_specialize=("num_slots", "num_rows"),
    do_not_specialize_on_alignment=("rows_ptr", "slots_ptr"),
)
def _eat_update_kernel(
    state_ptr,  # [num_slots, 7] float32, updated in place
    state_row_stride,  # elements
    logits_ptr,  # [num_rows, n_cols]
    logits_row_stride,  # elements
    rows_ptr,  # [n_rows] int32 or int64
    slots_ptr,  # [n_rows] int32 or int64
    num_slots,  # rows of state
    num_rows,  # rows of logits
    n_cols,  # columns of logits
    alpha,  # weight of the newest entropy
    log_keep,  # log(1 - alpha)
    warm_up,  # probes
    max_entropy,  # nats
    BLOCK_SIZE: tl.constexpr,  # columns per turn
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i).to(tl.int64)
    slot = tl.load(slots_ptr + i).to(tl.int64)
    is_there = (row >= 0) & (row < num_rows) & (slot >= 0) & (slot < num_slots)
    row_ptr = logits_ptr + row * logits_row_stride
    _, s, t = softmax_sums(row_ptr, 0, tl.where(is_there, n_cols, 0), BLOCK_SIZE)
    s = nan_if_empty(s)
    entropy = tl.log(s) - t / s
    is_number = entropy == entropy  # noqa: PLR0124
    updates = is_there & is_number

    entry = state_ptr + slot * state_row_stride
    count = tl.load(entry + _COUNT, mask=updates, other=0.0) + 1.0
    old_mean = tl.load(entry + _MEAN, mask=updates, other=0.0)
    old_variance = tl.load(entry + _VARIANCE, mask=updates, other=0.0)
    delta = tl.load(entry + _DELTA, mask=updates, other=0.0)
    is_first = count == 1.0
    mean = tl.where(is_first, entropy, alpha * entropy + (1.0 - alpha) * old_mean)
    deviation = entropy - mean
    variance = alpha * deviation * deviation + (1.0 - alpha) * old_variance
    debiased = variance / (1.0 - tl.exp(count * log_keep))
    debiased = tl.where(is_first, float("inf"), debiased)
    converged = (debiased < delta) & (count > warm_up) & (entropy < max_entropy)

    tl.store(entry + _COUNT, count, mask=updates)
    tl.store(entry + _ENTROPY, entropy, mask=updates)
    tl.store(entry + _MEAN, mean, mask=updates)
    tl.store(entry + _VARIANCE, variance, mask=updates)
    tl.store(entry + _DEBIASED_VARIANCE, debiased, mask=updates)
    tl.store(entry + _CONVERGED, converged.to(tl.float32), mask=updates)


def _launch_eat_update(
    state: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    scalars: tuple[float, float, float, float],
    config: LaunchConfig,
) -> None:
    if not len(rows):
        return
    num_rows, n_cols = logits.shape
    with on_device(logits):
        _eat_update_kernel[(len(rows),)](
            state,
            state.stride(0),
            logits,
            logits.stride(0),
            rows,
            slots,
            len(state),
            num_rows,
            n_cols,
            *scalars,
            BLOCK_SIZE=config.block_size,
            num_warps=config.num_warps,
        )


def eat_update(
    state: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    alpha: float,
    warm_up: int,
    max_entropy: float,
    backend: Backend = "triton",
) -> torch.Tensor:
    """Update the state of each probe's slot with the entropy of its row, in place.

    A probe whose entropy is NaN leaves its slot as it was. So does an index outside of its tensor,
    for rows as for slots: -1 may fill up a batch. To claim a slot, write zeros and its DELTA.

    Args:
        state: [num_slots, 7] float32, see ``EatColumn``; the last dimension contiguous.
        logits: as for ``row_signals``: before temperature and penalties, without a padded
            vocabulary. Not modified.
        rows: [n_rows], int32 or int64: the rows of logits that are probes.
        slots: [n_rows], int32 or int64: the slot of each. Unique within a call, apart from those
            outside of state: two probes of one slot would race.
        alpha: weight of the newest entropy, within (0, 1).
        warm_up: probes that are too few for a chain to have converged, at least 1.
        max_entropy: in nats; a chain has converged only below it. ``math.inf`` for no gate.
        backend: "triton", or "torch" for the reference in float32. Never falls back by itself.

    Returns:
        ``state``.

    Raises:
        ValueError: an argument's shape, type, stride, device or range.
        RuntimeError: "triton" where Triton is not installed.

    Note:
        The kernel runs asynchronously on the current stream, allocates nothing and synchronises
        nothing; it can be captured in a CUDA graph. The first call for a type and a vocabulary
        compiles, which a capture does not allow. The same call from the same state gives the same
        bits.
    """
    check_logits(logits)
    check_index("rows", rows, logits)
    check_index("slots", slots, logits)
    check_table("state", state, (None, len(EatColumn)), logits)
    check_backend(backend, _eat_update_kernel, logits.device)
    if len(rows) != len(slots):
        raise ValueError(f"slots has {len(slots)} entries, expected {len(rows)} as rows")
    if not 0 < alpha < 1:
        raise ValueError(f"alpha is {alpha}, expected a number between 0 and 1")
    if warm_up < 1:
        raise ValueError(f"warm_up is {warm_up}, expected at least 1")
    if not max_entropy > 0:
        raise ValueError(f"max_entropy is {max_entropy}, expected a number above 0")
    if backend == "torch":
        new = eat_update_ref(
            state,
            logits,
            rows,
            slots,
            alpha=alpha,
            warm_up=warm_up,
            max_entropy=max_entropy,
            dtype=torch.float32,
        )
        return state.copy_(new)
    scalars = (alpha, math.log1p(-alpha), float(warm_up), max_entropy)
    _launch_eat_update(state, logits, rows, slots, scalars, config_for(logits.shape[1]))
    return state


def eat_update_ref(
    state: torch.Tensor,
    logits: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    *,
    alpha: float,
    warm_up: int,
    max_entropy: float,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """``eat_update`` from the definitions, in torch; a new state of ``dtype``, on any device."""
    entropy = row_signals_ref(logits, rows, 0, dtype=dtype)[:, Signal.ENTROPY]
    is_there = (slots >= 0) & (slots < len(state))
    updates = is_there & ~entropy.isnan()
    # What changes nothing goes to a row of its own behind the last slot.
    target = torch.where(updates, slots, len(state)).long()
    new = torch.cat([state, state.new_zeros(1, len(EatColumn))]).to(dtype)
    count, _, mean, variance, _, delta, _ = new[target].unbind(dim=1)

    count = count + 1
    is_first = count == 1
    mean = torch.where(is_first, entropy, alpha * entropy + (1 - alpha) * mean)
    variance = alpha * (entropy - mean) ** 2 + (1 - alpha) * variance
    debiased = torch.where(is_first, torch.inf, variance / (1 - (1 - alpha) ** count))
    converged = (debiased < delta) & (count > warm_up) & (entropy < max_entropy)
    columns = [count, entropy, mean, variance, debiased, delta, converged.to(dtype)]
    new[target] = torch.stack(columns, dim=1)
    return new[:-1]
