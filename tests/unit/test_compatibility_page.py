"""docs/compatibility.md holds the whole matrix; without an engine."""

import ast
from pathlib import Path

import matrix_record as record
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = {record.WORKS, record.INACTIVE, record.REFUSED, record.NOT_RUN}
ROW = record.CellResult(record.WORKS, "12 measured", "9 requests | as stock", "tests/a.py::test_b")
FIRST, SECOND = record.RELEASES
FULL = {name: dict.fromkeys(record.RELEASES, ROW) for name in record.names()}


@pytest.fixture(scope="module")
def rows():
    return record.parse(record.PAGE.read_text())


def test_every_cell_of_the_matrix_is_on_the_page(rows):
    """In the matrix's order, and no other."""
    assert list(rows) == record.names()


def test_no_cell_is_empty(rows):
    """Each says what it came to, what of probes, what was seen and which test saw it."""
    for name, by_release in rows.items():
        assert by_release, name
        for row in by_release.values():
            assert row.result in RESULTS, name
            assert row.probes, name
            assert row.note, name
            assert row.test, name


def test_every_test_on_the_page_exists(rows):
    for row in (row for by_release in rows.values() for row in by_release.values()):
        path, _, name = row.test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_is_as_the_matrix_renders_it():
    """Its words around the table are those of the code."""
    page = record.PAGE.read_text()
    assert page.startswith(record.HEAD)
    assert page.endswith(record.TAIL)
    assert all(remark in page for remark in record.REMARKS.values())


def test_remarks_are_of_cells():
    assert set(record.REMARKS) <= set(record.names())


def test_a_rendered_page_is_read_back():
    """A bar inside a cell makes no column more; a release may lack a row or differ in it."""
    first, second, *_ = record.names()
    other = record.CellResult(record.REFUSED, "12 measured", "says why", "tests/a.py::test_b")
    rows = FULL | {first: {FIRST: ROW, SECOND: other}, second: {SECOND: ROW}}
    page = record.render(rows)
    read = record.parse(page)
    assert list(read) == record.names()
    assert {name: read[name] for name in (first, second)} == {
        name: rows[name] for name in (first, second)
    }
    assert f"| {first} | works | refused: says why | 12 measured |" in page
    assert f"| {second} | not run | works | 12 measured |" in page


def test_a_page_with_a_cell_missing_is_refused():
    """The sentence names it."""
    missing = record.names()[3]
    rest = {name: row for name, row in FULL.items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        record.render(rest)


def test_rows_that_were_not_run_stay_as_they_are(monkeypatch, tmp_path):
    """A test that is skipped here leaves its row; one that ran replaces that of its release."""
    page, kept = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text(record.render(FULL))
    monkeypatch.setattr(record, "PAGE", page)
    monkeypatch.setattr(record, "RECORD", kept)
    assert record.kept() == FULL
    new = record.CellResult(record.WORKS, "1 measured", "new", "tests/a.py::test_b")
    record.write("ngram", new, SECOND)
    assert record.kept() == FULL | {"ngram": {FIRST: ROW, SECOND: new}}
