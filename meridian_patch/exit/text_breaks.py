"""Which tokens of a vocabulary end a sentence, a line or a paragraph, by their text."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_SENTENCE_END = re.compile(r"[.!?。！？…][\"'”’)\]*]*\s*\Z")  # noqa: RUF001 - CJK marks
_LINE_END = re.compile(r"\n[^\S\n]*\Z")
_LINE_START = re.compile(r"\A[^\S\n]*\n")
_BLANK_LINE = re.compile(r"\n[^\S\n]*\n")


@dataclass(frozen=True)
class Breaks:
    """Ids of tokens, by what they do to the text before them.

    A tokenizer merges line breaks with what stands before them, so that hundreds of ids end a
    paragraph, not one.

    Attributes:
        sentence: end a sentence, or a line.
        line: end a line; white space may follow.
        paragraph: hold a blank line.
        newline: begin with a line break; behind a token of ``line`` this makes a blank line.
    """

    sentence: frozenset[int]
    line: frozenset[int]
    paragraph: frozenset[int]
    newline: frozenset[int]

    def ends_paragraph(self, token_id: int, before: int | None) -> bool:
        """Whether a token does, behind another; None: behind something else than a line's end."""
        return token_id in self.paragraph or (token_id in self.newline and before in self.line)


def find_breaks(texts: Iterable[tuple[int, str]]) -> Breaks:
    """Sort a vocabulary's tokens.

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
