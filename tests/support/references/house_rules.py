"""Finds containers that are keyed by requests, and parts that hold parts, in sources of ours."""

import ast
import re

# Classes that are keys of requests, and the ids of these. Others are found by name below.
KEYS = ("str", "Any", "Request", "RequestState")
CONTAINER = rf"(\w*[dD]ict|\w*[sS]et|\w*Mapping|Counter)\[({'|'.join(KEYS)})\b.*|StateSet"
FILLED = r"\{.|dict[.(]|set\(|OrderedDict\(|defaultdict\(|Counter\("


def keyed_containers(text: str) -> set[str]:
    """Attributes of a source's classes that are dicts or sets keyed by a request, or may be."""
    found = set()
    for kind in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)):
        for node in ast.walk(kind):
            if isinstance(node, ast.AnnAssign):
                declared = ast.unparse(node.annotation).replace("'", "").replace('"', "")
                is_field = isinstance(node.target, ast.Name) and node in kind.body
                if re.fullmatch(CONTAINER, declared) and (
                    is_field or isinstance(node.target, ast.Attribute)
                ):
                    found.add(f"{kind.name}.{ast.unparse(node.target).removeprefix('self.')}")
        for node in ast.walk(made_in(kind)):
            if isinstance(node, ast.Assign) and re.match(FILLED, ast.unparse(node.value)):
                # Without a type: its keys may be anything.
                names = (ast.unparse(target) for target in node.targets)
                kept = (name for name in names if name.startswith("self."))
                found |= {f"{kind.name}.{name.removeprefix('self.')}" for name in kept}
    return found


def made_in(kind: ast.ClassDef) -> ast.AST:
    """The ``__init__`` of a class, or nothing."""
    found = (each for each in kind.body if getattr(each, "name", "") == "__init__")
    return next(found, ast.Pass())


def part_classes(texts: list[str]) -> set[str]:
    """Names of all classes that are parts of a scheduler, by their bases."""
    classes = [
        node
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    names = {"SchedulerPart"}
    while True:
        more = {kind.name for kind in classes if names & {*map(ast.unparse, kind.bases)}} - names
        if not more:
            return names
        names |= more


def held_parts(text: str, parts: set[str]) -> set[str]:
    """Attributes of the parts in a source that are parts, or are given them."""
    held = set()
    for kind in ast.walk(ast.parse(text)):
        if not isinstance(kind, ast.ClassDef) or kind.name not in parts:
            continue
        given = {
            argument.arg
            for node in ast.walk(kind)
            if isinstance(node, ast.FunctionDef)
            for argument in (*node.args.args, *node.args.kwonlyargs)
            if argument.annotation is not None and names_in(argument.annotation) & parts
        }
        for node in ast.walk(kind):
            if isinstance(node, ast.AnnAssign | ast.Assign) and node.value is not None:
                made = {
                    each.func.id
                    for each in ast.walk(node.value)
                    if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)
                }
                is_part = made & parts or ast.unparse(node.value) in given
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                kept = [each for each in targets if ast.unparse(each).startswith("self.")]
                held |= {f"{kind.name}: {ast.unparse(each)}" for each in kept if is_part}
            if isinstance(node, ast.AnnAssign) and names_in(node.annotation) & parts:
                held.add(f"{kind.name}: {ast.unparse(node.target)}")
    return held


def names_in(annotation: ast.expr) -> set[str]:
    """Words of an annotation, those in quotes included."""
    return {*re.findall(r"\w+", ast.unparse(annotation))}
