"""docs/configuration.md is what the schema says."""

from pathlib import Path

from meridian_patch.config.docs import render_configuration
from meridian_patch.config.family_files import load_families

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "configuration.md"


def test_page_is_current():
    """A changed schema or family file needs `python scripts/gen_docs.py`."""
    assert PAGE.read_text() == render_configuration()


def test_page_names_every_key_and_family():
    """Nothing that can be set is left out."""
    page = render_configuration()
    assert "`policy.time_budget_us` | int | `3000` | ≥ 50" in page
    assert "`MERIDIAN_PATCH_SET_POLICY__NAME`" in page
    assert "latency or noop" in page
    for name in load_families():
        assert f"\n| `{name}` |" in page
