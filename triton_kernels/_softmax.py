"""One pass over a row of logits that leaves what softmax, log-sum-exp and entropy need.

With ``m = max x``, ``s = sum e^(x-m)`` and ``t = sum (x-m) e^(x-m)``::

    log-sum-exp = m + log s          p_i = e^(x_i-m) / s
    entropy     = -sum p log p = -sum p (x - m - log s) = log s - t/s      (nats)

The online softmax of Milakov and Gimelshein (arXiv:1805.02867), with ``t`` carried along: when the
maximum of what has been read rises from ``m`` to ``m'``, ``x - m' = (x - m) + (m - m')`` gives::

    s' = e^(m-m') s          t' = e^(m-m') (t + (m - m') s)

The same formula adds up the sums of disjoint parts of a row. ``s >= 1`` and ``t <= 0`` once a
finite entry has been read, so nothing cancels. Entries of -inf add nothing to either sum.

Each lane keeps sums of its own for the 16-byte words that it reads and rescales them once per two
words; lanes exchange their sums only after the loop. The order of the additions, and with it the
last bits of the result, depends on how a row is divided into parts.
"""

from meridian_patch.kernels._launch import tl, triton

# A lane's maximum before it has read anything. Finite, so that a difference of two is no NaN.
LOWEST = tl.constexpr(-3.4028234663852886e38)
# e^_FAR is 0 in float32. The distance of a smaller entry is raised to it: -inf * 0 would be NaN.
_FAR = tl.constexpr(-200.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_WORD_BYTES = tl.constexpr(16)


@triton.jit()
def softmax_sums(
    row_ptr,  # start of the row
    begin,  # first column to read, a multiple of BLOCK_SIZE
    end,  # column after the last one; nothing is read where it is not above begin
    BLOCK_SIZE: tl.constexpr,  # columns per turn
):
    """Returns (m, s, t) of the columns from ``begin`` to ``end``, in float32.

    ``s`` is 0 where all entries are -inf or nothing was read, and ``m`` is then the lowest finite
    number. ``s`` is NaN where an entry is NaN or +inf.
    """
    width: tl.constexpr = _WORD_BYTES // (row_ptr.dtype.element_ty.primitive_bitwidth // 8)
    lanes: tl.constexpr = BLOCK_SIZE // (2 * width)
    half: tl.constexpr = BLOCK_SIZE // 2
    columns = tl.arange(0, lanes)[:, None] * width + tl.arange(0, width)[None, :]
    m = tl.full((lanes,), LOWEST, tl.float32)
    s = tl.zeros((lanes,), tl.float32)
    t = tl.zeros((lanes,), tl.float32)
    whole = begin + tl.maximum(end - begin, 0) // BLOCK_SIZE * BLOCK_SIZE
    for start in range(begin, whole, BLOCK_SIZE):
        a = tl.load(row_ptr + start + columns)
        b = tl.load(row_ptr + start + half + columns)
        m, s, t = _add(m, s, t, a.to(tl.float32), b.to(tl.float32))
    if whole < end:
        in_a, in_b = whole + columns < end, whole + half + columns < end
        a = tl.load(row_ptr + whole + columns, mask=in_a, other=float("-inf"))
        b = tl.load(row_ptr + whole + half + columns, mask=in_b, other=float("-inf"))
        m, s, t = _add(m, s, t, a.to(tl.float32), b.to(tl.float32))
    return merge_sums(m, s, t)


@triton.jit()
def _add(
    m,  # [lanes] float32
    s,  # [lanes] float32
    t,  # [lanes] float32
    a,  # [lanes, width] float32: one word of each lane
    b,  # [lanes, width] float32: another word of each lane
):
    """Returns (m, s, t) with the words added."""
    m_new = tl.maximum(m, tl.maximum(tl.max(a, axis=1), tl.max(b, axis=1)))
    shift = tl.maximum(m - m_new, _FAR)
    scale = tl.exp2(shift * _LOG2_E)
    a -= m_new[:, None]
    b -= m_new[:, None]
    e_a = tl.exp2(a * _LOG2_E)
    e_b = tl.exp2(b * _LOG2_E)
    products = tl.fma(tl.maximum(a, _FAR), e_a, tl.maximum(b, _FAR) * e_b)
    t = tl.fma(scale, tl.fma(shift, s, t), tl.sum(products, axis=1))
    s = tl.fma(scale, s, tl.sum(e_a + e_b, axis=1))
    return m_new, s, t


@triton.jit()
def merge_sums(
    m,  # [N] float32
    s,  # [N] float32
    t,  # [N] float32
):
    """Returns the scalars (m, s, t) of a row from those of N disjoint parts of it."""
    m_new = tl.max(m, axis=0)
    shift = tl.maximum(m - m_new, _FAR)
    scale = tl.exp2(shift * _LOG2_E)
    return m_new, tl.sum(scale * s, axis=0), tl.sum(scale * (t + shift * s), axis=0)


@triton.jit()
def nan_if_empty(s):
    """Returns the sum s of a row, NaN where the row has no finite entry."""
    return tl.where(s == 0.0, float("nan"), s)
