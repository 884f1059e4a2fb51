"""Without a GPU the kernels run in Triton's interpreter, which must be chosen before the import."""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":  # noqa: TID251
        raise pytest.UsageError(
            "tests/kernels needs a process in which triton is not imported yet: run it alone, "
            "as `pytest tests/kernels`, or set TRITON_INTERPRET=1"
        )
    os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251


def pytest_configure(config: pytest.Config) -> None:
    """The interpreter is NumPy, which warns where all that a lane has read is NaN."""
    config.addinivalue_line("filterwarnings", "ignore:All-NaN slice encountered:RuntimeWarning")


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; both promise the same."""
    return request.param
