"""Measures rows of logits and brings the numbers to the host without stopping the GPU."""

from collections.abc import Sequence

import numpy as np
import torch

from meridian_patch.engine.signals import MeasurePlan, Signals
from meridian_patch.kernels.row_signals import row_signals, usable_backend

# Rows of the model's output layer are padded to a multiple of this (vLLM's default).
VOCAB_PADDING = 64


class Spans:
    """Which rows of a step's logits belong to whom.

    Attributes:
        owners: request ids, each with its number of rows.
        rows: the rows, those of a request side by side, in the order of ``owners``.
        has_one_each: every request of the batch has one row, as nearly always.
    """

    def __init__(self, plan: MeasurePlan, req_ids: Sequence[str], starts: Sequence[int]) -> None:
        """Pick the planned requests' rows.

        Args:
            plan: whose rows.
            req_ids: the requests of the batch, in its order.
            starts: the first row of each, and after them the number of rows.
        """
        wanted = set(plan.request_ids)
        self.owners: list[tuple[str, int]]
        self.rows: list[int]
        self.has_one_each = list(starts) == list(range(len(req_ids) + 1))
        if self.has_one_each:
            self.rows = [row for row, name in enumerate(req_ids) if name in wanted]
            self.owners = [(req_ids[row], 1) for row in self.rows]
            return
        self.owners, self.rows = [], []
        for request_id, start, end in zip(req_ids, starts[:-1], starts[1:], strict=True):
            if request_id in wanted:
                self.owners.append((request_id, end - start))
                self.rows.extend(range(start, end))


class Measured:
    """Signals of one step, on their way to the host."""

    def __init__(
        self,
        spans: Spans,
        values: torch.Tensor | np.ndarray,
        copied: torch.cuda.Event | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        """Take over a step's numbers.

        Args:
            spans: whose they are.
            values: [n_rows, 4], readable once ``copied`` has happened.
            copied: None when the values are there.
            source: what is copied from; kept until then, because another stream reads it.
        """
        self._spans = spans
        self._values = values
        self._copied = copied
        self._source = source

    def read(self) -> Signals:
        """Wait for the numbers, on this thread alone, and sort them by request."""
        if self._copied is not None:
            self._copied.synchronize()
        values, owners = self._values.tolist(), self._spans.owners
        if self._spans.has_one_each:
            return {name: [row] for (name, _), row in zip(owners, values, strict=True)}
        rows = iter(values)
        return {name: [next(rows) for _ in range(n_rows)] for name, n_rows in owners}


class Meter:
    """Measures on one device, for one vocabulary.

    The kernel runs on the current stream, because samplers go on to change the logits in place;
    only the copy to the host, 16 bytes per row, has a stream of its own. Nothing here waits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._copy_stream: torch.cuda.Stream | None = None

    def measure(self, logits: torch.Tensor, spans: Spans, boundary_id: int) -> Measured:
        """Start measuring.

        Args:
            logits: [n_rows, at least vocab_size], as the sampler gets them. Not modified.
            spans: the rows to measure.
            boundary_id: the token whose probability is wanted.

        Raises:
            ValueError: ``boundary_id`` is outside of the vocabulary, or what row_signals raises.
        """
        device = logits.device
        logits = logits[:, : self._vocab_size]
        backend = usable_backend(device)
        if device.type == "cpu" and backend == "torch":
            return Measured(spans, row_signals_on_host(logits, spans.rows, boundary_id))
        rows = self._on_device(spans.rows, device)
        values = row_signals(logits, rows, boundary_id, backend=backend)
        if device.type != "cuda":
            return Measured(spans, values)
        stream, copied = self._stream(device), torch.cuda.Event(blocking=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host = values.to("cpu", non_blocking=True)
            copied.record(stream)
        return Measured(spans, host, copied, source=values)

    def warm_up(self, device: torch.device, dtypes: set[torch.dtype]) -> None:
        """Compile what :meth:`measure` will run, for logits of these types, padded or not."""
        if device.type == "cpu" or usable_backend(device) != "triton":
            return
        padded = -(-self._vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        for dtype in dtypes:
            for width in {self._vocab_size, padded}:
                logits = torch.zeros(1, width, dtype=dtype, device=device)
                spans = Spans(MeasurePlan(("",), 0), [""], [0, 1])
                self.measure(logits, spans, 0).read()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)
        return self._copy_stream

    @staticmethod
    def _on_device(rows: list[int], device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            return torch.tensor(rows, dtype=torch.int64, device=device)
        # From pinned memory, or the copy would wait for the GPU to come to it.
        pinned = torch.tensor(rows, dtype=torch.int64, pin_memory=True)
        return pinned.to(device, non_blocking=True)


# Stands for -inf times a probability of zero, which is no number.
_LEAST = np.float32(-1e30)


def row_signals_on_host(logits: torch.Tensor, rows: list[int], boundary_id: int) -> np.ndarray:
    """``row_signals`` of logits in main memory, where there is no Triton; [n_rows, 4] float32.

    NumPy takes a quarter of torch's time for the few small rows of a step. Same rules: -inf has
    probability zero, a row with NaN or +inf in it or nothing but -inf gives four NaN.

    Raises:
        ValueError: ``boundary_id`` is outside of the vocabulary.
    """
    n_rows, n_cols = logits.shape
    if not 0 <= boundary_id < n_cols:
        raise ValueError(f"boundary_id is {boundary_id}, expected 0 to {n_cols - 1}")
    x = logits.float().numpy()
    if len(rows) < n_rows:
        x = x[rows]
    with np.errstate(invalid="ignore"):
        m = x.max(axis=1)
        x = x - m[:, None]
        np.maximum(x, _LEAST, out=x)
        e = np.exp(x)
        s = e.sum(axis=1)
        log_s = np.log(s)
        entropy = log_s - np.einsum("ij,ij->i", e, x) / s
        return np.stack([entropy, m + log_s, 1 / s, e[:, boundary_id] / s], axis=1)
