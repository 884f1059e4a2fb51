"""The site of docs/ builds strictly, needs no network, and its links work on a code host too."""

import importlib.util
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from meridian_patch.config.request_options import RequestOptions
from meridian_patch.config.schema import Config
from meridian_patch.telemetry.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent.parent


def load_hook():
    spec = importlib.util.spec_from_file_location("docs_site", ROOT / "scripts" / "docs_site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The built site; every warning of MkDocs, and so every dead link or anchor, is an error."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    built = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_in_the_site(site):
    """Each page of docs/, and the changelog."""
    pages = [page.relative_to(ROOT / "docs") for page in (ROOT / "docs").rglob("*.md")]
    for page in [*pages, Path("changelog.md")]:
        name = page.with_name("index.html") if page.stem == "README" else page.with_suffix(".html")
        assert (site / name).is_file(), name


@pytest.mark.slow
def test_a_reader_loads_nothing_from_elsewhere(site):
    """No script, style, font or picture of another host: a page tells no third party."""
    tags = r"<(?:script|img|iframe|link)\b[^>]*"
    loads = re.compile(tags + r"\b(?:src|href)=[\"']?((?:https?:)?//[^\"'\s>]*)")
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert loads.findall(text) == [], page
        # The theme would fetch what draws them.
        assert 'class="mermaid"' not in text, page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", style.read_text()), style


@pytest.mark.slow
def test_a_link_out_of_the_pages_is_text_in_the_site(site):
    """A module of the list has no page; the changelog has one."""
    page = (site / "modules.html").read_text()
    assert "activation.py" in page
    assert "meridian_patch/activation.py" not in page
    assert 'href="changelog.html"' in (site / "upgrade.html").read_text()


def test_links_are_fitted():
    fit = load_hook().fit_links
    assert fit("[log](../CHANGELOG.md#added)", "upgrade.md") == "[log](changelog.md#added)"
    assert fit("[log](../../CHANGELOG.md)", "adr/0001.md") == "[log](../changelog.md)"
    assert fit("[a](../README.md) [b](tune.md) [c](#d)", "faq.md") == "a [b](tune.md) [c](#d)"
    assert fit("[a](https://example.org/x.md)", "faq.md") == "[a](https://example.org/x.md)"
    assert fit("![a](pictures/step.svg)", "concepts.md") == "![a](pictures/step.svg)"


def test_a_dead_link_out_of_the_pages_is_a_warning(caplog):
    """A strict build ends with it."""
    with caplog.at_level(logging.WARNING, logger="mkdocs.hooks.docs_site"):
        load_hook().fit_links("[a](../no/such/file.py)", "faq.md")
    assert "docs/faq.md links to ../no/such/file.py, which does not exist" in caplog.text


def test_security_names_every_field_of_requests():
    """A new field needs a word on what it may take from others."""
    page = (ROOT / "docs" / "security.md").read_text()
    assert [name for name in RequestOptions.model_fields if f"`{name}`" not in page] == []


def test_every_knob_of_tune_exists():
    """Keys of the configuration, metrics and fields that the page names."""
    page = (ROOT / "docs" / "tune.md").read_text()
    sections = {
        name: set(field.annotation.model_fields)
        for name, field in Config.model_fields.items()
        if hasattr(field.annotation, "model_fields")
    }
    keys = re.findall(r"`(policy|kv|exit|requests)\.(\w+)", page)
    assert len(keys) > 20
    assert [key for key in keys if key[1] not in sections[key[0]]] == []
    metrics = set(re.findall(r"`(meridian_\w+_total)", page))
    assert metrics <= {metric.exported_name for metric in METRICS}
    assert len(metrics) > 4


def test_every_decision_is_listed():
    """docs/adr/README.md has a row for each page beside it."""
    folder = ROOT / "docs" / "adr"
    pages = {page.name for page in folder.glob("*.md")} - {"README.md"}
    assert pages == set(re.findall(r"\]\((\S+\.md)\)", (folder / "README.md").read_text()))


def test_a_pattern_stands_for_its_pages(tmp_path):
    """A folder's own page comes first; what is no pattern stays."""
    for name in ("0002-b.md", "0001-a.md", "README.md"):
        (tmp_path / name).touch()
    spread = load_hook().spread
    pages = ["README.md", "0001-a.md", "0002-b.md"]
    nav = ["index.md", {"P": [{"D": "*"}, {"x": "x.md"}]}]
    assert spread(nav, tmp_path) == ["index.md", {"P": [{"D": pages}, {"x": "x.md"}]}]


def test_a_page_with_a_line_of_its_own_stands_in_no_pattern(tmp_path):
    for name in ("0001-a.md", "0002-b.md"):
        (tmp_path / name).touch()
    nav = [{"D": "*"}, {"P": [{"a": "0001-a.md"}]}]
    assert load_hook().spread(nav, tmp_path) == [{"D": ["0002-b.md"]}, {"P": [{"a": "0001-a.md"}]}]


def test_pictures_have_a_title_and_are_used():
    """A reader who does not see them is told what they show."""
    text = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    pictures = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
    assert len(pictures) >= 5
    for picture in pictures:
        svg = picture.read_text()
        assert "<title>" in svg
        assert "<desc>" in svg
        assert f"](pictures/{picture.name})" in text
