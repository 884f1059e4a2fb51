"""Lets a model solve all problems, probes its thoughts, and ends them early.

Three passes, each over all problems, and each only for what the journal does not have:

1. natural: every problem is thought to its end;
2. probes: one token behind thought and probe text, where a live request would be probed;
3. early: the answer behind thought and close text, where some threshold closes the thought.
"""

import hashlib
import math
import zlib
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meridian_patch.calibrate.chains import answer_begin, find_chain
from meridian_patch.calibrate.engine_process import Engine, EngineRequest, Reply
from meridian_patch.calibrate.graders import Grader
from meridian_patch.calibrate.journal import Journal
from meridian_patch.calibrate.problems import Problem
from meridian_patch.calibrate.records import Record, Stop
from meridian_patch.calibrate.stops import (
    ClosePoint,
    eat_close_points,
    probe_points,
    reached,
    rpdi_close_points,
)
from meridian_patch.calibrate.thresholds import EAT, RPDI, StrategyKind
from meridian_patch.config.schema import ExitConfig
from meridian_patch.errors import CalibrationError
from meridian_patch.exit.lag import Lag
from meridian_patch.exit.text_breaks import Breaks
from meridian_patch.phase.boundaries import Boundaries, TokenIds

PASSES = ("natural", "probes", "early")
_DIGEST_LENGTH = 12
# Name of the engine's figures in the journal.
_PACE = "pace"

# Called with the pass, requests that are done, and requests in all.
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Subject:
    """What is calibrated.

    Attributes:
        boundaries: of the model.
        breaks: of the vocabulary.
        config: of early exit.
        thresholds: to try, by strategy.
        max_tokens: of a natural output; None: as many as there is room for.
        max_answer_tokens: of an answer behind an early close.
        decode: ids to text, without special tokens.
        wrap_up: tokens that a close says before the end marker.
    """

    boundaries: Boundaries
    breaks: Breaks
    config: ExitConfig
    thresholds: Mapping[StrategyKind, Sequence[float]]
    max_tokens: int | None
    max_answer_tokens: int
    decode: Callable[[list[int]], str]
    wrap_up: TokenIds = ()


class Natural(NamedTuple):
    """A problem that was thought to its end.

    Attributes:
        key: of problem and thought, among requests.
        before: tokens that stand before the thought.
        thought: its tokens, without the end marker.
        entropies: of these tokens, in nats; empty where they were not measured.
        answer_tokens: that count; 0 when thinking did not end.
        is_correct: whether the answer is right.
    """

    problem: Problem
    key: str
    before: list[int]
    thought: list[int]
    entropies: list[float]
    answer_tokens: int
    is_correct: bool


class EarlyAnswer(NamedTuple):
    """What a model answered behind an early close."""

    num_tokens: int
    is_correct: bool


class Observer:
    """Runs the passes.

    Args:
        subject: what is calibrated.
        grader: says which answers are right.
        engine: answers what the journal does not have.
        journal: of replies.
        on_progress: called as requests finish.
        lag: of the engine that will close thoughts; None: that of ``engine``, from the journal or
            from the engine itself.
    """

    def __init__(
        self,
        subject: Subject,
        grader: Grader,
        engine: Engine,
        journal: Journal,
        on_progress: OnProgress,
        lag: Lag | None = None,
    ) -> None:
        self._subject = subject
        self._grader = grader
        self._engine = engine
        self._journal = journal
        self._on_progress = on_progress
        self._lag = lag
        # By problem and think tokens.
        self.early_answers: dict[tuple[str, int], EarlyAnswer] = {}

    def naturals(self, prompts: Sequence[tuple[Problem, list[int]]]) -> list[Natural]:
        """Pass 1; problems that are not thought about are left out.

        Args:
            prompts: problems, and the tokens that they are asked with.

        Raises:
            CalibrationError: a prompt leaves no room, or no problem is thought about.
        """
        subject = self._subject
        keys = [self._natural_key(problem, prompt) for problem, prompt in prompts]
        requests = (
            EngineRequest(key, prompt, subject.max_tokens, RPDI in subject.thresholds)
            for key, (_, prompt) in zip(keys, prompts, strict=True)
        )
        replies = self._generate("natural", keys, requests)
        found = [
            self._natural(*pair, replies[key]) for key, pair in zip(keys, prompts, strict=True)
        ]
        naturals = [natural for natural in found if natural is not None]
        if not naturals:
            raise CalibrationError(
                f"none of {len(prompts)} outputs holds a thought of family "
                f"{subject.boundaries.family}; expected a model and a chat template that think"
            )
        return naturals

    def records(self, naturals: Sequence[Natural]) -> dict[StrategyKind, list[Record]]:
        """Passes 2 and 3: what each strategy does to each problem, in the problems' order."""
        points = {kind: self._close_points(kind, naturals) for kind in self._subject.thresholds}
        self._answer_early(naturals, list(points.values()))
        return {
            kind: [self._record(*pair) for pair in zip(naturals, of_kind, strict=True)]
            for kind, of_kind in points.items()
        }

    @property
    def lag(self) -> Lag:
        """Of the engine that will close thoughts.

        Raises:
            CalibrationError: the engine did not start.
        """
        if self._lag is None:
            kept = self._journal.noted(_PACE)
            if kept is None:
                kept = self._journal.note(_PACE, self._engine.pace())
            every_steps = self._subject.config.probe_every_steps
            self._lag = Lag(**kept, probe_every_steps=every_steps)
        return self._lag

    def _waits(self, natural: Natural) -> Callable[[int], int]:
        """Steps that a probe of this thought waits for, by think tokens.

        Which step may have probes does not depend on the thought, so every turn is equally likely.
        It is derived from the thought's name, so that it is the same in every run.
        """

        def wait_steps(think_tokens: int) -> int:
            drawn = zlib.crc32(f"{natural.key}/{think_tokens}".encode())
            turn = drawn % self.lag.probe_every_steps
            return self.lag.wait_steps(len(natural.before) + think_tokens, turn)

        return wait_steps

    def _natural_key(self, problem: Problem, prompt: Sequence[int]) -> str:
        """Name and prompt: another prompt is another problem, also under the same name."""
        name = f"{problem.name}/{_digest(prompt)}"
        measured = f"measured/{name}"
        is_measured = RPDI in self._subject.thresholds or self._journal.get(measured) is not None
        return measured if is_measured else f"natural/{name}"

    def _natural(self, problem: Problem, prompt: list[int], reply: Reply) -> Natural | None:
        if reply.ids is None:
            raise CalibrationError(
                f"problem {problem.name} (line {problem.line}): its prompt of {len(prompt)} tokens "
                "leaves no room for a thought; give the engine a larger max_model_len"
            )
        chain = find_chain(prompt, reply.ids, self._subject.boundaries)
        if chain is None or chain.begin == chain.end:
            return None
        answer = [] if chain.answer is None else reply.ids[chain.answer :]
        return Natural(
            problem,
            f"{problem.name}/{_digest([*prompt, *reply.ids])}",
            prompt + reply.ids[: chain.begin],
            reply.ids[chain.begin : chain.end],
            (reply.entropies or [])[chain.begin : chain.end],
            len(answer),
            chain.answer is not None and self._is_right(problem, answer),
        )

    def _close_points(
        self, kind: StrategyKind, naturals: Sequence[Natural]
    ) -> list[list[ClosePoint]]:
        """Of each problem, the points that some threshold reaches first."""
        config, breaks = self._subject.config, self._subject.breaks
        thresholds = self._subject.thresholds[kind]
        lag = self.lag
        if kind is EAT:
            probes = self._probe(naturals)
            found = [
                eat_close_points(
                    natural.thought, of_problem, config, breaks, lag, self._waits(natural)
                )
                for natural, of_problem in zip(naturals, probes, strict=True)
            ]
        else:
            of_tokens = (entropy for natural in naturals for entropy in natural.entropies)
            _check_finite(f"the think tokens of {len(naturals)} problems", of_tokens)
            found = [
                rpdi_close_points(n.thought, n.entropies, config, breaks, lag) for n in naturals
            ]
        return [reached(each, thresholds, fires_below=kind.fires_below) for each in found]

    def _probe(self, naturals: Sequence[Natural]) -> list[list[tuple[int, float]]]:
        """Pass 2: of each problem, think tokens and entropy of each probe."""
        subject = self._subject
        points = [probe_points(n.thought, subject.config, subject.breaks) for n in naturals]
        pairs = [
            (n, at) for n, of_problem in zip(naturals, points, strict=True) for at in of_problem
        ]
        keys = [f"probe/{natural.key}/{at}" for natural, at in pairs]
        requests = (
            EngineRequest(
                key, [*n.before, *n.thought[:at], *subject.boundaries.probe], 1, is_measured=True
            )
            for key, (n, at) in zip(keys, pairs, strict=True)
        )
        replies = self._generate("probes", keys, requests)
        entropies = [
            [(at, _entropy(replies[f"probe/{n.key}/{at}"])) for at in of_problem]
            for n, of_problem in zip(naturals, points, strict=True)
        ]
        if pairs:
            _check_finite(f"{len(pairs)} probes", (x for of_one in entropies for _, x in of_one))
        return entropies

    def _answer_early(
        self, naturals: Sequence[Natural], points: Sequence[Sequence[Sequence[ClosePoint]]]
    ) -> None:
        """Pass 3, for all strategies together."""
        subject = self._subject
        pairs = [
            (natural, at)
            for index, natural in enumerate(naturals)
            for at in sorted({point.close_at for of_kind in points for point in of_kind[index]})
        ]
        keys = [f"early/{natural.key}/{at}" for natural, at in pairs]
        requests = (
            EngineRequest(
                key,
                [*n.before, *n.thought[:at], *subject.wrap_up, *subject.boundaries.close],
                subject.max_answer_tokens,
                is_measured=False,
            )
            for key, (n, at) in zip(keys, pairs, strict=True)
        )
        replies = self._generate("early", keys, requests)
        for key, (natural, at) in zip(keys, pairs, strict=True):
            ids = replies[key].ids or []
            is_correct = self._is_right(
                natural.problem, ids[answer_begin(ids, subject.boundaries) :]
            )
            self.early_answers[natural.problem.name, at] = EarlyAnswer(len(ids), is_correct)

    def _record(self, natural: Natural, points: Sequence[ClosePoint]) -> Record:
        name = natural.problem.name
        stops = [Stop(at, self.early_answers[name, at].is_correct, value) for at, value in points]
        return Record(name, len(natural.thought), natural.is_correct, stops)

    def _generate(
        self, stage: str, keys: Sequence[str], requests: Iterable[EngineRequest]
    ) -> dict[str, Reply]:
        """Replies of one pass; those that the journal has are not asked for again."""
        replies = {key: reply for key in keys if (reply := self._journal.get(key)) is not None}
        self._on_progress(stage, len(replies), len(keys))
        for key, reply in self._engine.run(
            request for request in requests if request.key not in replies
        ):
            replies[key] = self._journal.add(key, reply)
            self._on_progress(stage, len(replies), len(keys))
        return replies

    def _is_right(self, problem: Problem, answer: list[int]) -> bool:
        return self._grader.is_right(self._subject.decode(answer), problem)


def _digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(array("q", token_ids).tobytes()).hexdigest()[:_DIGEST_LENGTH]


def _check_finite(what: str, entropies: Iterable[float]) -> None:
    if not any(map(math.isfinite, entropies)):
        raise CalibrationError(
            f"none of {what} has an entropy that is a finite number; expected finite logits, and a "
            "model runner whose logits can be measured (engine.log says when it cannot)"
        )


def _entropy(reply: Reply) -> float:
    return reply.entropies[0] if reply.entropies else math.nan
