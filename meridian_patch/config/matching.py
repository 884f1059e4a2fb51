"""Finds the family of a served model."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import chain
from typing import Literal

from meridian_patch.config.family_files import Families, FamilyFile
from meridian_patch.config.family_schema import Family
from meridian_patch.errors import ConfigError

How = Literal["config", "name", "architecture", "parser"]


@dataclass(frozen=True)
class ModelIdentity:
    """What is known about a served model without its tokenizer.

    Attributes:
        names: basename of the path or repository, served names, name in config.json.
        architectures: as in config.json.
        parser: vLLM's reasoning parser, or None.
    """

    names: tuple[str, ...]
    architectures: tuple[str, ...]
    parser: str | None


@dataclass(frozen=True)
class FamilyMatch:
    """A model's family and how it was found.

    Attributes:
        label: the family's name, or ``<architecture X>`` if several families fit equally well.
        family: the file's values; for several families, only those that are equal in all.
        files: the file or files, for messages.
        how: the criterion by which the family was found.
        evidence: the glob, architecture or parser that fitted.
    """

    label: str
    family: Family
    files: str
    how: How
    evidence: str


def match_family(families: Families, model: ModelIdentity) -> FamilyMatch | None:
    """The family that fits best, or None.

    1. The family with the longest fitting name glob; two with equally long globs are an error.
    2. If no name fits, the families of the architecture, if all agree on the markers.
    3. If that fails, the families of the reasoning parser, under the same condition.

    Raises:
        ConfigError: two families fit equally well; names both.
    """
    by_name = _match_name(families, model.names)
    if by_name is not None:
        return by_name
    for architecture in model.architectures:
        fitting = [
            file for file in families.values() if architecture in file.family.match.architectures
        ]
        by_architecture = _match_agreeing(fitting, "architecture", architecture)
        if by_architecture is not None:
            return by_architecture
    if model.parser is None:
        return None
    fitting = [file for file in families.values() if model.parser in file.family.parsers]
    return _match_agreeing(fitting, "parser", model.parser)


def forced_match(file: FamilyFile, origin: str) -> FamilyMatch:
    """The match for a family that the operator forced."""
    return FamilyMatch(file.family.family, file.family, str(file.path), "config", origin)


def _match_name(families: Families, names: tuple[str, ...]) -> FamilyMatch | None:
    lowered = [name.lower() for name in names]
    fitting = [
        (len(glob), glob, file)
        for file in families.values()
        for glob in file.family.match.names
        if any(fnmatchcase(name, glob) for name in lowered)
    ]
    if not fitting:
        return None
    longest = max(length for length, _, _ in fitting)
    best = {file.family.family: (glob, file) for length, glob, file in fitting if length == longest}
    if len(best) > 1:
        raise ConfigError(
            f"model {' / '.join(names)} fits the families {' and '.join(best)} equally well: "
            + " and ".join(f"{glob!r} in {file.path}" for glob, file in best.values())
            + "; set 'family:' in the configuration to one of them"
        )
    ((glob, file),) = best.values()
    return FamilyMatch(file.family.family, file.family, str(file.path), "name", glob)


def _match_agreeing(fitting: list[FamilyFile], how: How, evidence: str) -> FamilyMatch | None:
    if len({file.family.markers for file in fitting}) != 1:
        return None
    first = fitting[0]
    if len(fitting) == 1:
        return FamilyMatch(first.family.family, first.family, str(first.path), how, evidence)
    files = ", ".join(str(file.path) for file in fitting)
    return FamilyMatch(f"<{how} {evidence}>", _common(fitting), files, how, evidence)


def _joined(texts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(chain.from_iterable(texts)))


def _common(fitting: list[FamilyFile]) -> Family:
    """The first family, without the values in which the others differ."""
    families = [file.family for file in fitting]
    histories = {family.history for family in families}
    prompt_starts = {family.prompt_start for family in families}
    probes = {family.probe for family in families}
    names = ", ".join(family.family for family in families)
    no_ids = families[0].documented_ids.model_copy(
        update={
            "start": None,
            "end": None,
            "close": None,
            "single_token": None,
            "provenance": "unverified",
            "source": f"several families: {names}",
        }
    )
    return families[0].model_copy(
        update={
            "documented_ids": no_ids,
            "probe": probes.pop() if len(probes) == 1 else None,
            "history": histories.pop() if len(histories) == 1 else "unverified",
            "history_evidence": None,
            # Those of all families, so that every tool loop is kept, no tool call is taken for a
            # thought, and no message's text for a marker.
            "tool_call": _joined(family.tool_call for family in families),
            "implicit_end": _joined(family.implicit_end for family in families),
            "turn_start": _joined(family.turn_start for family in families),
            "prompt_start": prompt_starts.pop() if len(prompt_starts) == 1 else "unverified",
            "notes": "",
        }
    )
