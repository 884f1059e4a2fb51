"""Fingerprints of methods, the same on every supported Python.

``ast.dump`` and token streams differ between Python versions; source text does not. Comments,
docstrings, blank lines and the annotations of parameters are left out: they change often and
mean nothing to a subclass.
"""

import ast
import copy
import hashlib
import inspect
import tokenize
from collections.abc import Callable
from typing import Any, cast

from meridian_patch.patching.source import ClassSource, MethodSource, SourceTree
from meridian_patch.patching.spec import Site

CALLING_CONVENTIONS = ("staticmethod", "classmethod", "property")


def parameters(method: MethodSource) -> str:
    """Kind, name and default of each parameter, as ``"(self, throttle_prefills=False)"``.

    A decorator that changes how the method is called, and ``async``, stand before it.
    """
    node = method.node
    names = [each.id for each in node.decorator_list if isinstance(each, ast.Name)]
    marks = [f"@{name} " for name in names if name in CALLING_CONVENTIONS]
    if isinstance(node, ast.AsyncFunctionDef):
        marks.append("async ")
    return "".join(marks) + f"({_without_annotations(node.args)})"


def source_hash(method: MethodSource) -> str:
    """First 16 hex digits of the SHA-256 of the method's body."""
    return hashlib.sha256(_body_text(method).encode()).hexdigest()[:16]


def assigned_attributes(tree: SourceTree, cls: ClassSource) -> set[str]:
    """Names that methods of the class and its bases in the package assign on ``self``."""
    return {
        node.attr
        for each in tree.lineage(cls)
        for node in ast.walk(each.node)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def parameter_shape(text: str) -> str:
    """What :func:`parameters` says, with every default as ``...`` and without marks."""
    function = ast.parse(f"def f{text[text.index('(') :]}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    arguments = function.args
    anything = ast.Constant(...)
    arguments.defaults = [anything for _ in arguments.defaults]
    arguments.kw_defaults = [each and anything for each in arguments.kw_defaults]
    return f"({ast.unparse(arguments)})"


def live_parameter_shape(cls: type, name: str) -> str:
    """The same for the method a class has in this process, which others may have replaced.

    Raises:
        LookupError: the class has no such method.
    """
    for owner in cls.__mro__:
        if name in vars(owner):
            return _shape(inspect.signature(_function(vars(owner)[name])))
    raise LookupError(f"{cls.__module__}:{cls.__qualname__} has no method {name}")


def looks_up_at_call_time(method: MethodSource, site: Site) -> bool:
    """True when the method reads the site's name each time it is called.

    Either it imports the name in its body, or it reads a global of the site's own module.
    """
    for node in ast.walk(method.node):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == site.module
            and any(alias.name == site.attribute for alias in node.names)
        ):
            return True
        if (
            method.module.name == site.module
            and isinstance(node, ast.Name)
            and isinstance(node.ctx, ast.Load)
            and node.id == site.attribute
        ):
            return True
    return False


def _without_annotations(arguments: ast.arguments) -> str:
    bare = copy.deepcopy(arguments)
    for each in [*bare.posonlyargs, *bare.args, *bare.kwonlyargs, bare.vararg, bare.kwarg]:
        if each is not None:
            each.annotation = None
    return ast.unparse(bare)


def _body_text(method: MethodSource) -> str:
    node = method.node
    body = node.body if ast.get_docstring(node, clean=False) is None else node.body[1:]
    if not body:
        return ""
    first_line = _first_line(body[0])
    lines = method.module.lines[first_line - 1 : node.end_lineno]
    # Offsets in the tree count UTF-8 bytes. Text before the body is the end of a one-line def.
    if lines[0].encode()[: body[0].col_offset].strip():
        lines[0] = lines[0].encode()[body[0].col_offset :].decode()
    source = iter([f"{line}\n" for line in lines])
    for token in tokenize.generate_tokens(lambda: next(source, "")):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip())


def _first_line(statement: ast.stmt) -> int:
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(each.lineno for each in decorators)])


class _Anything:
    def __repr__(self) -> str:
        return "..."


def _shape(signature: inspect.Signature) -> str:
    empty = inspect.Parameter.empty
    bare = [
        each.replace(annotation=empty, default=empty if each.default is empty else _Anything())
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=bare, return_annotation=empty))


def _function(attribute: Any) -> Callable[..., Any]:
    """The function behind what a class holds under a method's name."""
    if isinstance(attribute, property):
        attribute = attribute.fget
    return cast("Callable[..., Any]", getattr(attribute, "__func__", attribute))
