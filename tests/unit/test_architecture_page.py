"""docs/architecture.md and docs/modules.md show the package as it is."""

import re
from pathlib import Path

from meridian_patch.patches import PATCHES

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LISTED = (ROOT / "docs" / "modules.md").read_text()
FOLDERS = ("meridian_patch", "triton_kernels")


def test_every_module_is_listed_once_and_no_other():
    """A new, moved or removed module needs `python scripts/gen_docs.py`."""
    listed = re.findall(r"^\| \[\w+\.py\]\(\.\./(\S+)\) \|", LISTED, flags=re.MULTILINE)
    modules = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    names = [path.relative_to(ROOT).as_posix() for path in modules if path.name != "__init__.py"]
    assert sorted(listed) == sorted(names)


def test_every_module_has_a_line():
    """No row of the list is empty."""
    rows = [line for line in LISTED.splitlines() if line.startswith("| [")]
    assert len(rows) > 100
    assert all(len(line.split(" | ")[1].rstrip(" |")) > 10 for line in rows)


def test_paths_in_the_text_exist():
    """Files and folders named in the text are there."""
    for name in re.findall(r"`([\w./]+(?:\.py|/))`", PAGE):
        assert (ROOT / name).exists() or (ROOT / "meridian_patch" / name).exists(), name


def test_diagram_names_every_patched_class():
    """The diagram marks each class that a patch replaces, or its kind for serving classes."""
    assert "](pictures/processes.svg)" in PAGE
    diagram = (ROOT / "docs" / "pictures" / "processes.svg").read_text()
    marked = "\n".join(line for line in diagram.splitlines() if "*<" in line)
    assert marked
    for patch in PATCHES:
        site = patch.sites[0]
        is_serving = site.module.startswith("vllm.entrypoints")
        assert ("serving classes" if is_serving else site.attribute) in marked, patch.name
