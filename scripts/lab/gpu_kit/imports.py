"""Follows imports through a folder of packages without running them, and names what is missing.

The folder is for another Python and another torch than this machine's, so nothing in it can be
imported here. Followed are the imports that run when a module is imported: not those in functions,
under ``TYPE_CHECKING``, or in a ``try`` that catches their failure. An import under another ``if``
depends on the machine and is reported apart.
"""

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_CATCHES = {"ImportError", "ModuleNotFoundError", "Exception", "BaseException", "AttributeError"}


@dataclass(frozen=True)
class Import:
    """An import statement's module.

    Attributes:
        name: dotted, absolute.
        of: names taken from it, each perhaps a submodule.
        is_conditional: it stands under an ``if``.
    """

    name: str
    of: tuple[str, ...]
    is_conditional: bool


@dataclass
class Findings:
    """What a walk has met.

    Attributes:
        seen: modules whose files were read, or which are compiled.
        missing: module to the first module that imports it.
        conditional: the same, for imports under an ``if``.
        image: top-level packages that the machine must have.
    """

    seen: set[str] = field(default_factory=set)
    missing: dict[str, str] = field(default_factory=dict)
    conditional: dict[str, str] = field(default_factory=dict)
    image: set[str] = field(default_factory=set)


def walk(roots: Iterable[str], sites: Sequence[Path], image: frozenset[str]) -> Findings:
    """Follow the imports of some modules.

    Args:
        roots: dotted names of modules in the folders.
        sites: folders of packages, as on ``sys.path``; the first that has a module counts.
        image: top-level packages that the machine has without the folder.
    """
    found = Findings()
    pending = [(root, "the list of roots", False) for root in roots]
    while pending:
        name, importer, is_conditional = pending.pop()
        for module in _with_parents(name):
            if module in found.seen:
                continue
            path = _file_of(module, sites)
            if path is None:
                _miss(found, module, importer, image, is_conditional=is_conditional)
                break
            found.seen.add(module)
            if path.suffix != ".py":
                continue
            for each in _imports(path, module):
                pending.append((each.name, module, is_conditional or each.is_conditional))
                inner = (f"{each.name}.{name}" for name in each.of)
                pending += (
                    (child, module, is_conditional or each.is_conditional)
                    for child in inner
                    if _file_of(child, sites) is not None
                )
    return found


def _miss(
    found: Findings, module: str, importer: str, image: frozenset[str], *, is_conditional: bool
) -> None:
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names:
        return
    if top in image:
        found.image.add(top)
    elif is_conditional:
        found.conditional.setdefault(module, importer)
    else:
        found.missing.setdefault(module, importer)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        yield ".".join(parts[:end])


def _file_of(module: str, sites: Sequence[Path]) -> Path | None:
    """The file that an import of the module runs; a folder for a namespace package."""
    bases = [site.joinpath(*module.split(".")) for site in sites]
    for base in bases:
        for candidate in (base / "__init__.py", base.with_name(base.name + ".py")):
            if candidate.is_file():
                return candidate
        compiled = [*base.parent.glob(f"{base.name}.*.so"), *base.parent.glob(f"{base.name}.so")]
        if compiled:
            return compiled[0]
    return next(filter(Path.is_dir, bases), None)


def _imports(path: Path, module: str) -> Iterator[Import]:
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    yield from _of_body(ast.parse(path.read_bytes()).body, package, is_conditional=False)


def _of_body(body: Iterable[ast.stmt], package: str, *, is_conditional: bool) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), is_conditional)
        elif isinstance(node, ast.ImportFrom):
            name = _absolute(node, package)
            yield Import(name, tuple(alias.name for alias in node.names), is_conditional)
        elif isinstance(node, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(node.test):
                yield from _of_body(node.body, package, is_conditional=True)
            yield from _of_body(node.orelse, package, is_conditional=True)
        elif isinstance(node, ast.Try):
            if not any(map(_catches_imports, node.handlers)):
                yield from _of_body(node.body, package, is_conditional=is_conditional)
            yield from _of_body(node.finalbody, package, is_conditional=is_conditional)
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from _of_body(node.body, package, is_conditional=is_conditional)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    parts = package.split(".")
    base = parts[: len(parts) - node.level + 1]
    return ".".join([*base, *filter(None, [node.module])])


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    return bool(
        _CATCHES & {name.id for name in ast.walk(handler.type) if isinstance(name, ast.Name)}
    )
