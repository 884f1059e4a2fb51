"""One calibration from start to end: model, passes, choice, files."""

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich.console import Console

from meridian_patch import __version__
from meridian_patch.bench.machine import describe_machine
from meridian_patch.bench.progress import progress_bars
from meridian_patch.calibrate.engine_process import EngineProcess
from meridian_patch.calibrate.journal import Journal
from meridian_patch.calibrate.loops import count_loops
from meridian_patch.calibrate.observe import PASSES, Natural, Observer, OnProgress, Subject
from meridian_patch.calibrate.outcome import Goal, check_naturals, decide
from meridian_patch.calibrate.problems import Problem
from meridian_patch.calibrate.profile import model_identity, render_profile
from meridian_patch.calibrate.report import PAGE, PROFILE, RESULT, verdict, write_report
from meridian_patch.calibrate.settings import CalibrationRequest
from meridian_patch.calibrate.thresholds import EAT
from meridian_patch.config.family_files import exit_config
from meridian_patch.engine.boundaries import describe_unknown
from meridian_patch.engine.model_directory import ModelDirectory, read_model
from meridian_patch.errors import CalibrationError
from meridian_patch.exit.lag import Lag
from meridian_patch.exit.text_breaks import find_breaks
from meridian_patch.phase.wrap_up import settle_wrap_up, wrap_up_ids

_LOG = "engine.log"


def calibrate_model(request: CalibrationRequest) -> int:
    """Run or resume a calibration, write its report and profile, and print them; returns 0.

    An earlier report, result and profile are deleted first. Where no threshold meets the goal, the
    report is written and the profile is not.

    Raises:
        CalibrationError: nothing can be calibrated, no threshold will do, or the engine failed.
        BoundaryError: the model's boundaries cannot be resolved.
        ConfigError: a wrong configuration or family file.
    """
    console = Console(markup=False, emoji=False)
    found = read_model(str(request.model), request.reasoning_parser, request.family)
    subject = _subject(request, found)
    goal = Goal(request.epsilon, request.confidence, subject.thresholds)
    goal.check_count(len(request.data.problems), f"data file {request.data.path}")
    prompts = [(problem, _prompt(request, found, problem)) for problem in request.data.problems]
    identity = model_identity(request.model)
    request.out.mkdir(parents=True, exist_ok=True)
    for name in (PAGE, PROFILE, RESULT):
        # Files of an earlier run must not be taken for this one's.
        (request.out / name).unlink(missing_ok=True)
    arguments = {"model": str(request.model.resolve()), **request.engine}
    with (
        Journal(request.journal, _settings(request, subject, identity)) as journal,
        EngineProcess(arguments, request.sampling, request.out / _LOG) as engine,
        _progress(console) as on_progress,
    ):
        observer = Observer(subject, request.grader, engine, journal, on_progress)
        naturals = observer.naturals(prompts)
        check_naturals(naturals, goal)
        records = observer.records(naturals)
    outcomes = decide(naturals, records, observer.early_answers, goal)
    origin = _origin(request, identity, naturals, observer.lag)
    origin["loops"] = count_loops(naturals, subject.config)
    paths = write_report(request.out, naturals, outcomes, goal, origin)
    verdicts = [verdict(outcome, goal) for outcome in outcomes]
    if all(outcome.chosen is None for outcome in outcomes):
        raise CalibrationError(f"{' '.join(verdicts)} No profile is written; see {paths[0]}")
    profile = request.out / PROFILE
    # The family's settings were in force, too.
    in_force = found.loaded.config.model_copy(update={"exit": subject.config})
    profile.write_text(render_profile(in_force, outcomes, goal, origin))
    lines = [*verdicts, *map(str, [profile, *paths])]
    console.print(*lines, sep="\n", highlight=False, soft_wrap=True)
    return 0


def _subject(request: CalibrationRequest, found: ModelDirectory) -> Subject:
    if found.resolution is None:
        reason = describe_unknown(str(request.model), found.identity)
        raise CalibrationError(
            f"{reason.removeprefix('meridian_patch: ')}. Without a boundary there is no thought to "
            "end early"
        )
    boundaries, tokenizer = found.resolution.boundaries, found.tokenizer
    if EAT in request.thresholds and not boundaries.probe:
        probe = found.resolution.markers.probe
        raise CalibrationError(
            f"model {request.model}: the probe's text {probe.text!r} ({probe.origin}) does not "
            f"hold the end boundary when written in tokens, so that EAT cannot be measured; set "
            "probe in the family file, or calibrate --strategies rpdi"
        )
    config = settle_wrap_up(
        exit_config(found.loaded.config, boundaries.family),
        found.loaded.config,
        found.vocabulary,
        boundaries,
    )
    ids = [[token_id] for token_id in range(len(tokenizer))]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return Subject(
        boundaries=boundaries,
        breaks=find_breaks(enumerate(texts)),
        config=config,
        thresholds=request.thresholds,
        max_tokens=request.max_tokens,
        max_answer_tokens=request.max_answer_tokens,
        decode=lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True)),
        wrap_up=wrap_up_ids(config.wrap_up, found.vocabulary, boundaries),
    )


def _prompt(request: CalibrationRequest, found: ModelDirectory, problem: Problem) -> list[int]:
    try:
        # As text first: newer tokenizers return more than ids when asked for ids.
        text = found.tokenizer.apply_chat_template(
            list(problem.messages), tokenize=False, add_generation_prompt=True, **request.template
        )
    except Exception as error:
        raise CalibrationError(
            f"data file {request.data.path}, line {problem.line}: the chat template of "
            f"{request.model} refuses it: {error}"
        ) from error
    return found.vocabulary.encode(text)


def _settings(
    request: CalibrationRequest, subject: Subject, identity: dict[str, Any]
) -> dict[str, Any]:
    """What replies depend on, beside their prompt."""
    return {
        "model": identity,
        "sampling": request.sampling,
        "max_tokens": request.max_tokens,
        "max_answer_tokens": request.max_answer_tokens,
        "engine": request.engine,
        "probe": subject.boundaries.probe,
        "close": (*subject.wrap_up, *subject.boundaries.close),
    }


def _origin(
    request: CalibrationRequest, identity: dict[str, Any], naturals: Sequence[Natural], lag: Lag
) -> dict[str, Any]:
    return {
        "model": identity,
        "lag": lag._asdict(),
        "data": request.data.path.name,
        "data_sha256": request.data.sha256,
        "problems": len(naturals),
        "problems_without_thought": len(request.data.problems) - len(naturals),
        "grader": request.grader.spec,
        "temperature": request.sampling.get("temperature", "as in generation_config.json"),
        "date": datetime.now().astimezone().isoformat(timespec="seconds"),
        "command": shlex.join(["meridian", *sys.argv[1:]]),
        "machine": str(describe_machine()),
        "meridian_patch": __version__,
    }


@contextmanager
def _progress(console: Console) -> Iterator[OnProgress]:
    """A bar per pass; its total is known when the pass begins."""
    with progress_bars(console) as progress:
        tasks = {name: progress.add_task(name, start=False, total=None) for name in PASSES}

        def update(name: str, done: int, total: int) -> None:
            progress.start_task(tasks[name])
            progress.update(tasks[name], completed=done, total=total)

        yield update
