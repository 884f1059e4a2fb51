"""Writes reports: data as JSON, and a page from the template of a package."""

import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write the data of a report; its folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def write_page(path: Path, package: str, **values: Any) -> None:
    """Write the page of a report.

    Args:
        path: of the page.
        package: dotted name of the package that holds ``report.html.j2``.
        values: that the template names; one that is missing is an error.
    """
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = files(package).joinpath("report.html.j2").read_text()
    path.write_text(environment.from_string(source).render(**values))
