"""Finds the token sequences with which a model may write a marker string.

A marker that is a vocabulary entry is that one token. Any other marker is several tokens, and a
tokenizer may merge its first and last characters with adjacent text. So it is encoded in several
contexts, and each distinct sequence is used.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import product

from meridian_patch.phase.boundaries import TokenIds

BEFORE = ("", "\n", " ", ".")
AFTER = ("", "\n", "\n\n", "x")


@dataclass(frozen=True)
class Vocabulary:
    """The operations of a tokenizer that resolution needs.

    Attributes:
        encode: text to ids, without special tokens added around it.
        decode: ids to text, with special tokens written out.
        token_id: id of a vocabulary entry, or None.
        special_ids: ids of special tokens, such as the end of a turn.
        added_ids: ids of tokens that were added to the vocabulary as a whole.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    token_id: Callable[[str], int | None]
    special_ids: frozenset[int] = frozenset()
    added_ids: frozenset[int] = frozenset()


@dataclass(frozen=True)
class MarkerSequences:
    """How a tokenizer encodes one marker.

    Attributes:
        sequences: distinct token sequences, beginning with that of the bare marker if it has one;
            empty if the marker is merged with adjacent text in every context.
        merged: texts in which the marker is merged with adjacent text.
        bare_ids: the bare marker, encoded.
        bare_text: ``bare_ids``, decoded.
    """

    sequences: tuple[TokenIds, ...]
    merged: tuple[str, ...]
    bare_ids: TokenIds
    bare_text: str


def find_sequences(marker: str, vocabulary: Vocabulary) -> MarkerSequences:
    """All token sequences of ``marker``; one that is a vocabulary entry has that one only."""
    entry = vocabulary.token_id(marker)
    if entry is not None:
        return MarkerSequences(((entry,),), (), (entry,), marker)
    return find_spellings(marker, vocabulary)


def find_spellings(marker: str, vocabulary: Vocabulary) -> MarkerSequences:
    """All token sequences of ``marker``, in the contexts ``BEFORE`` x ``AFTER``."""
    sequences: dict[TokenIds, None] = {}
    merged = []
    # Contexts share most of what is decoded: the marker behind the same text, and the marker alone.
    decode = _remembering(vocabulary.decode)
    for before, after in product(BEFORE, AFTER):
        ids = tuple(vocabulary.encode(before + marker + after))
        window = _window(ids, marker, decode)
        if window and decode(window).strip() == marker.strip():
            sequences[window] = None
        elif window:
            merged.append(before + marker + after)
    bare_ids = vocabulary.encode(marker)
    return MarkerSequences(
        tuple(sequences), tuple(merged), tuple(bare_ids), vocabulary.decode(bare_ids)
    )


def _window(ids: TokenIds, marker: str, decode: Callable[[TokenIds], str]) -> TokenIds:
    """The shortest run of ids whose text contains the marker; empty if there is none.

    Little stands around the marker, so few ids are taken off, first at the end, then at the front.
    """
    if not ids or marker not in decode(ids):
        return ()
    first, stop = 0, len(ids)
    while stop > 1 and marker in decode(ids[: stop - 1]):
        stop -= 1
    while first + 1 < stop and marker in decode(ids[first + 1 : stop]):
        first += 1
    return ids[first:stop]


def _remembering(decode: Callable[[list[int]], str]) -> Callable[[TokenIds], str]:
    """``decode`` that decodes the same ids once."""
    return cache(lambda ids: decode(list(ids)))
