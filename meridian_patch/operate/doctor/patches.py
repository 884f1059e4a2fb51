"""Judges the patches: contracts against vLLM's sources, and binding in a process of its own."""

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from meridian_patch import envs
from meridian_patch.operate.doctor.finding import Area, Finding
from meridian_patch.patches import PATCHES
from meridian_patch.patching.lock import (
    Entry,
    locked_fingerprint,
    locked_methods,
    missing_attributes,
    read_fingerprint,
)
from meridian_patch.patching.source import SourceTree
from meridian_patch.patching.spec import Patch

AREA = Area("environment")
_BIND_LIMIT_S = 240
_MOST_NAMED = 3
_DIGEST_LENGTH = 12
_OFF = "serve stock with MERIDIAN_PATCH=0, and reinstall vLLM or ask for support of this build"
# Prints one line that begins with DONE; whatever vLLM prints stands before it.
_BIND = """
import json
from meridian_patch.errors import MeridianError
try:
    from meridian_patch.apply import apply_patches
    told = [[report.patch, str(report.outcome)] for report in apply_patches()]
except MeridianError as error:
    told = str(error)
print("DONE" + json.dumps(told))
"""


def check_contracts(root: Path, entry: Entry) -> Finding:
    """The sources of vLLM are what the patches were checked against. Imports nothing.

    Args:
        root: folder of the package ``vllm``.
        entry: the lock's entry of its release.
    """
    check = "contracts of the patches"
    tree = SourceTree.from_directory(root)
    refusals, changed, num_read = [], [], 0
    for patch in PATCHES:
        for method in locked_methods(patch):
            num_read += 1
            try:
                found = read_fingerprint(tree, method)
            except (LookupError, OSError, SyntaxError, UnicodeDecodeError) as error:
                refusals.append(f"{method}: {error}")
                continue
            expected = locked_fingerprint(entry, method)
            if found != expected and method.kind == "parameters":
                refusals.append(f"{method} takes {found}, expected {expected}")
            elif found != expected:
                changed.append(f"the body of {method} differs")
        changed += _unset(tree, patch)
    if refusals:
        return AREA.fail(
            check, _few(refusals), expected="the release that the lock describes", fix=_OFF
        )
    if changed:
        return AREA.warn(
            check,
            _few(changed),
            expected="the sources that the lock describes",
            fix="reinstall vLLM, or test your build: pytest tests/contract",
        )
    digest = hashlib.sha256(json.dumps(entry, sort_keys=True).encode()).hexdigest()
    return AREA.ok(
        check,
        f"{len(PATCHES)} patches, {num_read} methods as locked; digest {digest[:_DIGEST_LENGTH]}",
    )


def _unset(tree: SourceTree, patch: Patch) -> list[str]:
    try:
        missing = missing_attributes(tree, patch)
    except (LookupError, OSError, SyntaxError, UnicodeDecodeError):
        return []
    return [f"vLLM never sets {name}" for name in missing]


def check_binding(env: Mapping[str, str], python: str = sys.executable) -> Finding:
    """All patches bind in a fresh process, as they would in vLLM's.

    Args:
        env: the environment as the user gave it.
        python: the interpreter of that process.
    """
    check = "binding of the patches"
    with tempfile.TemporaryDirectory() as folder:
        # Its report must not be taken for a server's, and a wrong value of our variables has a
        # finding of its own.
        kept = {name: value for name, value in env.items() if not name.startswith(envs.PREFIX)}
        assumed = envs.assumed_vllm_version(env)
        own = {"MERIDIAN_PATCH": "1", "MERIDIAN_PATCH_STATUS_DIR": str(Path(folder) / "status")}
        if assumed is not None:
            own["MERIDIAN_PATCH_ASSUME_VLLM"] = assumed
        try:
            run = subprocess.run(
                [python, "-P", "-c", _BIND],
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                env={**kept, **own},
                timeout=_BIND_LIMIT_S,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            return _not_bound(check, f"a process that binds them did not end: {error}")
    line = next(
        (line for line in reversed(run.stdout.splitlines()) if line.startswith("DONE")), None
    )
    if line is None:
        last = (run.stderr.strip() or run.stdout.strip() or "it said nothing").splitlines()[-1]
        return _not_bound(check, f"a process that binds them ended with {run.returncode}: {last}")
    told = json.loads(line.removeprefix("DONE"))
    if isinstance(told, str):
        return _not_bound(check, told)
    unbound = [f"{name} {outcome}" for name, outcome in told if outcome != "applied"]
    if unbound:
        return _not_bound(check, _few(unbound))
    return AREA.ok(check, f"{len(told)} patches bind in a fresh process")


def _not_bound(check: str, found: str) -> Finding:
    return AREA.fail(
        check, found, expected="all patches bind", fix=f"mend what the message names, or {_OFF}"
    )


def _few(texts: list[str]) -> str:
    """The first of them, each once; several patches may rely on one method."""
    distinct = list(dict.fromkeys(texts))
    rest = len(distinct) - _MOST_NAMED
    return "; ".join(distinct[:_MOST_NAMED]) + (f" (and {rest} more)" if rest > 0 else "")
