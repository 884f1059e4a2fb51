"""Fixtures that every kind of test may use."""

from pathlib import Path

import pytest

import meridian_patch.demo

# Without a GPU these want a process of their own: `pytest tests/kernels`, as scripts/test does.
collect_ignore = ["kernels"]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the packaged tiny reasoner."""
    return Path(meridian_patch.demo.__file__).parent / "tiny-reasoner"
