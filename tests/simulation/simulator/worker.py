"""The pretended workers: they keep the tokens that real ones would, and sample from the oracle."""

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from meridian_patch.engine import wire
from meridian_patch.engine.early_exit.signals import MeasuredSignals
from meridian_patch.engine.upstream import is_release
from simulator.failure import Failure
from simulator.oracle import Speaker

PROBE_TOKEN = 97


@dataclass
class _Row:
    """A request as the workers know it."""

    tokens: list[int]
    num_prompt: int
    speaker: Speaker | None
    drafts: list[int] = field(default_factory=list)


@dataclass
class Step:
    """A step under way.

    Attributes:
        starts: computed tokens of each request when it began, as the scheduler said.
        is_deferred: its masks were made once the step before it had come back.
        preemptions: of each request when it began.
        experts: vLLM's worker side of routed experts has it; None: there is none.
    """

    output: Any
    starts: dict[str, int]
    result: ModelRunnerOutput | None = None
    is_deferred: bool = False
    preemptions: dict[str, int] = field(default_factory=dict)
    experts: Any = None


class Workers:
    """Executes steps in order.

    Args:
        max_model_len: of the engine.
        speaker_for: what says a request's tokens, by id; None for one of the engine's own.
        entropy: [4] signals of a request's row, by its name and number of tokens.
        num_drafts: guesses per step.
        seed: of what drafts are right.
    """

    def __init__(
        self, max_model_len: int, speaker_for: Any, entropy: Any, num_drafts: int, seed: int
    ) -> None:
        self._max_model_len = max_model_len
        self._speaker_for = speaker_for
        self._entropy = entropy
        self._num_drafts = num_drafts
        self._rng = random.Random(f"drafts {seed}")
        self._rows: dict[str, _Row] = {}
        # Faults: rows of these requests' signals are lost; no signals come back at all.
        self.loses_probes = False
        self.loses_signals = False

    def execute(self, output: Any) -> Step:
        """The forward pass: what the step brings is taken in."""
        for name in output.finished_req_ids:
            self._rows.pop(name, None)
        starts = {}
        for new in output.scheduled_new_reqs:
            prompt = new.prompt_token_ids
            if prompt is None:
                prompt = [0] * len(new.prompt_embeds)
            tokens = list(new.prefill_token_ids or prompt)
            starts[new.req_id] = new.num_computed_tokens
            self._add(new.req_id, tokens, len(prompt))
        cached = output.scheduled_cached_reqs
        for name, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            starts[name] = computed
            if name in cached.resumed_req_ids:
                row = self._rows.get(name)
                if row is None:
                    raise Failure("place", f"{name} resumes and the workers do not know it")
                self._add(name, list(cached.all_token_ids[name]), row.num_prompt)
        for name, number in output.num_scheduled_tokens.items():
            row = self._rows.get(name)
            if row is None:
                raise Failure("place", f"{name} is in a step and the workers do not know it")
            if starts[name] + number > self._max_model_len:
                raise Failure(
                    "tokens",
                    f"{name} computes up to token {starts[name] + number} of at most "
                    f"{self._max_model_len}",
                )
        return Step(output, starts)

    def sample(self, step: Step, grammar: Any) -> None:
        """The sampled tokens of a step, under its masks."""
        output = step.output
        if not output.total_num_scheduled_tokens:
            step.result = EMPTY_MODEL_RUNNER_OUTPUT
            return
        masks = _masks(grammar, output.scheduled_spec_decode_tokens)
        names = list(output.num_scheduled_tokens)
        sampled = [self._sample(step, name, masks.get(name)) for name in names]
        step.result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        plan = getattr(output, wire.PLAN, None)
        if plan is not None and not self.loses_signals:
            self._measure(step, plan)

    def take_drafts(self, step: Step) -> DraftTokenIds | None:
        """Guesses at what follows the tokens that a step sampled."""
        assert step.result is not None
        sampled = zip(step.result.req_ids, step.result.sampled_token_ids, strict=True)
        names = [name for name, tokens in sampled if tokens and name in self._rows]
        if not names:
            return None
        return DraftTokenIds(names, [list(self._rows[name].drafts) for name in names])

    def tokens_of(self, name: str) -> list[int]:
        return self._rows[name].tokens

    def _add(self, name: str, tokens: list[int], num_prompt: int) -> None:
        speaker = self._speaker_for(name, tokens[:num_prompt])
        if speaker is not None:
            speaker.follow(tokens[num_prompt:])
        self._rows[name] = _Row(tokens, num_prompt, speaker)

    def _sample(self, step: Step, name: str, masks: Any) -> list[int]:
        row, output = self._rows[name], step.output
        given = output.scheduled_spec_decode_tokens.get(name, ())
        end = step.starts[name] + output.num_scheduled_tokens[name] - len(given)
        if end < len(row.tokens):
            return []
        drafts = self._drafts(row, given, is_final=step.is_deferred)
        rows, acceptable = masks or (None, len(drafts))
        said: list[int] = []
        for index in range(len(drafts) + 1):
            token = PROBE_TOKEN if row.speaker is None else row.speaker.next()
            if rows is not None:
                token = _masked(token, rows[index])
            said.append(token)
            if row.speaker is not None:
                row.speaker.hear(token)
            is_right = index < min(len(drafts), acceptable) and drafts[index] == token
            if not is_right:
                break
        if len(row.tokens) + len(said) > self._max_model_len:
            raise Failure(
                "tokens",
                f"{name} has {len(row.tokens) + len(said)} tokens, at most {self._max_model_len} "
                "fit in its row",
            )
        row.tokens += said
        row.drafts = self._guess(row)
        return said

    def _drafts(self, row: _Row, given: Any, *, is_final: bool) -> list[int]:
        """The drafts of a step: those that the scheduler gave, or where it knew none, our own."""
        if is_final or not given or given[0] != -1:
            return list(given)
        own = row.drafts + [-1] * len(given)
        return own[: len(given)]

    def _guess(self, row: _Row) -> list[int]:
        if row.speaker is None or not self._num_drafts:
            return []
        guesses = list(row.speaker.peek(self._num_drafts))
        wrong = self._rng.randrange(2 * self._num_drafts)
        if wrong < len(guesses):
            guesses[wrong] = PROBE_TOKEN + 26
        return guesses

    def _measure(self, step: Step, plan: Any) -> None:
        output, result = step.output, step.result
        names, counts, rows = [], [], []
        for name in plan.request_ids:
            if name not in output.num_scheduled_tokens:
                continue
            row = self._rows[name]
            if row.speaker is None and self.loses_probes:
                continue
            count = 1 + len(output.scheduled_spec_decode_tokens.get(name, ()))
            names.append(name)
            counts.append(count)
            rows += [self._entropy(name, len(row.tokens) + index) for index in range(count)]
        table = np.array(rows, np.float32).reshape(-1, 4)
        is_plain = all(count == 1 for count in counts)
        signals = MeasuredSignals(tuple(names), None if is_plain else counts, table)
        setattr(result, wire.SIGNALS, signals)


def _masks(grammar: Any, drafts: dict[str, list[int]]) -> dict[str, tuple[Any, int]]:
    """Rows of each request's masks, and how many of its drafts may be accepted."""
    if grammar is None:
        return {}
    masks, first = {}, 0
    # Load-bearing: from vLLM 0.33 on each request has as many rows.
    fixed = len(grammar.grammar_bitmask) // len(grammar.structured_output_request_ids)
    acceptable = grammar.num_acceptable_drafts
    for index, name in enumerate(grammar.structured_output_request_ids):
        number = 1 + len(drafts.get(name, ()))
        rows = grammar.grammar_bitmask[first : first + number].copy()
        if len(rows) != number:
            raise Failure("tokens", f"{name} has {len(rows)} rows of masks, expected {number}")
        masks[name] = rows, number - 1 if acceptable is None else acceptable[index]
        first += fixed if is_release("0.33") else number
    return masks


def _masked(token: int, row: Any) -> int:
    """The token itself where the mask leaves it, else the first that it leaves."""
    words = row.view(np.uint32)
    if words[token // 32] >> np.uint32(token % 32) & 1:
        return token
    (word,) = np.flatnonzero(words)[:1]
    value = int(words[word])
    return int(word) * 32 + (value & -value).bit_length() - 1
