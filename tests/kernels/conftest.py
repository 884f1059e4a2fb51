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


@pytest.fixture(params=["triton", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend in turn; both promise the same."""
    return request.param
