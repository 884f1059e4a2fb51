"""Finds classes and methods in a package's source files without importing them.

The package may be installed, or lie in a directory or wheel that this interpreter could not
import (a build for other hardware).
"""

import ast
import importlib.util
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef
ReadFile = Callable[[str], str | None]
"""From a path such as ``"package/module.py"`` to the file's text, or None when there is none."""


@dataclass(frozen=True)
class ModuleSource:
    """One parsed module; ``lines`` are its source lines without their ends."""

    name: str
    is_package: bool
    tree: ast.Module
    lines: list[str]


@dataclass(frozen=True)
class ClassSource:
    """A class statement and the module it stands in."""

    module: ModuleSource
    node: ast.ClassDef

    def __str__(self) -> str:
        return f"{self.module.name}:{self.node.name}"


@dataclass(frozen=True)
class MethodSource:
    """A method, or a module's function, and the module it stands in."""

    module: ModuleSource
    node: Function


def installed_root(package: str) -> Path:
    """Directory of an installed top-level package, which is not imported.

    Raises:
        LookupError: the package is not installed.
    """
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise LookupError(f"package {package!r} is not installed")
    return Path(found.submodule_search_locations[0])


class SourceTree:
    """The source files of one package; each is parsed at most once."""

    def __init__(self, package: str, read_file: ReadFile) -> None:
        self._package = package
        self._read_file = read_file
        # By dotted name; None for a module that the package does not have.
        self._modules: dict[str, ModuleSource | None] = {}

    @classmethod
    def from_directory(cls, root: Path) -> "SourceTree":
        """The package whose ``__init__.py`` lies in ``root``."""

        def read_file(path: str) -> str | None:
            file = root.parent / path
            return file.read_text(encoding="utf-8") if file.is_file() else None

        return cls(root.name, read_file)

    @classmethod
    def from_wheel(cls, wheel: Path, package: str) -> "SourceTree":
        """The package of that name in a wheel."""
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(f"{package}/")]
            files = {name: archive.read(name) for name in names if name.endswith(".py")}

        def read_file(path: str) -> str | None:
            data = files.get(path)
            return None if data is None else data.decode().replace("\r\n", "\n")

        return cls(package, read_file)

    def module(self, name: str) -> ModuleSource | None:
        """The module of that dotted name, or None when the package has none."""
        if name not in self._modules:
            self._modules[name] = self._parse(name)
        return self._modules[name]

    def find_class(self, module: str, name: str) -> ClassSource:
        """The class that a module defines or imports from within the package.

        Raises:
            LookupError: there is no such module or class.
        """
        found = self._resolve(module, name)
        if found is None:
            raise LookupError(f"{module} has no class {name}")
        return found

    def find_method(self, owner: ClassSource, name: str) -> MethodSource:
        """The method that instances of a class get, its own or inherited.

        Raises:
            LookupError: neither the class nor its bases in the package define it.
        """
        for cls in self.lineage(owner):
            for statement in reversed(cls.node.body):
                if isinstance(statement, Function) and statement.name == name:
                    return MethodSource(cls.module, statement)
        raise LookupError(f"{owner} has no method {name}")

    def find_function(self, module: str, name: str) -> MethodSource:
        """The function that a module defines.

        Raises:
            LookupError: there is no such module or function.
        """
        source = self.module(module)
        if source is not None:
            for statement in _top_level(source.tree.body):
                if isinstance(statement, Function) and statement.name == name:
                    return MethodSource(source, statement)
        raise LookupError(f"{module} has no function {name}")

    def lineage(self, cls: ClassSource) -> list[ClassSource]:
        """The class and its bases within the package, depth first, each once."""
        found = [cls]
        for base in cls.node.bases:
            name = base.value if isinstance(base, ast.Subscript) else base
            source = self._resolve(cls.module.name, name.id) if isinstance(name, ast.Name) else None
            if source is not None:
                found += [each for each in self.lineage(source) if each not in found]
        return found

    def _parse(self, name: str) -> ModuleSource | None:
        if name != self._package and not name.startswith(f"{self._package}."):
            return None
        stem = name.replace(".", "/")
        for path, is_package in ((f"{stem}.py", False), (f"{stem}/__init__.py", True)):
            text = self._read_file(path)
            if text is not None:
                return ModuleSource(name, is_package, ast.parse(text), text.split("\n"))
        return None

    def _resolve(self, module: str, name: str) -> ClassSource | None:
        source = self.module(module)
        if source is None:
            return None
        for statement in _top_level(source.tree.body):
            if isinstance(statement, ast.ClassDef) and statement.name == name:
                return ClassSource(source, statement)
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self._resolve(_imported_module(source, statement), alias.name)
        return None


def _top_level(statements: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run when the module is imported, those in ``if`` and ``try`` included."""
    for statement in statements:
        yield statement
        if isinstance(statement, ast.If):
            yield from _top_level(statement.body + statement.orelse)
        elif isinstance(statement, ast.Try):
            handlers = [each for handler in statement.handlers for each in handler.body]
            yield from _top_level(statement.body + handlers + statement.orelse)


def _imported_module(importer: ModuleSource, statement: ast.ImportFrom) -> str:
    if statement.level == 0:
        return statement.module or ""
    parts = importer.name.split(".")
    drop = statement.level - 1 if importer.is_package else statement.level
    parents = parts[: len(parts) - drop]
    return ".".join([*parents, statement.module] if statement.module else parents)
