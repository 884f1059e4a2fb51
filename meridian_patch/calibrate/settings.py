"""Reads the command line of ``meridian calibrate``; a wrong value is one sentence that names it."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meridian_patch import envs
from meridian_patch.bench.options import read_whole
from meridian_patch.calibrate.graders import Grader, make_grader
from meridian_patch.calibrate.problems import ProblemFile, read_problems
from meridian_patch.calibrate.thresholds import (
    KINDS,
    StrategyKind,
    read_kinds,
    read_share,
    read_thresholds,
)
from meridian_patch.config.load import load_config
from meridian_patch.config.yaml_file import parse_value
from meridian_patch.engine.model_files import describe_missing, find_model
from meridian_patch.errors import CalibrationError

_JOURNAL = "replies.jsonl"
_MOST_TEMPERATURE = 2.0
# Truth values of YAML 1.1, which are texts today: a template would take `no` for true.
_UNCLEAR = frozenset(("y", "n", "yes", "no", "on", "off"))
# vLLM's seed if none is set; it is recorded with the replies.
_ENGINE = {"seed": 0}


@dataclass(frozen=True)
class CalibrationRequest:
    """What was asked for, checked as far as can be without the model.

    Attributes:
        model: directory.
        thresholds: to try, by strategy.
        sampling: fields of ``SamplingParams`` in place of the model's own.
        max_tokens: of a natural output; None: as many as there is room for.
        template: variables of the chat template.
        engine: arguments of ``vllm.LLM``, without the model.
        out: folder for everything that is written.
    """

    model: Path
    data: ProblemFile
    grader: Grader
    epsilon: float
    confidence: float
    thresholds: dict[StrategyKind, Sequence[float]]
    sampling: dict[str, Any]
    max_tokens: int | None
    max_answer_tokens: int
    reasoning_parser: str | None
    family: str | None
    template: dict[str, Any]
    engine: dict[str, Any]
    out: Path

    @property
    def journal(self) -> Path:
        """Where replies are kept."""
        return self.out / _JOURNAL


def read_request(parsed: argparse.Namespace) -> CalibrationRequest:
    """Check everything that can be checked without the model.

    Raises:
        CalibrationError, BenchError: a wrong value, no such model on this machine, or a data file
            that cannot be used.
        ConfigError: a wrong configuration.
    """
    epsilon = read_share("--epsilon", parsed.epsilon)
    confidence = read_share("--confidence", parsed.confidence)
    texts = {"eat": parsed.eat_deltas, "rpdi": parsed.rpdi_lambdas}
    thresholds = {kind: read_thresholds(kind, texts[kind.name]) for kind in _kinds(parsed)}
    grader = make_grader(parsed.grader)
    data = read_problems(parsed.data)
    grader.check(data.path, data.problems)
    sampling = {}
    if parsed.temperature is not None:
        sampling["temperature"] = _temperature(parsed.temperature)
    max_tokens = parsed.max_tokens
    return CalibrationRequest(
        data=data,
        grader=grader,
        epsilon=epsilon,
        confidence=confidence,
        thresholds=thresholds,
        sampling=sampling,
        max_tokens=None if max_tokens is None else read_whole("--max-tokens", max_tokens),
        max_answer_tokens=read_whole("--max-answer-tokens", parsed.max_answer_tokens),
        reasoning_parser=parsed.reasoning_parser,
        family=parsed.family,
        template=_pairs("--template", parsed.template),
        engine=_ENGINE | _pairs("--engine", parsed.engine),
        out=parsed.out,
        model=_model(parsed.model),
    )


def _model(text: str) -> Path:
    directory = find_model(text)
    if directory is None:
        raise CalibrationError(describe_missing(text))
    return directory


def _kinds(parsed: argparse.Namespace) -> list[StrategyKind]:
    if parsed.strategies is not None:
        return read_kinds(parsed.strategies)
    config = load_config(envs.environment()).config.exit
    kinds = [kind for name, kind in KINDS.items() if getattr(config, name)]
    if not kinds:
        raise CalibrationError(
            f"{' and '.join(f'exit.{name}' for name in KINDS)} are off in the configuration, so "
            "that there is nothing to calibrate; switch one on, or name it with --strategies"
        )
    return kinds


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= _MOST_TEMPERATURE:
        raise CalibrationError(
            f"--temperature is {text!r}, expected a number from 0 to {_MOST_TEMPERATURE:g}"
        )
    return value


def _pairs(option: str, texts: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE``, values as in YAML."""
    given = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise CalibrationError(f"{option} is {text!r}, expected NAME=VALUE")
        if value.lower() in _UNCLEAR:
            raise CalibrationError(f"{option} is {text!r}, expected true or false, or quotes")
        given[name] = parse_value(value, f"{option} {name}")
    return given
