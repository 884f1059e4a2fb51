"""Which rows are measured, and what comes of them on a CPU without Triton."""

import numpy as np
import pytest
import torch

from meridian_patch.engine.early_exit.signals import MeasurePlan
from meridian_patch.engine.worker.logits_measurement import Meter, RowSelection
from meridian_patch.engine.worker.row_signals_cpu import row_signals_cpu
from meridian_patch.kernels.row_signals import row_signals_ref, usable_backend

INF = float("inf")


def on_host(logits, rows, boundary_id):
    return row_signals_cpu(logits, np.array(rows), boundary_id, logits.shape[1])


def test_spans_keep_the_order_of_the_batch():
    """Rows of a request are contiguous; who is not in the batch is passed over."""
    selection = RowSelection(MeasurePlan(("c", "gone", "a"), 0), ["a", "b", "c"], [0, 2, 3, 6])
    assert selection.names == ["a", "c"]
    assert selection.counts == [2, 3]
    assert selection.rows.tolist() == [0, 1, 3, 4, 5]


def test_spans_know_when_the_batch_has_changed():
    """The runner goes on with the same list; a new plan for the same requests is the same."""
    batch, plan = ["a", "b"], MeasurePlan(("a",), 0)
    selection = RowSelection(plan, batch, None)
    assert selection.are_of(MeasurePlan(("a",), 1), batch, None)
    assert not selection.are_of(plan, batch, [0, 1, 2])
    assert not selection.are_of(MeasurePlan(("b",), 0), batch, None)
    batch.reverse()
    assert not selection.are_of(plan, batch, None)


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16))
@pytest.mark.parametrize("rows", ([0], [1, 4], [0, 1, 2, 3, 4]))
def test_host_signals_are_those_of_the_reference(dtype, rows):
    """Of padded logits with masked entries, to 1e-5 of float64."""
    torch.manual_seed(1)
    logits = (5 * torch.randn(5, 128)).to(dtype)[:, :100]
    logits[4, 10:90] = -INF
    before = logits.clone()
    got = torch.from_numpy(on_host(logits, rows, 20)).double()
    torch.testing.assert_close(
        got, row_signals_ref(logits, torch.tensor(rows), 20), rtol=1e-5, atol=1e-6
    )
    assert torch.equal(logits, before)


def test_certain_row_has_no_entropy():
    """One token that may be said: entropy 0, probability 1."""
    logits = torch.full((1, 9), -INF)
    logits[0, 4] = 2.5
    assert on_host(logits, [0], 4).tolist() == [[0.0, 2.5, 1.0, 1.0]]


@pytest.mark.parametrize("bad", (float("nan"), INF, None))
def test_row_without_a_distribution_is_nan(bad):
    """NaN, +inf or nothing that may be said: four NaN, and the row beside it is as ever."""
    logits = torch.randn(2, 9)
    if bad is None:
        logits[0] = -INF
    else:
        logits[0, 3] = bad
    got = torch.from_numpy(on_host(logits, [0, 1], 4))
    assert got[0].isnan().all()
    assert got[1].isfinite().all()


@pytest.mark.parametrize("boundary_id", (-1, 9))
def test_boundary_outside_of_the_vocabulary_is_refused(boundary_id):
    """A negative index would silently count from the end."""
    with pytest.raises(ValueError, match=f"boundary_id is {boundary_id}, expected 0 to 8"):
        on_host(torch.zeros(1, 9), [0], boundary_id)


def test_meter_cuts_the_padding_off():
    """Columns beyond the vocabulary take no part; numbers come back by request."""
    logits = torch.zeros(2, 16)
    logits[:, 10:] = 50.0
    selection = RowSelection(MeasurePlan(("b",), 0), ["a", "b"], None)
    [[entropy, lse, top, end]] = Meter(10).measure(logits, selection, 3).read().by_request()["b"]
    assert entropy == pytest.approx(lse) == pytest.approx(2.302585)
    assert top == pytest.approx(end) == pytest.approx(0.1)


def test_long_rows_keep_their_digits():
    """A real vocabulary, to 1e-5 of float64."""
    torch.manual_seed(2)
    logits = 4 * torch.randn(2, 151_936)
    got = torch.from_numpy(on_host(logits, [1], 7)).double()
    torch.testing.assert_close(
        got, row_signals_ref(logits, torch.tensor([1]), 7), rtol=1e-5, atol=1e-9
    )


def test_a_nearly_certain_row_keeps_its_digits():
    """Many small probabilities behind one near 1, to 1e-4: what EAT looks at."""
    torch.manual_seed(3)
    logits = torch.randn(1, 264)
    logits[0, 4] = 14.0
    got = torch.from_numpy(on_host(logits, [0], 4)).double()
    expected = row_signals_ref(logits, torch.tensor([0]), 4)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=0)


def test_a_warm_meter_measures_the_same_on_a_cpu(monkeypatch):
    """From then on the compiled function does it: torch's way is not taken any more."""
    assert usable_backend(torch.device("cpu")) == "torch"
    selection, logits = RowSelection(MeasurePlan(("a",), 0), ["a"], None), torch.randn(1, 10)
    meter = Meter(10)
    cold = meter.measure(logits, selection, 3).read().by_request()["a"].tolist()
    meter.warm_up(torch.device("cpu"), {torch.float32})
    monkeypatch.delattr("meridian_patch.engine.worker.logits_measurement.row_signals")
    warm = meter.measure(logits, selection, 3).read().by_request()["a"].tolist()
    assert warm == [pytest.approx(cold[0])]
