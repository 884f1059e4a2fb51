"""Finds where source code assigns attributes of other objects, and where that rebinds vLLM's code.

An assignment rebinds code if the value is a function, a class or a method, if it changes an
object's class or namespace, or if the owner is what a module imported from vLLM. An object of ours
in the place of one of vLLM's, such as a queue, is no such value: nothing in the source shows whose
the owner is.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

_UPSTREAM = "vllm"
_MAKERS = {"type", "partial", "partialmethod", "classmethod", "staticmethod", "MethodType"}
_NAMESPACES = {"__dict__", "__annotations__", "__dataclass_fields__"}
Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Function | ast.ClassDef


@dataclass(frozen=True)
class Store:
    """One assignment, or deletion, of an attribute.

    Attributes:
        place: ``"module:Class.method"`` that it stands in.
        attribute: the name; the expression of it where it is no constant of the module.
        rebinds: whether it binds code, or changes what vLLM's module or class holds.
    """

    place: str
    attribute: str
    rebinds: bool


@dataclass
class Module:
    """What stands in one module's source.

    Attributes:
        name: full name of the module.
        text: its source.
        constants: names with values that attributes may be named by.
        callbacks: attributes of our own classes that hold functions to call.
    """

    name: str
    text: str
    constants: Mapping[str, str] = field(default_factory=dict)
    callbacks: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Read the module's imports, constants and functions."""
        self.tree = ast.parse(self.text)
        self.upstream = set(_imported(self.tree, _UPSTREAM))
        self.code = {name for name in _imported(self.tree, "meridian_patch") if not name.isupper()}
        self.names = dict(self.constants) | dict(_constants(self.tree))

    def stores(self) -> Iterator[Store]:
        """Every assignment of an attribute, but those of an object's own data on ``self``."""
        yield from self._walk(self.tree, ())

    def _walk(self, node: ast.AST, scopes: tuple[Scope, ...]) -> Iterator[Store]:
        for child in ast.iter_child_nodes(node):
            yield from self._stores_of(child, scopes)
            inner = (*scopes, child) if isinstance(child, Scope) else scopes
            yield from self._walk(child, inner)

    def _stores_of(self, node: ast.AST, scopes: tuple[Scope, ...]) -> Iterator[Store]:
        place = f"{self.name}:{'.'.join(scope.name for scope in scopes)}"
        for target, value in _assigned(node):
            found = self._owner_and_name(target)
            if found is None:
                continue
            owner, name = found
            is_own = isinstance(owner, ast.Name) and owner.id == "self"
            rebinds = (
                name == "__class__"
                or isinstance(target, ast.Subscript)
                or _root(owner) in self.upstream
                or (name not in self.callbacks and self._is_code(value, scopes))
            )
            if not is_own or (rebinds and self._is_upstream_class(scopes)):
                yield Store(place, name, rebinds)

    def _owner_and_name(self, target: ast.expr) -> tuple[ast.expr, str] | None:
        """Whose attribute a target is, and its name; None: it is no attribute."""
        match target:
            case ast.Attribute(value=owner, attr=name):
                return owner, name
            case ast.Call(args=[owner, name, *_]):
                return owner, self._text(name)
            case ast.Subscript(value=ast.Call(func=ast.Name(id="vars"), args=[owner]), slice=name):
                return owner, self._text(name)
            case ast.Subscript(value=ast.Attribute(value=owner, attr=space)) if (
                space in _NAMESPACES
            ):
                return owner, space
        return None

    def _text(self, name: ast.expr) -> str:
        if isinstance(name, ast.Constant):
            return str(name.value)
        last = name.attr if isinstance(name, ast.Attribute) else ast.unparse(name)
        return self.names.get(last, last)

    def _is_code(self, value: ast.expr | None, scopes: tuple[Scope, ...]) -> bool:
        match value:
            case ast.Lambda():
                return True
            case ast.Name(id=name):
                return name in self.code or name in _defined(self.tree, scopes)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                classes = [scope for scope in scopes if isinstance(scope, ast.ClassDef)]
                return bool(classes) and name in _defined(classes[-1], ())
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
                made = _defined(self.tree, scopes).get(name)
                return name in _MAKERS or (isinstance(made, Function) and _returns_code(made))
        return False

    def _is_upstream_class(self, scopes: tuple[Scope, ...]) -> bool:
        classes = [scope for scope in scopes if isinstance(scope, ast.ClassDef)]
        bases = classes[-1].bases if classes else []
        # A base that is computed is a replacement built on vLLM's class, which is `original`.
        is_computed = any(isinstance(base, ast.Call) for base in bases)
        return is_computed or any(_root(base) in {*self.upstream, "original"} for base in bases)


def declared_callbacks(texts: list[str]) -> frozenset[str]:
    """Attributes that classes declare as functions to call, in the given sources."""
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    declared = [
        node
        for node in nodes
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation).startswith("Callable[")
    ]
    names = {getattr(node.target, "attr", None) or ast.unparse(node.target) for node in declared}
    return frozenset(names)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Targets of a statement or call, each with its value where there is one."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                if isinstance(target, ast.Tuple):
                    values = value.elts if isinstance(value, ast.Tuple) else []
                    yield from zip(target.elts, values or [None] * len(target.elts), strict=True)
                else:
                    yield target, value
        case ast.AnnAssign(target=target, value=value):
            yield target, value
        case ast.AugAssign(target=target):
            # The result of an operator is no function.
            yield target, None
        case ast.Delete(targets=targets):
            yield from ((target, None) for target in targets)
        case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[_, _, *value]):
            yield node, value[0] if value else None


def _defined(node: ast.Module | ast.ClassDef, scopes: tuple[Scope, ...]) -> dict[str, Scope]:
    """Functions and classes by name: those of a module or class, and of enclosing functions."""
    bodies = [node, *(scope for scope in scopes if isinstance(scope, Function))]
    return {each.name: each for body in bodies for each in body.body if isinstance(each, Scope)}


def _returns_code(function: Function) -> bool:
    inner = _defined(ast.Module([], []), (function,))
    returned = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
    return any(isinstance(each, ast.Name) and each.id in inner for each in returned)


def _imported(tree: ast.Module, package: str) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == package:
                    yield alias.asname or package
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package:
            yield from (alias.asname or alias.name for alias in node.names)


def _constants(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        for target, value in _assigned(node):
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = value.elts if isinstance(value, ast.Tuple) else [value]
            for name, each in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and isinstance(each, ast.Constant):
                    yield name.id, str(each.value)


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
