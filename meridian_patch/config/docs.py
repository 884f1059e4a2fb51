"""Renders docs/configuration.md from the schema and the family files."""

from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from meridian_patch import envs
from meridian_patch.config.family_files import load_families
from meridian_patch.config.family_schema import Family
from meridian_patch.config.schema import Config
from meridian_patch.config.validate import field_names

_HEAD = """\
# Configuration

<!-- Generated from meridian_patch/config by scripts/gen_docs.py: do not edit. -->

Nothing has to be configured: the defaults are the product. Values come from, in rising order:

1. the default,
2. a YAML file, named by `MERIDIAN_PATCH_CONFIG=path`,
3. one environment variable per value, `MERIDIAN_PATCH_SET_<KEY>`, where `__` stands for the dot.

The file starts with `version: 1`. Unknown keys, duplicate keys and values of the wrong type or
out of bounds stop the engine with one sentence that names the key, the file or variable, the value
and what was expected. Nothing is converted.

Files and variables are YAML with the types of YAML 1.2's core schema. `true` and `false` are truth
values; `yes`, `no`, `on`, `off`, `1:30` and `2026-01-01` are texts; `1e-3` is a number. A number
with a 0 before it is refused, because YAML 1.1 takes it for an octal one, and so is one that is not
kept exactly: a whole number beyond 2⁵³, or one that a float of 64 bits does not hold. A file has at
most 1 MiB, 20,000 values (what aliases repeat included) and 32 levels. Family files and cost
models are read in the same way. An empty variable `MERIDIAN_PATCH_SET_<KEY>` is YAML's null; any
other variable of ours that is empty is refused.

```yaml
version: 1
policy:
  name: latency
  level_tokens: 1024
```

## Keys

| key | type | default | bounds | variable | meaning |
|---|---|---|---|---|---|
"""

_FAMILIES = """
## Families

A family file says with which texts a family of models opens and ends thinking. The family is
found from the model's name (the longest fitting glob), else from its architecture, else from the
reasoning parser; the last two count only when all families that fit agree on the markers. `family:`
forces one. When nothing fits and the server has no reasoning parser, requests have a single phase
and the log says so once.

Token ids are taken from the served tokenizer, never from the file. Documented ids are compared with
them: `verified` ids (seen in a tokenizer file) that differ stop the engine; `third_party` ids (in
other engines' code only) and `unverified` ones are logged. A marker that is documented as one token
but is not one in the served tokenizer stops the engine too. `meridian boundaries MODEL_DIR` prints
what would be used and why.

To add or replace a family, put `NAME.yaml` into a directory of your own and set `families_dir` to
it; a file that stands in for a packaged one says `replaces: true`.

### Keys of a family file

| key | required | meaning |
|---|---|---|
"""

_PACKAGED = """
### Packaged families

| family | names | start | end | history | ids |
|---|---|---|---|---|---|
"""


def render_configuration() -> str:
    """The whole page, as Markdown."""
    rows = "".join(_config_rows(Config, ()))
    keys = "".join(_family_key_rows())
    families = "".join(_family_row(file.family) for file in load_families().values())
    return _HEAD + rows + _FAMILIES + keys + _PACKAGED + families


def _config_rows(model: type[BaseModel], path: tuple[str, ...]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        below = (*path, name)
        if field_names(Config, below):
            section = field.annotation
            assert isinstance(section, type)
            yield from _config_rows(section, below)
            continue
        default = "unset" if field.default is None else _code(field.default)
        bounds = ", ".join(filter(None, map(_bound, field.metadata)))
        variable = envs.OVERRIDE_PREFIX + "__".join(below).upper()
        yield _table_row(
            _code(".".join(below)), _type(field), default, bounds, _code(variable), _meaning(field)
        )


def _family_key_rows() -> Iterator[str]:
    for name, field in Family.model_fields.items():
        is_section = not field.description and field_names(Family, (name,))
        if not is_section:
            yield _table_row(_code(name), _required(field), _meaning(field))
            continue
        for key in field_names(Family, (name,)):
            section = field.annotation
            assert isinstance(section, type)
            below = section.model_fields[key]
            yield _table_row(_code(f"{name}.{key}"), _required(below), _meaning(below))


def _family_row(family: Family) -> str:
    return _table_row(
        _code(family.family),
        " ".join(map(_code, family.match.names)),
        _code(family.start),
        _code(family.end),
        family.history,
        family.documented_ids.provenance,
    )


def _bound(constraint: object) -> str:
    if isinstance(constraint, Ge):
        return f"≥ {constraint.ge}"
    return f"> {constraint.gt}" if isinstance(constraint, Gt) else ""


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return " or ".join(map(str, get_args(annotation)))
    if origin in {Union, UnionType}:
        kinds = [each for each in get_args(annotation) if each is not NoneType]
        return " or ".join(map(_type_name, kinds))
    if origin is None and isinstance(annotation, type):
        return annotation.__name__
    return str(annotation).replace("typing.", "")


def _required(field: FieldInfo) -> str:
    return "yes" if field.is_required() else "no"


def _meaning(field: FieldInfo) -> str:
    return field.description or ""


def _code(value: object) -> str:
    """As code, with line breaks and bars escaped, because they would end the table's cell."""
    text = str(value).replace("\n", "\\n").replace("|", "\\|")
    return f"`{text}`"


def _table_row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |\n"
