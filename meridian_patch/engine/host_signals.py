"""``row_signals`` of logits in main memory, where there is no Triton."""

import numpy as np
import torch

# Stands for -inf times a probability of zero, which is no number.
_LEAST = np.float32(-1e30)


class HostMeter:
    """As ``row_signals``, in as few calls as can be.

    A step of a small model takes a millisecond, and leaves the caches full of its weights: a call
    of NumPy's, which takes one microsecond in a loop, takes four there, and one of torch's more.
    Between steps of the same shape the work space is kept.
    """

    def __init__(self) -> None:
        self._shifted = self._exp = np.empty((0, 0), np.float32)

    def __call__(self, logits: torch.Tensor, rows: list[int], boundary_id: int) -> np.ndarray:
        """Measure.

        Args:
            logits: [n_rows, n_cols] of any floating dtype.
            rows: which of them.
            boundary_id: the token whose probability is wanted.

        Returns:
            [len(rows), 4] float32. A row with NaN or +inf in it, or with nothing but -inf, gives
            four NaN.

        Raises:
            ValueError: ``boundary_id`` is outside of the vocabulary.
        """
        n_rows, n_cols = logits.shape
        if not 0 <= boundary_id < n_cols:
            raise ValueError(f"boundary_id is {boundary_id}, expected 0 to {n_cols - 1}")
        x = logits.float().numpy()
        if len(rows) < n_rows:
            x = x[rows]
        if self._exp.shape != x.shape:
            self._shifted, self._exp = np.empty(x.shape, np.float32), np.empty(x.shape, np.float32)
        shifted, e = self._shifted, self._exp
        with np.errstate(invalid="ignore"):
            m = np.maximum.reduce(x, axis=1)
            np.subtract(x, m[:, None], out=shifted)
            np.maximum(shifted, _LEAST, out=shifted)
            np.exp(shifted, out=e)
            # In pairs; one after the other, small terms would be lost behind a probability near 1.
            s = np.add.reduce(e, axis=1)
            boundary = e[:, boundary_id] / s
            np.multiply(e, shifted, out=e)
            t = np.add.reduce(e, axis=1)
            log_s = np.log(s)
            out = np.empty((len(rows), 4), np.float32)
            out[:, 0] = log_s - t / s
            out[:, 1] = m + log_s
            out[:, 2] = 1 / s
            out[:, 3] = boundary
        return out
