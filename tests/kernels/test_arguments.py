"""What does not fit is refused with the argument's name, what came and what was expected."""

import math
import subprocess
import sys

import pytest
import torch
from kernel_cases import DEVICE, indices, random_logits

from meridian_patch.kernels.eat_update import EatColumn, eat_update
from meridian_patch.kernels.row_signals import row_signals

LOGITS = random_logits(4, 10, torch.float32)
BOTH = indices(0, 1)
STATE = torch.zeros(3, len(EatColumn), device=DEVICE)
OUT = torch.zeros(2, 4, device=DEVICE)
META = torch.device("meta")

ROW_SIGNALS = {"logits": LOGITS, "rows": BOTH, "boundary_id": 3}
EAT_UPDATE = {
    "state": STATE,
    "logits": LOGITS,
    "rows": BOTH,
    "slots": BOTH,
    "alpha": 0.2,
    "warm_up": 4,
    "max_entropy": 3.0,
}

WRONG_LOGITS = [
    ({"logits": LOGITS[0]}, "logits has shape [10], expected [num_rows, n_cols > 0]"),
    ({"logits": LOGITS[:, :0]}, "logits has shape [4, 0], expected [num_rows, n_cols > 0]"),
    (
        {"logits": LOGITS.double()},
        "logits is torch.float64, expected float32, bfloat16 or float16",
    ),
    ({"logits": LOGITS.t()}, "logits has strides [1, 10], expected 1 for the last dimension"),
    ({"logits": LOGITS[:, ::2]}, "logits has strides [10, 2], expected 1 for the last dimension"),
    ({"rows": BOTH[None]}, "rows has shape [1, 2], expected [n_rows]"),
    ({"rows": BOTH.short()}, "rows is torch.int16, expected int32 or int64"),
    ({"rows": indices(0, 0, 1)[::2]}, "rows has stride 2, expected 1"),
    ({"rows": BOTH.to(META)}, f"rows is on meta, expected {LOGITS.device} as logits"),
    ({"backend": "cuda"}, "backend is 'cuda', expected 'triton' or 'torch'"),
]
WRONG_SIGNALS = [
    ({"boundary_id": 10}, "boundary_id is 10, expected 0 to 9"),
    ({"boundary_id": -1}, "boundary_id is -1, expected 0 to 9"),
    ({"out": OUT[:1]}, "out has shape [1, 4], expected [2, 4]"),
    ({"out": OUT[:, :3]}, "out has shape [2, 3], expected [2, 4]"),
    ({"out": OUT.half()}, "out is torch.float16, expected torch.float32"),
    (
        {"out": torch.zeros(4, 2, device=DEVICE).t()},
        "out has strides [1, 2], expected 1 for the last dimension",
    ),
    ({"out": OUT.to(META)}, f"out is on meta, expected {LOGITS.device} as logits"),
]
WRONG_UPDATE = [
    ({"slots": indices(0)}, "slots has 1 entries, expected 2 as rows"),
    ({"slots": BOTH.float()}, "slots is torch.float32, expected int32 or int64"),
    ({"state": STATE[:, :6]}, "state has shape [3, 6], expected [any, 7]"),
    ({"state": STATE.double()}, "state is torch.float64, expected torch.float32"),
    ({"state": STATE.to(META)}, f"state is on meta, expected {LOGITS.device} as logits"),
    ({"alpha": 0.0}, "alpha is 0.0, expected a number between 0 and 1"),
    ({"alpha": 1.0}, "alpha is 1.0, expected a number between 0 and 1"),
    ({"alpha": math.nan}, "alpha is nan, expected a number between 0 and 1"),
    ({"warm_up": 0}, "warm_up is 0, expected at least 1"),
    ({"max_entropy": 0.0}, "max_entropy is 0.0, expected a number above 0"),
    ({"max_entropy": math.nan}, "max_entropy is nan, expected a number above 0"),
]


def named(cases: list) -> list:
    return [pytest.param(wrong, message, id=message.split(",")[0]) for wrong, message in cases]


@pytest.mark.parametrize(("wrong", "message"), named(WRONG_LOGITS + WRONG_SIGNALS))
def test_row_signals_refuses(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        row_signals(**ROW_SIGNALS | wrong)
    assert str(caught.value) == message


@pytest.mark.parametrize(("wrong", "message"), named(WRONG_LOGITS + WRONG_UPDATE))
def test_eat_update_refuses(wrong: dict, message: str) -> None:
    before = STATE.clone()
    with pytest.raises(ValueError) as caught:
        eat_update(**EAT_UPDATE | wrong)
    assert str(caught.value) == message
    assert torch.equal(STATE, before)


def test_what_fits_is_taken() -> None:
    """The arguments that the cases above spoil one at a time are right."""
    assert row_signals(**ROW_SIGNALS, out=OUT).isfinite().all()
    assert eat_update(**EAT_UPDATE | {"state": STATE.clone()})[:, EatColumn.COUNT].sum() == 2


ON_CPU = """
import torch
from meridian_patch.kernels import _launch, row_signals
logits, rows = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64)
print(_launch.HAS_TRITON, row_signals.row_signals(logits, rows, 0, backend="torch").tolist())
row_signals.row_signals(logits, rows, 0)
"""
WITHOUT_TRITON = 'import sys\nsys.modules["triton"] = None\n'


def run_outside_of_interpreter(code: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


def test_triton_on_a_cpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outside of the interpreter; the torch backend works there."""
    run = run_outside_of_interpreter(ON_CPU, monkeypatch)
    assert run.stdout.startswith("True [[1.38")
    assert run.stderr.endswith(
        "ValueError: logits is on cpu, expected a GPU for backend='triton'; pass backend='torch', "
        "or set TRITON_INTERPRET=1 before triton is imported\n"
    )


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules import and the torch backend works; "triton" is refused, not replaced."""
    run = run_outside_of_interpreter(WITHOUT_TRITON + ON_CPU, monkeypatch)
    assert run.stdout.startswith("False [[1.38")
    message = "backend is 'triton', but Triton is not installed; pass backend='torch'"
    assert run.stderr.endswith(f"RuntimeError: {message}\n")


ASKED = """
import torch
from meridian_patch.kernels.row_signals import usable_backend
print(usable_backend(torch.device("cpu")), usable_backend(torch.device("cuda")))
"""


def test_usable_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton where it is installed, on a CPU in its interpreter alone."""
    here = run_outside_of_interpreter(ASKED, monkeypatch)
    assert here.stdout.split() == ["torch", "triton"]
    without = run_outside_of_interpreter(WITHOUT_TRITON + ASKED, monkeypatch)
    assert without.stdout.split() == ["torch", "torch"]
    interpreted = 'import os\nos.environ["TRITON_INTERPRET"] = "1"\n'
    inside = run_outside_of_interpreter(interpreted + ASKED, monkeypatch)
    assert inside.stdout.split() == ["triton", "triton"]
