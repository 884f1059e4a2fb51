"""Finds the token sequences of the patterns that end a thought."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from meridian_patch.config.exit_patterns import Pattern
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.errors import ConfigError
from meridian_patch.phase.boundaries import TokenIds
from meridian_patch.phase.sequences import Vocabulary, find_sequences

Sequences = tuple[TokenIds, ...]
FIELD: Final = "meridian_exit_patterns"
"""Name of the request's field."""


class PatternTokens:
    """Turns patterns into tokens, with one tokenizer; remembers the last ones.

    Args:
        vocabulary: returns that of the served tokenizer; None: there is no tokenizer.
        vocab_size: number of token ids that the model can write.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary | None], vocab_size: int) -> None:
        self._read = vocabulary
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        self._found = lru_cache(maxsize=512)(self._find)

    def find(self, patterns: Sequence[Pattern], where: str) -> tuple[Sequences, ...]:
        """All token sequences of each pattern.

        Raises:
            ConfigError: one that cannot be followed in tokens; the message begins with ``where``.
        """
        return tuple(self._found(pattern, where) for pattern in patterns)

    def in_options(self, options: RequestOptions) -> RequestOptions:
        """A request's options with its patterns as tokens.

        Raises:
            ConfigError: one that cannot be followed in tokens; the message names the field.
        """
        patterns = options.meridian_exit_patterns
        if not patterns:
            return options
        found = self.find(patterns, f"vllm_xargs field {FIELD}")
        return options.model_copy(update={FIELD: found})

    def in_fields(self, extra_args: Mapping[str, Any], options: RequestOptions) -> dict[str, Any]:
        """A request's extra arguments with its patterns as tokens.

        Raises:
            ConfigError: see ``in_options``.
        """
        found = self.find(options.meridian_exit_patterns or (), f"vllm_xargs field {FIELD}")
        # Lists, as in JSON: they are sent to the engine's process.
        return {**extra_args, FIELD: [[list(ids) for ids in sequences] for sequences in found]}

    def _find(self, pattern: Pattern, where: str) -> Sequences:
        return find_pattern(pattern, self._load, self._vocab_size, where)

    def _load(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._read()
        if self._vocabulary is None:
            raise ConfigError("texts that end a thought need a tokenizer, the server has none")
        return self._vocabulary


def find_pattern(
    pattern: Pattern, vocabulary: Callable[[], Vocabulary], vocab_size: int, where: str
) -> Sequences:
    """All token sequences of a pattern.

    A text is encoded as a marker is: behind a line break, a space and a full stop, too, because a
    tokenizer may merge its ends with what is around.

    Args:
        pattern: a text, token ids, or several sequences of them.
        vocabulary: returns that of the served tokenizer; called for a text only.
        vocab_size: number of token ids that the model can write.
        where: name of the field, for messages.

    Raises:
        ConfigError: a text that the tokenizer cannot write as tokens of its own, or an id that the
            model does not have; the message names the field and the pattern.
    """
    if isinstance(pattern, str):
        found = find_sequences(pattern, vocabulary())
        if not found.sequences:
            raise ConfigError(
                f"{where} holds {pattern!r}, which cannot be followed in tokens: the tokenizer "
                f"gives back {found.bare_text!r} for it, or merges it with other text wherever it "
                "stands, expected a text that it writes as tokens of its own"
            )
        return found.sequences
    sequences = tuple(ids for ids in pattern if isinstance(ids, tuple))
    sequences = sequences or (tuple(each for each in pattern if isinstance(each, int)),)
    greatest = max(max(ids) for ids in sequences)
    if greatest >= vocab_size:
        raise ConfigError(
            f"{where} holds token id {greatest}, expected ids below {vocab_size}, the size of the "
            "model's vocabulary"
        )
    return sequences
