"""Hooks of MkDocs: what differs between the site of docs/ and the same pages on a code host.

**Links out of docs/.** On a code host such a link leads to a file of the repository. In the site it
leads to the page made of that file where there is one (`PAGES`); otherwise its text is left without
a link. A link to a file that does not exist is a warning, which ends a strict build.

**Folders that grow.** In `nav` of mkdocs.yml ``adr/*`` stands for all pages of that folder that
have no line of their own there.
"""

import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository that are pages of the site: path in the repository -> path in docs/.
PAGES = {"CHANGELOG.md": "changelog.md"}
# A link to a file that has no picture in its text: [text](target), [text](target#anchor).
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]+)?\)")

logger = logging.getLogger("mkdocs.hooks.docs_site")


def on_config(config: Any) -> Any:
    """Replace each pattern in the navigation by the pages that it stands for."""
    config.nav = spread(config.nav, Path(config.docs_dir))
    return config


def spread(nav: list[Any], docs: Path) -> list[Any]:
    """The navigation with each pattern replaced by the pages that it stands for.

    Args:
        nav: as in mkdocs.yml: pages, or titles with a page, a pattern or a list of the same.
        docs: folder of the pages.
    """
    named = set(_named(nav))

    def spread_item(item: Any) -> Any:
        if not isinstance(item, dict):
            return item
        ((title, pages),) = item.items()
        if isinstance(pages, list):
            return {title: [spread_item(page) for page in pages]}
        if not pages.endswith("*"):
            return item
        # A folder's own page is its first.
        found = sorted(
            docs.glob(f"{pages}.md"), key=lambda page: (page.stem != "README", page.name)
        )
        paths = [page.relative_to(docs).as_posix() for page in found]
        return {title: [path for path in paths if path not in named]}

    return [spread_item(item) for item in nav]


def _named(item: Any) -> Iterator[str]:
    """Pages and patterns of a part of the navigation."""
    if isinstance(item, str):
        yield item
    else:
        for part in item.values() if isinstance(item, dict) else item:
            yield from _named(part)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made of files outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page's text with links that fit the site."""
    return fit_links(markdown, page.file.src_uri)


def fit_links(markdown: str, page: str) -> str:
    """Text of a page of docs/, with each link that leads out of docs/ replaced.

    Args:
        markdown: the page's text.
        page: its path in docs/.
    """
    folder = posixpath.dirname(page)

    def fitted(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = posixpath.normpath(posixpath.join("docs", folder, target))
        if path.startswith("docs/"):
            return link[0]
        if path in PAGES:
            return f"[{text}]({posixpath.relpath(PAGES[path], folder or os.curdir)}{anchor})"
        if not (ROOT / path).exists():
            logger.warning("docs/%s links to %s, which does not exist", page, target)
        return text

    return LINK.sub(fitted, markdown)
