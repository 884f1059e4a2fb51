"""Finds the tokens of a vocabulary that end a sentence, a line or a paragraph, by their text."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]*]*\s*\Z")  # noqa: RUF001 - CJK marks
_LINE_END = re.compile(r"\n[^\S\n]*\Z")
_LINE_START = re.compile(r"\A[^\S\n]*\n")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


@dataclass(frozen=True)
class Breaks:
    """Sets of token ids by the breaks that they contain.

    Tokenizers merge line breaks with the text before them, so hundreds of ids may end a paragraph.

    Attributes:
        sentence: tokens that end a sentence or a line.
        line: tokens that end a line; white space may follow.
        paragraph: tokens that contain a blank line.
        newline: tokens that begin with a line break; after a token of ``line`` this is a blank
            line.
    """

    sentence: frozenset[int]
    line: frozenset[int]
    paragraph: frozenset[int]
    newline: frozenset[int]

    def ends_paragraph(self, token_id: int, before: int | None) -> bool:
        """Whether a token ends a paragraph, given the token before it; None: not known."""
        return token_id in self.paragraph or (token_id in self.newline and before in self.line)


def find_breaks(texts: Iterable[tuple[int, str]]) -> Breaks:
    """Classify a vocabulary's tokens.

    Args:
        texts: id and decoded text of every token; special tokens may be left out.
    """
    sentence, line, paragraph, newline = set(), set(), set(), set()
    for token_id, text in texts:
        if _SENTENCE_END.search(text):
            sentence.add(token_id)
        if "\n" not in text:
            continue
        if _LINE_END.search(text):
            sentence.add(token_id)
            line.add(token_id)
        if _LINE_START.match(text):
            newline.add(token_id)
        if _BLANK_LINE.search(text):
            paragraph.add(token_id)
    return Breaks(frozenset(sentence), frozenset(line), frozenset(paragraph), frozenset(newline))
