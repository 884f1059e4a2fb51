"""A hook of MkDocs: makes links of docs/ that lead out of docs/ work in the site.

On a code host such a link leads to a file of the repository. In the site it leads to the page made
of that file where there is one (`PAGES`); otherwise its text is left without a link. A link to a
file that does not exist is a warning, which ends a strict build.
"""

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
# Files of the repository that are pages of the site: path in the repository -> path in docs/.
PAGES = {"CHANGELOG.md": "changelog.md"}
# A link to a file that has no picture in its text: [text](target), [text](target#anchor).
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]+)?\)")

logger = logging.getLogger("mkdocs.hooks.docs_links")


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
