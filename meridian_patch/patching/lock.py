"""The lock: what the patches' contracts met in each upstream release they were checked against."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from packaging.version import InvalidVersion, Version

from meridian_patch.patching import fingerprint
from meridian_patch.patching.source import MethodSource, SourceTree
from meridian_patch.patching.spec import Patch

Kind = Literal["parameters", "source"]


class ClassLock(TypedDict):
    """What is locked of one class.

    Attributes:
        parameters: by method that is overridden or called.
        source: hash of the body, by method whose behaviour is relied on.
        attributes: instance attributes that are read, sorted.
    """

    parameters: dict[str, str]
    source: dict[str, str]
    attributes: list[str]


Entry = dict[str, ClassLock]
"""One release: by class, as ``"module:Class"``."""

Lock = Mapping[str, Entry]
"""By release, without the local part: ``"0.32.0"`` also stands for ``0.32.0+cpu``."""


@dataclass(frozen=True)
class Upstream:
    """The package that is patched, as it is in this process.

    Attributes:
        title: what to call it in a message.
        version: the version it states.
        root: the directory of its source files.
        lock: the releases the patches were checked against.
    """

    title: str
    version: str
    root: Path
    lock: Lock

    @property
    def release(self) -> str | None:
        """The version without its local part, or None when it is not a PEP 440 version."""
        try:
            return Version(self.version).public
        except InvalidVersion:
            return None


@dataclass(frozen=True)
class LockedMethod:
    """One method that a contract names.

    Attributes:
        owner: its class, as ``"module:Class"``, or ``"module:"`` of a function.
        kind: what of it is locked.
        name: the method.
    """

    owner: str
    kind: Kind
    name: str

    def __str__(self) -> str:
        return f"{self.owner}{'' if self.owner.endswith(':') else '.'}{self.name}"


def locked_methods(patch: Patch) -> Iterator[LockedMethod]:
    """Every method that the patch's contract names, with what of it is locked."""
    owner = str(patch.definition)
    for name in patch.contract.calls:
        yield LockedMethod(owner, "parameters", name)
    for name in patch.contract.behaviour:
        yield LockedMethod(owner, "source", name)
    for other in (*patch.contract.lookups, *patch.contract.collaborators):
        yield _named(other)


def find_method(tree: SourceTree, method: LockedMethod) -> MethodSource:
    """Where the method stands in the given sources.

    Raises:
        LookupError: it is not there.
    """
    module, _, name = method.owner.partition(":")
    if not name:
        return tree.find_function(module, method.name)
    return tree.find_method(tree.find_class(module, name), method.name)


def read_fingerprint(tree: SourceTree, method: LockedMethod) -> str:
    """What of the method is locked, read from the given sources.

    Raises:
        LookupError: the method is not there.
    """
    found = find_method(tree, method)
    if method.kind == "parameters":
        return fingerprint.parameters(found)
    return fingerprint.source_hash(found)


def locked_fingerprint(entry: Entry, method: LockedMethod) -> str | None:
    """What the lock says of the method, or None when it says nothing."""
    locked = entry.get(method.owner)
    return None if locked is None else locked[method.kind].get(method.name)


def missing_attributes(tree: SourceTree, patch: Patch) -> list[str]:
    """Attributes that the contract reads and the class never assigns.

    Raises:
        LookupError: the class is not there.
    """
    cls = tree.find_class(patch.definition.module, patch.definition.attribute)
    return sorted(set(patch.contract.reads) - fingerprint.assigned_attributes(tree, cls))


def reads_a_site(tree: SourceTree, patch: Patch) -> bool:
    """True when a lookup of the contract reads one of the sites' names each time it is called.

    Raises:
        LookupError: a lookup is not there.
    """
    methods = [find_method(tree, _named(lookup)) for lookup in patch.contract.lookups]
    return any(
        fingerprint.looks_up_at_call_time(method, site)
        for method in methods
        for site in patch.sites
    )


def compute_entry(tree: SourceTree, patches: Iterable[Patch]) -> Entry:
    """The lock entry of the release whose source files are given.

    Raises:
        LookupError: something that a contract names is not there, or no lookup reads a site, so
            that rebinding would change nothing; the message lists all of it.
    """
    entry: Entry = {}
    absent: list[str] = []
    for patch in patches:
        for method in locked_methods(patch):
            locked = _class_lock(entry, method.owner)
            try:
                locked[method.kind][method.name] = read_fingerprint(tree, method)
            except LookupError as error:
                absent.append(str(error))
        definition = str(patch.definition)
        try:
            unset = missing_attributes(tree, patch)
        except LookupError as error:
            absent.append(str(error))
        else:
            absent += [f"{definition} never sets {attribute}" for attribute in unset]
            _class_lock(entry, definition)["attributes"] = sorted(patch.contract.reads)
        try:
            takes_effect = reads_a_site(tree, patch)
        except LookupError as error:
            absent.append(str(error))
        else:
            if not takes_effect:
                lookups = ", ".join(patch.contract.lookups)
                absent.append(f"{lookups} reads no site of patch {patch.name}")
    if absent:
        raise LookupError("; ".join(dict.fromkeys(absent)))
    return entry


def _named(text: str) -> LockedMethod:
    """What ``"module:Class.method"`` or ``"module:function"`` names."""
    module, _, path = text.partition(":")
    cls, _, name = path.rpartition(".")
    return LockedMethod(f"{module}:{cls}", "source", name)


def _class_lock(entry: Entry, owner: str) -> ClassLock:
    return entry.setdefault(owner, ClassLock(parameters={}, source={}, attributes=[]))
