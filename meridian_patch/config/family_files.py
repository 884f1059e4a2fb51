"""Loads the family files: the packaged ones, and those of ``families_dir``."""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from pathlib import Path

from pydantic import ValidationError

from meridian_patch.config.family_schema import Family
from meridian_patch.config.schema import Config, ExitConfig
from meridian_patch.config.validate import shown, validate
from meridian_patch.config.yaml_file import parse_mapping, read_text
from meridian_patch.errors import ConfigError

SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class FamilyFile:
    """A family and the file that it was read from."""

    family: Family
    path: Path


Families = Mapping[str, FamilyFile]


def load_families(families_dir: Path | None = None) -> Families:
    """All families by name, in order of their names.

    Args:
        families_dir: additional or replacing files; None for the packaged ones alone.

    Raises:
        ConfigError: no such directory, a wrong file, two files for one family, a replacement
            without ``replaces: true``, or one that replaces nothing.
    """
    families = _read_directory(packaged_directory())
    if families_dir is not None:
        families = _merge(families, _read_directory(families_dir).values())
    return dict(sorted(families.items()))


def packaged_directory() -> Path:
    """Directory of the family files of this release."""
    # Load-bearing: the package is installed as files, never imported from an archive.
    return Path(str(resources.files("meridian_patch.configs"))) / "families"


def get_family(families: Families, name: str, origin: str) -> FamilyFile:
    """The family called ``name``; the error names ``origin``, where the name was set."""
    if name in families:
        return families[name]
    close = difflib.get_close_matches(name, families, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"{origin}: family is {shown(name)}, which no family file describes; {hint}"
        f"known: {', '.join(families)}. Add a file of its name to a directory of your own and set "
        "families_dir to it"
    )


def read_family(path: Path) -> FamilyFile:
    """Read and check one family file."""
    return _parse_family(read_text(path), path)


# Each engine asks for all families several times.
@lru_cache(maxsize=256)
def _parse_family(text: str, path: Path) -> FamilyFile:
    origin = f"file {path}"
    return FamilyFile(validate(Family, parse_mapping(text, origin), lambda _: origin), path)


def _read_directory(directory: Path) -> dict[str, FamilyFile]:
    families: dict[str, FamilyFile] = {}
    try:
        paths = sorted(path for path in directory.iterdir() if path.suffix in SUFFIXES)
    except OSError as error:
        raise ConfigError(
            f"families_dir is {shown(str(directory))}, expected an existing directory that can be "
            f"read: {error.strerror}"
        ) from error
    for path in paths:
        file = read_family(path)
        name = file.family.family
        if name in families:
            raise ConfigError(
                f"two files for family {name!r}: {families[name].path} and {path}; remove one"
            )
        families[name] = file
    for name, file in families.items():
        if name != file.path.stem:
            raise ConfigError(
                f"file {file.path}: family is {name!r}, expected {file.path.stem!r}, the file's "
                f"name; rename the file to {name}.yaml or change the field"
            )
    return families


def _merge(packaged: dict[str, FamilyFile], own: Iterable[FamilyFile]) -> dict[str, FamilyFile]:
    merged = dict(packaged)
    for file in own:
        name, replaces = file.family.family, file.family.replaces
        if name in packaged and not replaces:
            raise ConfigError(
                f"two files for family {name!r}: {packaged[name].path} and {file.path}; write "
                "'replaces: true' in the second, or give it a name of its own"
            )
        if replaces and name not in packaged:
            close = difflib.get_close_matches(name, packaged, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ConfigError(
                f"file {file.path}: replaces is true, but there is no packaged family {name!r}; "
                f"{hint}remove 'replaces' if the family is new"
            )
        merged[name] = file
    return merged


def exit_origin(config: Config, family: str, field: str) -> str:
    """Where a field of section ``exit`` comes from that ``exit_config`` merged, for messages."""
    file = load_families(config.families_dir).get(family)
    if field in config.exit.model_fields_set or file is None:
        return "the configuration"
    return f"file {file.path}"


def exit_config(config: Config, family: str) -> ExitConfig:
    """Section ``exit`` for a family: the configuration's fields, then the family's.

    Args:
        config: the server's configuration.
        family: name of a family; one without a file changes nothing.

    Raises:
        ConfigError: the two contradict each other; the message names the family's file.
    """
    file = load_families(config.families_dir).get(family)
    if file is None:
        return config.exit
    set_there = file.family.exit.model_dump(include=file.family.exit.model_fields_set)
    set_here = config.exit.model_dump(include=config.exit.model_fields_set)
    try:
        return ExitConfig(**{**set_there, **set_here})
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise ConfigError(
            f"section exit of the configuration and of file {file.path}: expected {said}"
        ) from error
