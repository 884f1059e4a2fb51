"""Reasoning tokens for every family file: markers resolved by a real tokenizer, in chat prompts."""

import random

import pytest
from phase_steps import play
from tokenizers import AddedToken
from tokenizers_for_tests import merging_bpe, vocabulary_of

from meridian_patch.config.family_files import load_families
from meridian_patch.config.matching import FamilyMatch
from meridian_patch.phase.markers import ServerStrings, choose_markers
from meridian_patch.phase.resolve import resolve

FAMILIES = {name: file.family for name, file in load_families().items()}
QUESTION = "User: No. Yes? x\nAssistant: "
THOUGHT, ANSWER = "So x is it. No, x.\nYes", "It is x.\n"


def tokenizer_for(family):
    """Markers that are one vocabulary entry are added tokens, the others plain text that merges."""
    tokenizer = merging_bpe()
    documented = family.documented_ids
    texts = [text for pair in family.pairs for text in pair]
    ids = [documented.start, documented.end] * len(family.pairs)
    single = [
        text
        for text, known in zip(texts, ids, strict=True)
        if documented.is_single(known) in (True, None)
    ]
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in dict.fromkeys(single)])
    return tokenizer


def prompts_and_outputs(family):
    """By shape of the prompt: the prompt, the output, and the places of thoughts in the output."""
    start, end = family.start, family.end
    closed = f"{end}{ANSWER}"
    return {
        # The template opens the thought, and vLLM's parsers see no start marker.
        "think": (f"{QUESTION}{start}\n", f"{THOUGHT}{closed}"),
        "think, cut": (f"{QUESTION}{start}\n", THOUGHT),
        # The model opens it.
        "pre": (QUESTION, f"{start}\n{THOUGHT}{closed}"),
        # The template closes thinking: nothing is reasoning.
        "answer": (f"{QUESTION}{start}\n\n{end}\n\n", ANSWER),
        # An earlier turn's thought is in the prompt.
        "history": (f"{start}{THOUGHT}{closed}{QUESTION}{start}\n", f"{THOUGHT}{closed}"),
    }


def expected_tokens(encoding, family, shape):
    """Output tokens that lie wholly between the markers, by their places in the text."""
    text = encoding.text
    if shape == "answer":
        return 0
    begin = text.index(family.start) + len(family.start) if shape == "pre" else 0
    end = text.index(family.end) if family.end in text[begin:] else len(text)
    return sum(begin <= a and b <= end for a, b in encoding.encoding.offsets)


class Encoded:
    def __init__(self, tokenizer, text):
        self.text = text
        self.encoding = tokenizer.encode(text, add_special_tokens=False)
        self.ids = self.encoding.ids


@pytest.mark.parametrize("name", FAMILIES)
def test_counts_are_those_of_the_text(name):
    """Whatever the template does with the thought, and however many tokens a marker is."""
    family = FAMILIES[name]
    tokenizer = tokenizer_for(family)
    match = FamilyMatch(name, family, f"{name}.yaml", "parser", "evidence")
    markers = choose_markers("m", match, ServerStrings())
    boundaries = resolve("m", markers, vocabulary_of(tokenizer)).boundaries
    for shape, (before, after) in prompts_and_outputs(family).items():
        prompt, output = Encoded(tokenizer, before), Encoded(tokenizer, after)
        expected = expected_tokens(output, family, shape)
        for seed in range(4):
            _, counts = play(boundaries, prompt.ids, output.ids, random.Random(seed))
            assert counts[len(output.ids)] == expected, (shape, seed)
        assert (expected > 0) == (shape != "answer")


def test_there_are_enough_families():
    """With markers of one token and of several, opened by the template and by the model."""
    assert len(FAMILIES) >= 8
    assert {family.prompt_start for family in FAMILIES.values()} >= {"think", "pre", "answer"}
    assert any(family.documented_ids.is_single(None) is False for family in FAMILIES.values())
