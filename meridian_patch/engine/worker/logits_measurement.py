"""Measures rows of logits and copies the results to the host without blocking the GPU."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from meridian_patch.engine.early_exit.signals import MeasuredSignals, MeasurePlan
from meridian_patch.kernels.row_signals import row_signals, rows_that_fill, usable_backend

# Rows of the model's output layer are padded to a multiple of this (vLLM's default).
VOCAB_PADDING = 64


class RowSelection:
    """Which rows of a step's logits belong to which request.

    Attributes:
        names: ids of requests with rows, in the order of the batch.
        counts: number of rows of each; None: one each, the usual case.
        rows: row indices, with those of a request next to each other; int64.
    """

    def __init__(
        self, plan: MeasurePlan, req_ids: Sequence[str], starts: Sequence[int] | None
    ) -> None:
        """Pick the planned requests' rows.

        Args:
            plan: the requests to measure.
            req_ids: the requests of the batch, in its order.
            starts: first row of each request, followed by the number of rows; None: one row each.
        """
        self._asked = plan.request_ids, list(req_ids), starts
        wanted = set(plan.request_ids)
        self.counts: list[int] | None = None
        picked = [index for index, name in enumerate(req_ids) if name in wanted]
        self.names = [req_ids[index] for index in picked]
        rows = picked
        if starts is not None:
            ranges = [(starts[index], starts[index + 1]) for index in picked]
            self.counts = [end - start for start, end in ranges]
            rows = [row for start, end in ranges for row in range(start, end)]
        self.rows = np.array(rows, np.int64)

    def are_of(
        self, plan: MeasurePlan, req_ids: Sequence[str], starts: Sequence[int] | None
    ) -> bool:
        """Whether these arguments would make an equal object."""
        return self._asked == (plan.request_ids, req_ids, starts)


class Measured:
    """Signals of one step, which may still be being copied to the host."""

    def __init__(
        self,
        selection: RowSelection,
        values: torch.Tensor | np.ndarray,
        copied: torch.cuda.Event | None = None,
        source: torch.Tensor | None = None,
    ) -> None:
        """Hold a step's values.

        Args:
            selection: the rows that were measured.
            values: [n_rows, 4], readable once the event ``copied`` has occurred.
            copied: None if the values are readable already.
            source: source of the copy; kept alive because another stream reads it.
        """
        self._selection = selection
        self._values = values
        self._copied = copied
        self._source = source

    def read(self) -> MeasuredSignals:
        """Wait for the values and return them; blocks only this thread."""
        if self._copied is not None:
            self._copied.synchronize()
        values, selection = self._values, self._selection
        if isinstance(values, torch.Tensor):
            # Copied, because the scheduler keeps rows for long, and a view would keep the pinned
            # memory alive.
            values = values.numpy().copy()
        return MeasuredSignals(selection.names, selection.counts, values)


class Meter:
    """Measures on one device, for one vocabulary.

    The kernel runs on the current stream, because samplers change the logits in place afterwards.
    Only the copy to the host, 16 bytes per row, has its own stream. No method waits for the GPU.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._copy_stream: torch.cuda.Stream | None = None
        # Replaces ``row_signals`` on a CPU without Triton.
        self._on_host: Callable[[torch.Tensor, np.ndarray, int, int], np.ndarray] | None = None

    def measure(self, logits: torch.Tensor, selection: RowSelection, boundary_id: int) -> Measured:
        """Start measuring.

        Args:
            logits: [n_rows, at least vocab_size], as the sampler gets them. Not modified.
            selection: the rows to measure.
            boundary_id: the token whose probability is measured.

        Raises:
            ValueError: ``boundary_id`` is outside of the vocabulary, or raised by row_signals.
        """
        if self._on_host is not None:
            values = self._on_host(logits, selection.rows, boundary_id, self._vocab_size)
            return Measured(selection, values)
        device = logits.device
        logits = logits[:, : self._vocab_size]
        rows = self._on_device(selection.rows, device)
        values = row_signals(logits, rows, boundary_id, backend=usable_backend(device))
        if device.type != "cuda":
            return Measured(selection, values)
        stream, copied = self._stream(device), torch.cuda.Event(blocking=True)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            host = values.to("cpu", non_blocking=True)
            copied.record(stream)
        return Measured(selection, host, copied, source=values)

    def warm_up(self, device: torch.device, dtypes: set[torch.dtype]) -> None:
        """Compile the kernels of :meth:`measure`, for logits of these types, padded or not."""
        if usable_backend(device) != "triton":
            if device.type == "cpu":
                # Imported here because the import compiles code that only this case needs.
                from meridian_patch.engine.worker.row_signals_cpu import row_signals_cpu

                self._on_host = row_signals_cpu
            return
        if device.type == "cpu":
            return
        padded = -(-self._vocab_size // VOCAB_PADDING) * VOCAB_PADDING
        for dtype in dtypes:
            for width in {self._vocab_size, padded}:
                logits = torch.zeros(1, width, dtype=dtype, device=device)
                # A few rows are split and many are not, with different kernels. Row indices beyond
                # the logits are not read.
                for n_rows in (1, rows_that_fill(device)):
                    selection = RowSelection(MeasurePlan(("",), 0), [""], [0, n_rows])
                    self.measure(logits, selection, 0).read()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if self._copy_stream is None:
            self._copy_stream = torch.cuda.Stream(device)
        return self._copy_stream

    @staticmethod
    def _on_device(rows: np.ndarray, device: torch.device) -> torch.Tensor:
        if device.type != "cuda":
            return torch.from_numpy(rows).to(device)
        # Copied from pinned memory, because otherwise the copy would wait for the GPU.
        return torch.from_numpy(rows).pin_memory().to(device, non_blocking=True)
