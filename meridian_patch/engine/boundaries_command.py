"""``meridian boundaries MODEL``: prints which think boundaries would be used, and why.

Reads the tokenizer and config.json; starts no engine and reads no weights.
"""

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from meridian_patch.engine.boundaries import describe_unknown
from meridian_patch.engine.model_directory import read_model
from meridian_patch.phase.boundaries import TokenIds
from meridian_patch.phase.markers import Marker
from meridian_patch.phase.resolve import Resolution


def run(model: str, reasoning_parser: str | None, family: str | None, as_json: bool) -> int:
    """Print what the scheduler would use for a model.

    Args:
        model: directory with config.json and the tokenizer's files, or a cached name.
        reasoning_parser: as given to the server, or None.
        family: forces a family, as ``family:`` in the configuration does.
        as_json: one JSON object instead of tables.

    Returns:
        Exit status: 0, also for a model with a single phase.

    Raises:
        BoundaryError: no such model on this machine, no tokenizer, or unresolvable boundaries.
        ConfigError: wrong configuration or family file, unknown family.
    """
    found = read_model(model, reasoning_parser, family)
    resolution = found.resolution
    if resolution is None:
        why = describe_unknown(model, found.identity)
        print(json.dumps({"model": model, "phases": 1, "why": why}) if as_json else why)
        return 0
    report = _report(model, resolution, found.tokenizer)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_tables(report)
    return 0


def _report(model: str, resolution: Resolution, tokenizer: Any) -> dict[str, Any]:
    markers, match = resolution.markers, resolution.markers.match
    boundaries = resolution.boundaries
    documented = match.family.documented_ids if match else None
    rows = [
        _row(marker, resolution.sequences[marker.field], documented, tokenizer)
        for marker in (*markers.start, *markers.end, *markers.implicit_end)
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
        "turn_start": [tokenizer.decode([token]) for token in sorted(boundaries.turn_start)],
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
        "turn_start": "turns start with",
        "provenance": "documented ids",
        "source": "their source",
        "notes": "notes",
    }
    for key, name in names.items():
        if report[key]:
            value = " ".join(report[key]) if key == "turn_start" else str(report[key])
            facts.add_row(name, Text(value, overflow="fold"))
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
