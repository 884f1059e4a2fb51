"""docs/compatibility.md holds the whole matrix; without an engine."""

import ast
from pathlib import Path

import matrix_record as record
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
RESULTS = {record.WORKS, record.INACTIVE, record.REFUSED, record.NOT_RUN}
FULL = {
    name: record.CellResult(
        record.WORKS, "12 measured", "9 requests | as stock", "tests/a.py::test_b"
    )
    for name in record.names()
}


@pytest.fixture(scope="module")
def rows():
    return record.parse(record.PAGE.read_text())


def test_every_cell_of_the_matrix_is_on_the_page(rows):
    """In the matrix's order, and no other."""
    assert list(rows) == record.names()


def test_no_cell_is_empty(rows):
    """Each says what it came to, what of probes, what was seen and which test saw it."""
    for name, row in rows.items():
        assert row.result in RESULTS, name
        assert row.probes, name
        assert row.note, name
        assert row.test, name


def test_every_test_on_the_page_exists(rows):
    for row in rows.values():
        path, _, name = row.test.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_page_is_as_the_matrix_renders_it():
    """Its words around the table are those of the code."""
    page = record.PAGE.read_text()
    said = record.HEAD.partition("{release}")[0], record.TAIL.partition("{release}")[2]
    assert page.startswith(said[0])
    assert page.endswith(said[1])
    assert all(remark in page for remark in record.REMARKS.values())


def test_remarks_are_of_cells():
    assert set(record.REMARKS) <= set(record.names())


def test_a_rendered_page_is_read_back():
    """A bar inside a cell makes no column more."""
    rows = record.parse(record.render(FULL, "0.0"))
    assert list(rows) == record.names()
    assert {row.result for row in rows.values()} == {record.WORKS}
    assert {row.test for row in rows.values()} == {"tests/a.py::test_b"}


def test_a_page_with_a_cell_missing_is_refused():
    """The sentence names it."""
    missing = record.names()[3]
    rest = {name: row for name, row in FULL.items() if name != missing}
    with pytest.raises(ValueError, match=missing):
        record.render(rest, "0.0")


def test_rows_that_were_not_run_stay_as_they_are(monkeypatch, tmp_path):
    """A test that is skipped here leaves its row; one that ran replaces its own."""
    page, kept = tmp_path / "page.md", tmp_path / "record.json"
    page.write_text(record.render(FULL, "0.0"))
    monkeypatch.setattr(record, "PAGE", page)
    monkeypatch.setattr(record, "RECORD", kept)
    assert record.kept() == FULL
    record.write(
        "ngram", record.CellResult(record.WORKS, "1 measured", "new", "tests/a.py::test_b")
    )
    rows = record.kept()
    assert rows.pop("ngram").note == "new"
    assert rows.items() <= FULL.items()
