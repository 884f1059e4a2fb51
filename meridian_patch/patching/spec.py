"""What a patch and a rebinding are: data only, so that declaring one imports nothing."""

from dataclasses import dataclass, fields
from typing import Literal

from packaging.specifiers import SpecifierSet

Process = Literal["api_server", "engine_core", "worker", "any"]


@dataclass(frozen=True)
class Site:
    """A module global that is looked up when an engine is built.

    Attributes:
        module: full name of the module.
        attribute: the global.
        is_optional: the module has no such global in some supported releases.
    """

    module: str
    attribute: str
    is_optional: bool = False

    def __str__(self) -> str:
        return f"{self.module}:{self.attribute}"


@dataclass(frozen=True, kw_only=True)
class Contract:
    """What a replacement takes for granted about the class at the patch's first site.

    Attributes:
        calls: methods overridden or called; a change of their parameters is a refusal.
        behaviour: methods whose bodies are relied on; a change is a warning at run time and a
            failing test for the installed release.
        reads: instance attributes touched; each must be assigned by the class or its bases.
        lookups: ``"module:Class.method"`` or ``"module:function"`` that reads the sites' names
            each time it is called, which is what makes rebinding them take effect.
        collaborators: ``"module:Class.method"`` of other classes whose bodies are relied on.
    """

    calls: tuple[str, ...]
    behaviour: tuple[str, ...]
    reads: tuple[str, ...]
    lookups: tuple[str, ...]
    collaborators: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One class to replace by a subclass of itself.

    Attributes:
        name: unique among the patches applied together.
        sites: every global that must hold the same original; the first is its definition.
        build: ``"module:function"``, a factory from the original to its replacement. Imported
            and called once, after all originals of all patches are resolved.
        versions: PEP 440 range of upstream versions.
        contract: what the replacement takes for granted.
        process: where the replacement acts. It is bound in every process all the same, because
            a forked process inherits its parent's bindings and applies nothing itself.
        why: the reason for replacing the class.
        upstream: where the change was offered upstream, or ``"none: REASON"``.
        remove_when: the condition under which the patch is no longer needed.
    """

    name: str
    sites: tuple[Site, ...]
    build: str
    versions: str
    contract: Contract
    process: Process
    why: str
    upstream: str
    remove_when: str

    def __post_init__(self) -> None:
        """Raise ValueError for an empty field or a malformed one."""
        for field in fields(self):
            if not getattr(self, field.name):
                raise ValueError(f"patch {self.name!r}: field {field.name} is empty")
        if self.build.count(":") != 1:
            raise ValueError(
                f"patch {self.name!r}: field build is {self.build!r}, expected 'module:function'"
            )
        SpecifierSet(self.versions)

    @property
    def definition(self) -> Site:
        return self.sites[0]


@dataclass(frozen=True, kw_only=True)
class Rebinding:
    """Attributes of a single object, or of a module, that are bound anew while a process runs.

    A patch cannot do it: the object, or the value that is chosen, exists only then.

    Attributes:
        owner: ``"module:Class"`` of the object, or the module.
        attributes: what is bound anew.
        places: ``"module:function"`` or ``"module:Class.method"`` that binds it.
        process: where it is done.
        lasts: until when, as an end of a sentence that begins with "bound".
        why: the reason for binding it anew.
    """

    owner: str
    attributes: tuple[str, ...]
    places: tuple[str, ...]
    process: Process
    lasts: str
    why: str
