"""A grammar for vLLM's structured output manager that answers in no time, and its reasoner."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from vllm.v1.structured_output.backend_types import StructuredOutputBackend, StructuredOutputGrammar

from meridian_patch.phase.boundaries import Boundaries

DIGITS = 48
TURN_END = 259


class Rules(NamedTuple):
    """Digits, two of ten at each place, and then the end of the turn.

    Attributes:
        length: digits.
        shift: which two.
    """

    length: int
    shift: int

    def allowed(self, place: int) -> frozenset[int] | None:
        """Tokens allowed behind ``place`` accepted ones; None: any."""
        if place < self.length:
            first = (place * 3 + self.shift) % 9
            return frozenset((DIGITS + first, DIGITS + first + 1))
        return frozenset((TURN_END,)) if place == self.length else None


@functools.cache
def grammar_rules(text: str) -> Rules:
    """Rules as they are written in a request: ``[0-9]{LENGTH}(SHIFT)``."""
    length, shift = text.removeprefix("[0-9]{").removesuffix(")").split("}(")
    return Rules(int(length), int(shift))


def write_rules(length: int, shift: int) -> str:
    return f"[0-9]{{{length}}}({shift})"


class GrammarState:
    """How far one text has come in its grammar."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.place = 0

    def reset(self) -> None:
        self.place = 0

    def allowed(self) -> frozenset[int] | None:
        return self.rules.allowed(self.place)

    def accept(self, token: int) -> bool:
        allowed = self.allowed()
        if allowed is None or token not in allowed:
            return False
        self.place += 1
        return True


class SimGrammar(StructuredOutputGrammar):
    """``GrammarState`` as vLLM wants it."""

    def __init__(self, rules: Rules) -> None:
        self.state = GrammarState(rules)

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        return all(self.state.accept(token) for token in tokens)

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        place, valid = self.state.place, []
        for token in tokens:
            if not self.state.accept(token):
                break
            valid.append(token)
        self.state.place = place
        return valid

    def rollback(self, num_tokens: int) -> None:
        self.state.place -= num_tokens

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        allowed = self.state.allowed()
        row = bitmask[batch_index]
        if allowed is None:
            row.fill_(-1)
            return
        row.fill_(0)
        numpy = row.numpy().view("uint32")
        for token in allowed:
            numpy[token // 32] |= 1 << (token % 32)

    def is_terminated(self) -> bool:
        return self.state.place > self.state.rules.length

    def reset(self) -> None:
        self.state.reset()


class SimGrammarBackend(StructuredOutputBackend):
    """Compiles ``Rules``."""

    def compile_grammar(
        self, request_type: Any, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> SimGrammar:
        return SimGrammar(grammar_rules(grammar_spec))

    def allocate_token_bitmask(self, max_num_seqs: int) -> torch.Tensor:
        return torch.full((max_num_seqs, (self.vocab_size + 31) // 32), -1, dtype=torch.int32)

    def destroy(self) -> None:
        """Nothing is held."""


def reasoner_for(boundaries: Boundaries) -> type:
    """A reasoning parser of these boundaries, as the grammar manager uses one."""
    ends = [list(each) for each in boundaries.end]

    class Reasoner:
        def __init__(self, tokenizer: Any, **_: Any) -> None:
            self.tokenizer = tokenizer

        def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
            # The boundary that ends last decides.
            ids = list(input_ids)
            for end in range(len(ids), 0, -1):
                if any(ids[end - len(each) : end] == each for each in ends):
                    return True
                if any(tuple(ids[end - len(each) : end]) == each for each in boundaries.start):
                    return False
            return True

        def is_reasoning_end_streaming(
            self, input_ids: Sequence[int], delta_ids: Sequence[int]
        ) -> bool:
            ids = list(input_ids)
            first = len(ids) - len(list(delta_ids))
            return any(
                ids[end - len(each) : end] == each
                for end in range(first + 1, len(ids) + 1)
                for each in ends
            )

    return Reasoner
