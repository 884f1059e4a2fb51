"""What only a GPU can show: captured graphs, streams, no synchronisation, offsets beyond 2^31."""

import pytest
import torch
from kernel_cases import DEVICE, indices, random_logits, same_bits

from meridian_patch.kernels.eat_update import EatColumn, eat_update
from meridian_patch.kernels.row_signals import row_signals, row_signals_ref

pytestmark = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA GPU")

N_COLS = 151936
SETTINGS = {"alpha": 0.2, "warm_up": 2, "max_entropy": 20.0}


class Buffers:
    """What a serving step would hold on to."""

    def __init__(self):
        self.logits = random_logits(8, N_COLS, torch.bfloat16)
        self.rows, self.slots = indices(0, 3, 7, -1), indices(2, 0, 1, -1)
        self.out = torch.zeros(4, 4, device=DEVICE)
        self.state = torch.zeros(3, len(EatColumn), device=DEVICE)

    def run(self) -> None:
        row_signals(self.logits, self.rows, 7, out=self.out)
        eat_update(self.state, self.logits, self.rows, self.slots, **SETTINGS)


def assert_same_results(a: Buffers, b: Buffers) -> None:
    assert same_bits(a.out, b.out)
    assert same_bits(a.state, b.state)


@pytest.mark.parametrize("n_rows", [8, 64, 256, 1024])
def test_many_rows(n_rows: int) -> None:
    """Split rows and whole ones, of a served vocabulary."""
    logits = random_logits(7, N_COLS, torch.bfloat16)
    rows = torch.arange(n_rows, device=DEVICE) % len(logits)
    want = row_signals_ref(logits, torch.arange(7, device=DEVICE), 7)
    torch.testing.assert_close(
        row_signals(logits, rows, 7).double(), want[rows], rtol=1e-5, atol=1e-6
    )


def test_graph_capture() -> None:
    """A captured step reads its inputs anew at each replay."""
    captured, eager = Buffers(), Buffers()
    captured.run()
    captured.state.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run()
    for seed in range(3):
        for buffers in (captured, eager):
            buffers.logits.copy_(random_logits(8, N_COLS, torch.bfloat16, seed=seed))
            buffers.rows.copy_(indices(seed, -1, 5, 6))
        graph.replay()
        eager.run()
        assert_same_results(captured, eager)
    assert eager.state[:, EatColumn.COUNT].tolist() == [0, 3, 3]


def test_no_synchronisation_and_no_request_to_the_driver() -> None:
    """Sums of split rows come out of what torch's allocator has; the driver would wait."""
    buffers = Buffers()
    buffers.run()
    allocated = torch.cuda.memory_stats()["segment.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        buffers.run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["segment.all.allocated"] == allocated


def test_side_stream() -> None:
    """Work goes to the current stream."""
    here, aside = Buffers(), Buffers()
    here.run()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        aside.run()
    stream.synchronize()
    assert_same_results(here, aside)


@pytest.mark.slow
def test_offsets_beyond_int32() -> None:
    """The last row starts more than 2^31 elements behind the first."""
    num_rows, stride = 2**14 + 2, 2**17
    assert (num_rows - 1) * stride > 2**31
    storage = torch.empty(num_rows * stride, dtype=torch.bfloat16, device=DEVICE)
    logits = storage.view(num_rows, stride)[:, :1000]
    logits[-1] = random_logits(1, 1000, torch.bfloat16)[0]
    last = indices(num_rows - 1)
    got = row_signals(logits, last, 3)
    want = row_signals_ref(logits[-1:].clone(), indices(0), 3)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)
    state = torch.zeros(1, len(EatColumn), device=DEVICE)
    eat_update(state, logits, last, indices(0), **SETTINGS)
    torch.testing.assert_close(state[0, EatColumn.ENTROPY], got[0, 0])
