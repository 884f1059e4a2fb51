"""Writes the chosen thresholds as a configuration file that says where they come from."""

import hashlib
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from meridian_patch.calibrate.outcome import Goal, StrategyOutcome
from meridian_patch.config.schema import SCHEMA_VERSION, Config
from meridian_patch.config.yaml_file import Dumper
from meridian_patch.exit.strategies.build import SWITCHES

CURVE_COLUMNS = ("threshold", "saving_ratio", "accuracy", "lost", "lost_bound", "is_safe")
_WIDTH = 98
_DIGITS = 6
# Hashing this many bytes takes seconds.
_CHEAP_BYTES = 2 * 2**30
_WEIGHTS = ("*.safetensors", "*.bin", "*.gguf")
_HEAD = """\
Written by `meridian calibrate`. The thresholds hold for this model, with the rest of section exit,
and for problems like those of the data file. Use it with MERIDIAN_PATCH_CONFIG, or copy section
exit into a file of your own. Nothing is closed until exit.mode is enforce.
"""


class _FlowList(list[Any]):
    """A list that is written in one line."""


class _Dumper(Dumper):
    """Writes rows in one line each, and everything else as blocks."""


_Dumper.add_representer(
    _FlowList, lambda dumper, row: dumper.represent_sequence("tag:yaml.org,2002:seq", row, True)
)


def model_identity(model: Path) -> dict[str, Any]:
    """Name, revision and digest of a model's weights; no digest of large ones."""
    path = model.resolve()
    identity: dict[str, Any] = {"name": path.name}
    if path.parent.name == "snapshots":
        # The Hugging Face cache names a snapshot by its commit.
        identity = {"name": path.parents[1].name, "revision": path.name}
    files = sorted({file for pattern in _WEIGHTS for file in path.glob(pattern)})
    size = sum(file.stat().st_size for file in files)
    identity["weights_bytes"] = size
    if files and size <= _CHEAP_BYTES:
        digest = hashlib.sha256()
        for file in files:
            with file.open("rb") as content:
                digest.update(hashlib.file_digest(content, "sha256").digest())
        identity["weights_sha256"] = digest.hexdigest()
    return identity


def curve_rows(outcome: StrategyOutcome) -> list[list[Any]]:
    """The curve by ``CURVE_COLUMNS``, the most careful threshold first."""
    return [
        [_rounded(getattr(point, column)) for column in CURVE_COLUMNS]
        for point in outcome.calibration.curve
    ]


def render_profile(
    config: Config,
    outcomes: Sequence[StrategyOutcome],
    goal: Goal,
    origin: Mapping[str, Any],
) -> str:
    """The profile as YAML.

    Args:
        config: that was in force: thresholds only hold with the rest of its section ``exit``.
        outcomes: at least one with a choice.
        goal: that was asked for.
        origin: model, data, date and whatever else says where the thresholds come from.
    """
    values: dict[str, Any] = {"version": SCHEMA_VERSION}
    if config.family is not None:
        values["family"] = config.family
    if config.families_dir is not None:
        values["families_dir"] = str(config.families_dir.resolve())
    values["exit"] = _exit_section(config, outcomes)
    values["provenance"] = {
        **origin,
        "epsilon": goal.epsilon,
        "confidence": goal.confidence,
        "curve_columns": _FlowList(CURVE_COLUMNS),
        "curve": {o.kind.name: [_FlowList(row) for row in curve_rows(o)] for o in outcomes},
    }
    head = "".join(f"# {line}\n" for line in textwrap.wrap(_HEAD, _WIDTH))
    body = yaml.dump(values, Dumper=_Dumper, sort_keys=False, width=_WIDTH, allow_unicode=True)
    return f"{head}{body}"


def _exit_section(config: Config, outcomes: Sequence[StrategyOutcome]) -> dict[str, Any]:
    """The section in force; strategies and bounds that were not calibrated are off."""
    bounds = {"max_think_tokens", "answer_reserve"}
    values = config.exit.model_dump(mode="json", exclude={*bounds, "trace"})
    values |= {"mode": "observe", "patterns": []} | dict.fromkeys(SWITCHES, False)
    for outcome in outcomes:
        if outcome.chosen is not None:
            values[outcome.kind.name] = True
            values[outcome.kind.key] = float(outcome.chosen.threshold)
    return values


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value
