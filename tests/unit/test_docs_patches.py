"""The generated pages are as the code says."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from meridian_patch.engine.wire import RIDERS
from meridian_patch.exit.strategies.build import LISTED, REASONS
from meridian_patch.patches import PATCHES, REBINDINGS
from meridian_patch.patches.lock import LOCKED_VERSIONS

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def gen_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gen_docs", ROOT / "scripts" / "gen_docs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_fresh(gen_docs: ModuleType) -> None:
    """Every generated page is what scripts/gen_docs.py would write now."""
    assert gen_docs.stale_pages() == [], "run python scripts/gen_docs.py"


def test_stale_page_is_found(
    gen_docs: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A missing or edited page fails --check, which writes nothing; without it, it is written."""
    page = tmp_path / "docs" / "patches.md"
    page.parent.mkdir()
    monkeypatch.setattr(gen_docs, "ROOT", tmp_path)
    monkeypatch.setattr(gen_docs, "PAGES", {"docs/patches.md": gen_docs.render_patches})
    assert gen_docs.main(["--check"]) == 1
    assert "docs/patches.md is stale; run python scripts/gen_docs.py" in capsys.readouterr().err
    assert not page.exists()
    assert gen_docs.main([]) == 0
    assert gen_docs.main(["--check"]) == 0
    page.write_text(page.read_text() + "an edit\n")
    assert gen_docs.main(["--check"]) == 1


def test_page_tells_all_of_every_patch(gen_docs: ModuleType) -> None:
    """Each patch has a section with its reason, removal condition, sites and methods."""
    page = gen_docs.render_patches()
    for patch in PATCHES:
        section = page.partition(f"## `{patch.name}`\n")[2].partition("\n## ")[0]
        for text in (
            patch.why,
            patch.upstream,
            patch.remove_when,
            patch.versions,
            *(f"{site.module}.{site.attribute}" for site in patch.sites),
            *patch.contract.calls,
            *patch.contract.behaviour,
            *patch.contract.reads,
        ):
            assert text in section
    assert ", ".join(LOCKED_VERSIONS) in page


def test_page_lists_every_rebinding(gen_docs: ModuleType) -> None:
    """Each is a row with its owner, its reason and the place that does it."""
    section = gen_docs.render_patches().partition("\n## Bound while a process runs\n")[2]
    section = section.partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for rebinding, row in zip(REBINDINGS, rows, strict=True):
        names = (rebinding.owner, *rebinding.attributes, *rebinding.places)
        for text in (*(name.replace(":", ".") for name in names), rebinding.lasts, rebinding.why):
            assert text in row


def test_page_lists_every_rider(gen_docs: ModuleType) -> None:
    """Each is a row with its object, its name, its type and the modules that use it."""
    section = gen_docs.render_patches().partition("\n## What travels on vLLM's objects\n")[2]
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    for rider, row in zip(RIDERS, rows, strict=True):
        names = [*rider.carrier.split(", "), *rider.name.split(", ")]
        for text in (*names, *rider.writers, *rider.readers, rider.type, rider.way, rider.what):
            assert text in row


def test_page_of_requests_names_every_reason():
    """A client that reads ``exit_reason`` finds what it means."""
    page = (ROOT / "docs" / "requests.md").read_text()
    assert [reason for reason in REASONS if f"`{reason}`: {REASONS[reason]}" not in page] == []


def test_every_strategy_says_when_it_closes():
    """The first paragraph of its docstring is its row on the page of early exit."""
    page = (ROOT / "docs" / "early-exit.md").read_text()
    for strategy in LISTED:
        assert (strategy.__doc__ or "").startswith("Closes when "), strategy
        assert f"\n| `{strategy.reason}` | " in page
