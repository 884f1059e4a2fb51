"""One pass over a row of logits that leaves what softmax, log-sum-exp and entropy need.

With ``m = max x``, ``s = sum e^(x-m)`` and ``t = sum (x-m) e^(x-m)``::

    log-sum-exp = m + log s          p_i = e^(x_i-m) / s
    entropy     = -sum p log p = -sum p (x - m - log s) = log s - t/s      (nats)

The online softmax of Milakov and Gimelshein (arXiv:1805.02867), with ``t`` carried along: when a
block raises the maximum from ``m`` to ``m'``, ``x - m' = (x - m) + (m - m')`` gives::

    s' = e^(m-m') s          t' = e^(m-m') (t + (m - m') s)

``s >= 1`` and ``t <= 0``, so nothing cancels. Entries of -inf add nothing to either sum.
"""

from meridian_patch.kernels._launch import tl, triton


@triton.jit()
def softmax_sums(
    row_ptr,  # start of the row
    n_cols,  # columns of the row; 0 reads nothing, as if all were -inf
    BLOCK_SIZE: tl.constexpr,  # columns per turn
):
    """Returns (m, s, t) in float32.

    ``m`` is 0 where all entries are -inf, and ``s`` is NaN there, as with an entry of NaN or +inf.
    """
    columns = tl.arange(0, BLOCK_SIZE)
    m = tl.full((), float("-inf"), tl.float32)
    s = tl.zeros((), tl.float32)
    t = tl.zeros((), tl.float32)
    for start in range(0, n_cols, BLOCK_SIZE):
        is_inside = start + columns < n_cols
        x = tl.load(row_ptr + start + columns, mask=is_inside, other=float("-inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, axis=0))
        # Until the first finite entry the maximum is -inf, and -inf - -inf would be NaN.
        base = tl.where(m_new == float("-inf"), 0.0, m_new)
        # Not `x > -inf`, which would take NaN for a missing entry.
        counts = x != float("-inf")
        distance = tl.where(counts, x - base, 0.0)
        e = tl.where(counts, tl.exp(distance), 0.0)
        shift = tl.where(s > 0, m - base, 0.0)
        scale = tl.exp(shift)
        t = scale * (t + shift * s) + tl.sum(distance * e, axis=0)
        s = scale * s + tl.sum(e, axis=0)
        m = m_new
    m = tl.where(m == float("-inf"), 0.0, m)
    s = tl.where(s == 0.0, float("nan"), s)
    return m, s, t
