"""The worker's meter on a GPU: it waits for nothing, reads before the sampler writes, is warm."""

import numpy as np
import pytest
import torch
from kernel_cases import DEVICE, random_logits

from meridian_patch.engine.early_exit.signals import MeasurePlan
from meridian_patch.engine.worker.logits_measurement import Meter, RowSelection
from meridian_patch.kernels._launch import rows_that_fill
from meridian_patch.kernels.row_signals import (
    _merge_parts_kernel,
    _part_sums_kernel,
    _row_signals_kernel,
    row_signals_ref,
)

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")

VOCAB, PADDED = 151669, 151680
SELECTION = RowSelection(MeasurePlan(("b", "c"), 7), ["a", "b", "c"], [0, 1, 3, 4])


def compiled() -> int:
    kernels = (_row_signals_kernel, _part_sums_kernel, _merge_parts_kernel)
    return sum(len(each.device_caches[torch.cuda.current_device()][0]) for each in kernels)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("width", (VOCAB, PADDED))
def test_a_step_is_measured_without_waiting(dtype: torch.dtype, width: int) -> None:
    """No synchronisation and, after the warm-up, no compilation; later writes change nothing."""
    meter = Meter(VOCAB)
    meter.warm_up(DEVICE, {torch.bfloat16, torch.float32})
    logits = random_logits(4, width, dtype)
    want = row_signals_ref(logits[:, :VOCAB].clone(), torch.tensor([1, 2, 3], device=DEVICE), 7)
    n_compiled = compiled()
    many = rows_that_fill(DEVICE) + 1
    whole_rows = RowSelection(MeasurePlan(("b",), 7), ["b"], [0, many])
    torch.cuda.set_sync_debug_mode("error")
    try:
        # So many rows are not split, and so another kernel reads them.
        meter.measure(logits, whole_rows, 7)
        measured = meter.measure(logits, SELECTION, 7)
        logits.zero_()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got = measured.read().by_request()
    assert compiled() == n_compiled
    assert [len(got["b"]), len(got["c"])] == [2, 1]
    rows = torch.from_numpy(np.concatenate([got["b"], got["c"]])).double()
    torch.testing.assert_close(rows, want.cpu(), rtol=1e-4, atol=1e-6)


def test_numbers_of_many_steps_do_not_mix() -> None:
    """Steps are read later and in another order than they were measured, as outputs are."""
    meter = Meter(VOCAB)
    steps = [random_logits(4, PADDED, torch.bfloat16, seed=seed) for seed in range(8)]
    rows = torch.tensor([1, 2, 3], device=DEVICE)
    wanted = [row_signals_ref(each[:, :VOCAB].clone(), rows, 7)[:, 0].tolist() for each in steps]
    measured = [meter.measure(each, SELECTION, 7) for each in steps]
    for step, want in reversed(list(zip(measured, wanted, strict=True))):
        got = step.read().by_request()
        assert [row[0] for row in (*got["b"], *got["c"])] == pytest.approx(want, rel=1e-4)
