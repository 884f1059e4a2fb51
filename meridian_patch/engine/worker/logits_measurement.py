"""Measures rows of logits and brings the numbers to the host without stopping the GPU."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from meridian_patch.engine.early_exit.signals import MeasurePlan, Signals
from meridian_patch.kernels.row_signals import row_signals, rows_that_fill, usable_backend

# Rows of the model's output layer are padded to a multiple of this (vLLM's default).
VOCAB_PADDING = 64


class Spans:
    """Which rows of a step's logits belong to whom.

    Attributes:
        names: request ids that have rows, in the order of the batch.
        counts: how many each has; None: one each, as nearly always.
        rows: the rows, those of a request side by side; int64.
    """

    def __init__(
        self, plan: MeasurePlan, req_ids: Sequence[str], starts: Sequence[int] | None
    ) -> None:
        """Pick the planned requests' rows.

        Args:
            plan: whose rows.
            req_ids: the requests of the batch, in its order.
            starts: the first row of each, and after them the number of rows; None: one each.
        """
        self._asked = plan.request_ids, list(req_ids), starts
        wanted = set(plan.request_ids)
        self.counts: list[int] | None = None
        picked = [index for index, name in enumerate(req_ids) if name in wanted]
        self.names = [req_ids[index] for index in picked]
        rows = picked
        if starts is not None:
            spans = [(starts[index], starts[index + 1]) for index in picked]
            self.counts = [end - start for start, end in spans]
            rows = [row for start, end in spans for row in range(start, end)]
        self.rows = np.array(rows, np.int64)

    def are_of(
        self, plan: MeasurePlan, req_ids: Sequence[str], starts: Sequence[int] | None
    ) -> bool:
        """Whether these arguments would make the same again."""
        return self._asked == (plan.request_ids, req_ids, starts)


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
        """Wait for the numbers, on this thread alone."""
        if self._copied is not None:
            self._copied.synchronize()
        values, spans = self._values, self._spans
        if isinstance(values, torch.Tensor):
            # A copy: scheduler and controllers keep rows for long, and a view would keep pinned
            # memory for as long.
            values = values.numpy().copy()
        return Signals(spans.names, spans.counts, values)


class Meter:
    """Measures on one device, for one vocabulary.

    The kernel runs on the current stream, because samplers go on to change the logits in place;
    only the copy to the host, 16 bytes per row, has a stream of its own. Nothing here waits.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._copy_stream: torch.cuda.Stream | None = None
        # In place of ``row_signals``.
        self._on_host: Callable[[torch.Tensor, np.ndarray, int, int], np.ndarray] | None = None

    def measure(self, logits: torch.Tensor, spans: Spans, boundary_id: int) -> Measured:
        """Start measuring.

        Args:
            logits: [n_rows, at least vocab_size], as the sampler gets them. Not modified.
            spans: the rows to measure.
            boundary_id: the token whose probability is wanted.

        Raises:
            ValueError: ``boundary_id`` is outside of the vocabulary, or what row_signals raises.
        """
        if self._on_host is not None:
            values = self._on_host(logits, spans.rows, boundary_id, self._vocab_size)
            return Measured(spans, values)
        device = logits.device
        logits = logits[:, : self._vocab_size]
        rows = self._on_device(spans.rows, device)
        values = row_signals(logits, rows, boundary_id, backend=usable_backend(device))
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
        if usable_backend(device) != "triton":
            if device.type == "cpu":
                # Compiles, which nobody else needs.
                from meridian_patch.engine.worker.row_signals_cpu import row_signals_cpu

                self._on_host = row_signals_cpu
            return
        if device.type == "cpu":
            return
        padded = -(-self._vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        for dtype in dtypes:
            for width in {self._vocab_size, padded}:
                logits = torch.zeros(1, width, dtype=dtype, device=device)
                # Few rows are split, many are not, and each way has kernels of its own. Rows that
                # logits does not have are not read.
                for n_rows in (1, rows_that_fill(device)):
                    spans = Spans(MeasurePlan(("",), 0), [""], [0, n_rows])
                    self.measure(logits, spans, 0).read()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)
        return self._copy_stream

    @staticmethod
    def _on_device(rows: np.ndarray, device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            return torch.from_numpy(rows).to(device)
        # From pinned memory, or the copy would wait for the GPU to come to it.
        return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)
