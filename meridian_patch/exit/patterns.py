"""Finds the token sequences of the patterns that end a thought."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from meridian_patch.config.exit_patterns import Ids, Pattern
from meridian_patch.config.request_options import RequestOptions
from meridian_patch.errors import ConfigError
from meridian_patch.phase.boundaries import TokenIds
from meridian_patch.phase.sequences import Vocabulary, find_spellings

Sequences = tuple[TokenIds, ...]
FIELD: Final = "meridian_exit_patterns"
"""Name of the request's field."""


class PatternTokens:
    """Turns patterns into tokens, with one tokenizer; remembers the last texts, refused ones too.

    Args:
        vocabulary: returns that of the served tokenizer; None: there is no tokenizer.
        vocab_size: number of token ids that the model can write.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary | None], vocab_size: int) -> None:
        self._read = vocabulary
        self._vocab_size = vocab_size
        self._vocabulary: Vocabulary | None = None
        # Ids are not kept: to check them takes no time, and they may be many.
        self._found = lru_cache(maxsize=512)(self._find_text)

    def find(self, patterns: Sequence[Pattern], where: str) -> tuple[Sequences, ...]:
        """All token sequences of each pattern.

        Raises:
            ConfigError: one that cannot be followed in tokens; the message begins with ``where``.
        """
        return tuple(self._find(pattern, where) for pattern in patterns)

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
        if not isinstance(pattern, str):
            return find_ids(pattern, self._vocab_size, where)
        found = self._found(pattern)
        if isinstance(found, str):
            raise ConfigError(f"{where} holds {pattern!r}, {found}")
        return found

    def _find_text(self, text: str) -> Sequences | str:
        return find_text(text, self._load())

    def _load(self) -> Vocabulary:
        if self._vocabulary is None:
            self._vocabulary = self._read()
        if self._vocabulary is None:
            raise ConfigError("texts that end a thought need a tokenizer, the server has none")
        return self._vocabulary


def find_text(text: str, vocabulary: Vocabulary) -> Sequences | str:
    """All token sequences of a text; if it cannot be followed in tokens, why, for a message.

    It is encoded as a marker is: behind a line break, a space and a full stop, too, because a
    tokenizer may merge its ends with what is around. So is a text that is a vocabulary entry: the
    word behind a space is another entry.
    """
    found = find_spellings(text, vocabulary)
    return found.sequences or (
        "which cannot be followed in tokens: the tokenizer gives back "
        f"{found.bare_text!r} for it, or merges it with other text wherever it stands, expected a "
        "text that it writes as tokens of its own"
    )


def find_ids(pattern: Ids | tuple[Ids, ...], vocab_size: int, where: str) -> Sequences:
    """The sequences of a pattern that is written as ids.

    Args:
        pattern: token ids, or several sequences of them.
        vocab_size: number of token ids that the model can write.
        where: name of the field, for messages.

    Raises:
        ConfigError: the model does not have an id; the message names the field and the id.
    """
    sequences = tuple(ids for ids in pattern if isinstance(ids, tuple))
    sequences = sequences or (tuple(each for each in pattern if isinstance(each, int)),)
    greatest = max(max(ids) for ids in sequences)
    if greatest >= vocab_size:
        raise ConfigError(
            f"{where} holds token id {greatest}, expected ids below {vocab_size}, the size of the "
            "model's vocabulary"
        )
    return sequences
