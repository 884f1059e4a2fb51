"""Records in upstream_lock.json what a vLLM release looks like where the patches touch it.

    python scripts/update_lock.py --installed
    python scripts/update_lock.py --wheel vllm-0.33.0-*.whl

Reads source files only: the release need not be importable here. Says what differs from the release
before.
"""

import argparse
import ast
import json
import sys
from pathlib import Path

from packaging.version import Version

from meridian_patch.patches import PATCHES
from meridian_patch.patches.lock import LOCK_FILE, load_lock
from meridian_patch.patching.lock import Entry, Kind, compute_entry
from meridian_patch.patching.source import SourceTree, installed_root

LOCK_PATH = Path(__file__).resolve().parent.parent / "meridian_patch" / "patches" / LOCK_FILE


def read_version(tree: SourceTree) -> str:
    """The release a vLLM source tree states, without the local part."""
    module = tree.module("vllm._version")
    for statement in module.tree.body if module else ():
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            names = {each.id for each in statement.targets if isinstance(each, ast.Name)}
            if "__version__" in names:
                return Version(statement.value.value).public
    raise LookupError("vllm/_version.py does not assign a string to __version__")


def differences(before: Entry, after: Entry) -> list[str]:
    """Methods of which parameters or source differ: one line for each owner and each of the two."""
    kinds: tuple[Kind, ...] = ("parameters", "source")
    lines = []
    for owner, locked in after.items():
        for kind in kinds:
            was = before[owner][kind] if owner in before else {}
            now = locked[kind]
            changed = [name for name in now if now[name] != was.get(name)]
            if changed:
                lines.append(f"{owner} {kind}: {' '.join(changed)}")
    return lines or ["nothing"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--installed", action="store_true", help="read the installed vLLM")
    source.add_argument("--wheel", type=Path, help="read a vLLM wheel")
    options = parser.parse_args(arguments)
    try:
        if options.installed:
            tree = SourceTree.from_directory(installed_root("vllm"))
        else:
            tree = SourceTree.from_wheel(options.wheel, "vllm")
        version = read_version(tree)
        entry = compute_entry(tree, PATCHES)
    except (LookupError, OSError) as error:
        print(f"update_lock: {error}", file=sys.stderr)
        return 1
    lock = load_lock() | {version: entry}
    releases = sorted(lock, key=Version)
    LOCK_PATH.write_text(json.dumps({each: lock[each] for each in releases}, indent=2) + "\n")
    print(f"{LOCK_PATH.name}: locked {version}; releases: {', '.join(releases)}")
    place = releases.index(version)
    if place:
        before = releases[place - 1]
        print(f"different from {before}:", *differences(lock[before], entry), sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
