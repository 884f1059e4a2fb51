"""Writes reports: data as JSON, and a page that looks like the pages of all other reports."""

import base64
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
        package: dotted name of the package that holds ``report.html.j2``, which fills the blocks of
            ``page.html.j2`` of this package.
        values: that the template names; one that is missing is an error.
    """
    import jinja2

    places = {"page.html.j2": "meridian_patch.bench", "report.html.j2": package}
    texts = {name: files(place).joinpath(name).read_text() for name, place in places.items()}
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.DictLoader(texts)
    )
    path.write_text(environment.get_template("report.html.j2").render(**values))


def data_url(png: bytes) -> str:
    """The picture as a data URL, so that a page is one file."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
