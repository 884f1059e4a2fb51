"""``meridian boundaries MODEL_DIR``: which think boundaries would be used, and why.

Reads the tokenizer and config.json; no engine is started and no weights are read.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer, PretrainedConfig

from meridian_patch import envs
from meridian_patch.config.load import LoadedConfig, load_config
from meridian_patch.config.matching import ModelIdentity
from meridian_patch.engine.boundaries import (
    describe_unknown,
    model_names,
    parser_strings,
    resolve_model,
    vocabulary_of,
)
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.boundaries import TokenIds
from meridian_patch.phase.markers import Marker, ServerStrings
from meridian_patch.phase.resolve import Resolution


def run(model: str, reasoning_parser: str | None, family: str | None, as_json: bool) -> int:
    """Print what the scheduler would use for a model.

    Args:
        model: directory with config.json and the tokenizer's files.
        reasoning_parser: as given to the server, or None.
        family: forces a family, as ``family:`` in the configuration does.
        as_json: one JSON object instead of tables.

    Returns:
        Exit status: 0, also for a model with a single phase.

    Raises:
        BoundaryError: no such directory, no tokenizer, or unresolvable boundaries.
        ConfigError: wrong configuration or family file, unknown family.
    """
    loaded = _with_family(load_config(envs.environment()), family)
    if not Path(model).is_dir():
        raise BoundaryError(
            f"model directory {model} does not exist; expected a local directory with config.json "
            "and the tokenizer's files"
        )
    tokenizer = _load(AutoTokenizer.from_pretrained, model, "tokenizer")
    vocabulary = vocabulary_of(tokenizer, model)
    identity = _identify(model, reasoning_parser)
    server = ServerStrings()
    if reasoning_parser is not None:
        start, end = parser_strings(reasoning_parser, tokenizer, model)
        server = ServerStrings(parser=reasoning_parser, parser_start=start, parser_end=end)
    resolution = resolve_model(model, identity, server, vocabulary, loaded)
    if resolution is None:
        why = describe_unknown(model, identity)
        print(json.dumps({"model": model, "phases": 1, "why": why}) if as_json else why)
        return 0
    report = _report(model, resolution, tokenizer)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    return 0


def _with_family(loaded: LoadedConfig, family: str | None) -> LoadedConfig:
    if family is None:
        return loaded
    config = loaded.config.model_copy(update={"family": family})
    origins = {**loaded.origins, "family": "option --family"}
    return dataclasses.replace(loaded, config=config, origins=origins)


def _load(loader: Any, model: str, what: str) -> Any:
    try:
        return loader(model, local_files_only=True)
    except Exception as error:
        raise BoundaryError(
            f"model directory {model} has no usable {what}: {error}. Expected the files that the "
            "model was published with"
        ) from error


def _identify(model: str, parser: str | None) -> ModelIdentity:
    # The raw dictionary: an architecture that transformers does not know is no hindrance.
    config, _ = _load(PretrainedConfig.get_config_dict, model, "config.json")
    if not config:
        raise BoundaryError(f"model directory {model} has no config.json, or an empty one")
    path = str(Path(model).absolute())
    return ModelIdentity(
        names=model_names(path, None, config.get("_name_or_path") or ""),
        architectures=tuple(config.get("architectures") or ()),
        parser=parser,
    )


def _report(model: str, resolution: Resolution, tokenizer: Any) -> dict[str, Any]:
    markers, match = resolution.markers, resolution.markers.match
    boundaries = resolution.boundaries
    documented = match.family.documented_ids if match else None
    rows = [
        _row(marker, resolution.sequences[marker.field], documented, tokenizer)
        for marker in (*markers.start, *markers.end)
    ]
    close = _row(markers.close, (boundaries.close,), documented, tokenizer)
    rows.append({**close, "field": "close"})
    return {
        "model": model,
        "phases": 2,
        "family": boundaries.family,
        "found_by": f"{match.how}: {match.evidence}" if match else "the server's strings",
        "file": match.files if match else None,
        "provenance": documented.provenance if documented else None,
        "source": documented.source if documented else None,
        "history": match.family.history if match else "unverified",
        "prompt_start": match.family.prompt_start if match else "unverified",
        "notes": match.family.notes if match else "",
        "warnings": list(resolution.notes),
        "markers": rows,
    }


def _row(
    marker: Marker, sequences: tuple[TokenIds, ...], documented: Any, tokenizer: Any
) -> dict[str, Any]:
    expected = getattr(documented, marker.field, None)
    return {
        "field": marker.field,
        "text": marker.text,
        "origin": marker.origin,
        "ids": [list(ids) for ids in sequences],
        "tokens": [[tokenizer.decode([token]) for token in ids] for ids in sequences],
        "documented_ids": list(expected) if expected else None,
        "is_as_documented": expected in sequences if expected else None,
    }


def _print_tables(report: dict[str, Any]) -> None:
    console = Console()
    facts = Table(show_header=False, box=None)
    names = {
        "model": "model",
        "family": "family",
        "found_by": "found by",
        "file": "family file",
        "history": "history",
        "prompt_start": "prompt starts in",
        "provenance": "documented ids",
        "source": "their source",
        "notes": "notes",
    }
    for key, name in names.items():
        if report[key]:
            facts.add_row(name, Text(str(report[key]), overflow="fold"))
    for warning in report["warnings"]:
        facts.add_row("warning", Text(warning, overflow="fold"))
    markers = Table("marker", "text", "ids", "tokens", "documented", "from")
    for row in report["markers"]:
        for ids, tokens in zip(row["ids"], row["tokens"], strict=True):
            cells = (
                row["field"],
                repr(row["text"]),
                " ".join(map(str, ids)),
                " ".join(map(repr, tokens)),
                _verdict(row),
                "family file" if row["origin"] == f"file {report['file']}" else row["origin"],
            )
            markers.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console.print(facts, markers)


def _verdict(row: dict[str, Any]) -> str:
    if row["documented_ids"] is None:
        return "no ids"
    if row["is_as_documented"]:
        return "same"
    return "differs: " + " ".join(map(str, row["documented_ids"]))
