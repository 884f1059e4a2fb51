"""The sequences of a text are those that a search through all beginnings finds."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers_for_tests import merging_bpe, vocabulary_of

from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.phase.sequences import AFTER, BEFORE, find_spellings


def with_byte_fallback():
    """Words and characters as SentencePiece writes them, other characters as their bytes."""
    texts = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "s", "o", "▁so", "<", "x"]
    vocabulary = {text: index for index, text in enumerate(texts)}
    merges = [("s", "o"), ("▁", "so")]
    vocabulary["so"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Fuse(), decoders.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


VOCABULARIES = [
    vocabulary_of(each)
    for each in (build_tokenizer().backend_tokenizer, merging_bpe(), with_byte_fallback())
]
TEXT = st.text(
    st.sampled_from(" \n.</>thinksox\u00e4\u4e2d\U0001f914\ufffd"), min_size=1, max_size=14
)


def search_all(marker, vocabulary):
    """Shortest runs of ids that hold the marker, among all beginnings and then all ends."""
    sequences, merged = {}, []
    for before, after in product(BEFORE, AFTER):
        ids, first = vocabulary.encode(before + marker + after), 0
        ends = range(1, len(ids) + 1)
        stop = next((n for n in ends if marker in vocabulary.decode(ids[:n])), 0)
        while first + 1 < stop and marker in vocabulary.decode(ids[first + 1 : stop]):
            first += 1
        window = ids[first:stop]
        if window and vocabulary.decode(window).strip() == marker.strip():
            sequences[tuple(window)] = None
        elif window:
            merged.append(before + marker + after)
    return tuple(sequences), tuple(merged)


@pytest.mark.parametrize("vocabulary", VOCABULARIES, ids=["bytes", "merging", "byte fallback"])
@settings(max_examples=150, deadline=None)
# Two of what decoders write for a part of a character: such a marker is met within any character.
@given(TEXT.filter(lambda text: text.strip() and "\ufffd\ufffd" not in text))
def test_a_short_search_finds_the_same(vocabulary, marker):
    """In every context, with characters of several bytes, repetitions and white space."""
    found = find_spellings(marker, vocabulary)
    assert (found.sequences, found.merged) == search_all(marker, vocabulary)
