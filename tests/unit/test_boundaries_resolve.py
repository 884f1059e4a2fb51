"""From marker strings to token sequences, with real tokenizers."""

from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import AddedToken
from tokenizers_for_tests import merging_bpe, prefixing_words, vocabulary_of

from meridian_patch.config.family_schema import DocumentedIds, Family
from meridian_patch.config.matching import FamilyMatch
from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.errors import BoundaryError
from meridian_patch.phase.boundaries import Boundaries
from meridian_patch.phase.markers import ServerStrings, choose_markers
from meridian_patch.phase.matcher import ROOT, BoundaryMatcher, Event
from meridian_patch.phase.resolve import resolve
from meridian_patch.phase.sequences import find_sequences

THINK_START, THINK_END = 256, 257


@pytest.fixture(scope="module")
def tiny():
    """One token per byte, the markers are single tokens."""
    return vocabulary_of(build_tokenizer().backend_tokenizer)


@pytest.fixture(scope="module")
def bpe():
    """The end marker is three tokens that merge with their surroundings."""
    return vocabulary_of(merging_bpe())


def match_of(how="name", documented=None, **fields):
    values = {
        "version": 1,
        "family": "mine",
        "start": "<think>",
        "end": "</think>",
        "documented_ids": DocumentedIds(
            **{"provenance": "unverified", "source": "a test", **(documented or {})}
        ),
        "prompt_start": "think",
        "history": "strip",
    }
    return FamilyMatch("mine", Family(**{**values, **fields}), "/own/mine.yaml", how, "evidence")


def resolve_for(vocabulary, match, server=None):
    return resolve("/models/m", choose_markers("m", match, server or ServerStrings()), vocabulary)


def error_of(vocabulary, match, server=None):
    with pytest.raises(BoundaryError) as error:
        resolve_for(vocabulary, match, server)
    return str(error.value)


def follow(boundaries, vocabulary, text):
    """Events that a text raises, encoded as one piece."""
    matcher = BoundaryMatcher(boundaries)
    state, events = ROOT, []
    for token_id in vocabulary.encode(text):
        state, event = matcher.step(state, token_id)
        if event is not Event.NONE:
            events.append(event)
    return events


def test_single_tokens(tiny):
    """A marker in the vocabulary is that token, and nothing else."""
    resolution = resolve_for(tiny, match_of())
    assert resolution.boundaries == Boundaries(
        "mine",
        ((THINK_START,),),
        ((THINK_END,),),
        (THINK_END,),
        history="strip",
        probe=tuple(tiny.encode("\n</think>\n\n")),
    )
    assert resolution.notes == ()


def test_merging_marker_is_found_in_its_spellings(bpe):
    """Each way in which the tokenizer writes the marker is known and raises its event once."""
    boundaries = resolve_for(bpe, match_of()).boundaries
    assert len(boundaries.end) > 1
    assert all(len(ids) > 1 for ids in boundaries.end)
    for text in ("a</think>b", "a\n</think>\n\nb", "a </think>\nb", "a </think>b"):
        assert follow(boundaries, bpe, "<think>" + text) == [Event.START, Event.END], text


def test_first_sequence_is_the_bare_marker(bpe):
    """What is forced is the marker alone, without borrowed white space."""
    boundaries = resolve_for(bpe, match_of()).boundaries
    assert bpe.decode(list(boundaries.close)) == "</think>"
    assert boundaries.close == boundaries.end[0] == tuple(bpe.encode("</think>"))


def test_spellings_hold_no_other_text(bpe):
    """A sequence is the marker and white space; tokens that hold other text are left out."""
    found = find_sequences("</think>", bpe)
    assert {bpe.decode(list(ids)).strip() for ids in found.sequences} == {"</think>"}
    assert ".</think>x" in found.merged


def test_merged_surroundings_are_noted(bpe):
    """An operator reads where the marker would be missed."""
    match = match_of(documented={"single_token": False})
    (note,) = resolve_for(bpe, match).notes
    for part in ("/models/m", "/own/mine.yaml", "end '</think>'", "'.</think>x'"):
        assert part in note


def test_marker_that_is_plain_text_is_noted(bpe, tiny):
    """Several tokens for a marker that is not documented as such may mean a wrong tokenizer."""
    notes = resolve_for(bpe, match_of()).notes
    assert sum("is no vocabulary entry" in note for note in notes) == 2
    assert resolve_for(tiny, match_of(end="Answer:", documented={"end": (1, 2)})).notes != ()
    assert not any("no vocabulary entry" in n for n in resolve_for(tiny, match_of()).notes)


def test_marker_with_white_space(tiny):
    """White space that belongs to the marker is part of each sequence."""
    match = match_of(start="<think>\n", end="\n</think>\n<answer>\n")
    boundaries = resolve_for(tiny, match).boundaries
    assert boundaries.start[0] == (THINK_START, *tiny.encode("\n"))
    text = "<think>\nx\n</think>\n<answer>\n"
    assert follow(boundaries, tiny, text) == [Event.START, Event.END]
    assert follow(boundaries, tiny, "<think>x</think>") == []


def test_all_spellings_and_implicit_ends(tiny):
    """Alternatives and implicit ends raise the same events; the first end is forced."""
    match = match_of(
        alternatives=({"start": "Thought:", "end": "Answer:"},), implicit_end=("<call>",)
    )
    boundaries = resolve_for(tiny, match).boundaries
    assert boundaries.close == (THINK_END,)
    for start in ("<think>", "Thought:"):
        for end in ("</think>", "Answer:", "<call>"):
            assert follow(boundaries, tiny, f"{start}x{end}") == [Event.START, Event.END]


def test_forced_phrase(tiny):
    """A phrase before the marker is forced with it and still ends thinking."""
    server = ServerStrings(end="Enough.</think>")
    boundaries = resolve_for(tiny, match_of(), server).boundaries
    assert boundaries.close == (*tiny.encode("Enough."), THINK_END)
    assert boundaries.end == ((THINK_END,),)


def test_forced_phrase_that_swallows_the_marker(bpe):
    """A phrase that merges with the marker would not end thinking: it is refused."""
    message = error_of(bpe, match_of(), ServerStrings(end="Enough.</think>"))
    for part in ("/models/m", "--reasoning-config", "reasoning_end_str 'Enough.</think>'", "ids ["):
        assert part in message


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["_<think>", "_</think>"], "merges it with other text wherever it stands"),
        ([], "gives back '[UNK]'"),
    ],
)
def test_unresolvable_marker(words, part):
    """A marker that the tokenizer cannot write names model, file, field, string and ids."""
    message = error_of(vocabulary_of(prefixing_words(words)), match_of())
    for expected in ("/models/m", "/own/mine.yaml", "start '<think>'", "ids [", part):
        assert expected in message


def test_one_sequence_for_both_markers():
    """A tokenizer to which both markers are the same cannot tell the phases apart."""
    tokenizer = build_tokenizer().backend_tokenizer
    vocabulary = vocabulary_of(tokenizer)
    match = match_of(start="<think>", end="</think>", implicit_end=("<think>",))
    assert "both open and end thinking" in error_of(vocabulary, match)


def test_documented_ids_that_fit(tiny):
    """Ids as documented are nothing to talk about."""
    documented = {"provenance": "verified", "start": (THINK_START,), "end": (THINK_END,)}
    assert resolve_for(tiny, match_of(documented=documented)).notes == ()


def test_verified_ids_that_differ_are_refused(tiny):
    """Another vocabulary than the documented one is most likely the wrong tokenizer."""
    documented = {"provenance": "verified", "start": (THINK_START,), "end": (151668,)}
    message = error_of(tiny, match_of(documented=documented))
    for part in (
        "/models/m",
        "/own/mine.yaml",
        "end '</think>'",
        "ids [257]",
        "expected [151668]",
        "verified: a test",
        "families_dir",
    ):
        assert part in message


@pytest.mark.parametrize("provenance", ["third_party", "unverified"])
def test_other_ids_that_differ_are_noted(tiny, provenance):
    """Ids that were not verified do not stop an engine: the served tokenizer counts."""
    documented = {"provenance": provenance, "start": (THINK_START,), "end": (151668,)}
    resolution = resolve_for(tiny, match_of(documented=documented))
    (note,) = resolution.notes
    assert "expected [151668]" in note
    assert provenance in note
    assert resolution.boundaries.end == ((THINK_END,),)


@pytest.mark.parametrize("how", ["architecture", "parser"])
def test_ids_do_not_bind_a_family_that_was_guessed(tiny, how):
    """A model of the same architecture may have a vocabulary of its own."""
    documented = {"provenance": "verified", "start": (1,), "end": (2,)}
    assert len(resolve_for(tiny, match_of(how, documented)).notes) == 2


@pytest.mark.parametrize(
    "documented", [{"single_token": True}, {"provenance": "third_party", "end": (128799,)}]
)
def test_marker_missing_from_the_vocabulary(bpe, documented):
    """A marker documented as one token that is plain text here is refused, whatever says so."""
    message = error_of(bpe, match_of(documented={**documented}, start="Thought:"))
    for part in ("/own/mine.yaml", "'", "missing from the vocabulary", "ids [", "/models/m"):
        assert part in message


def test_documented_close_is_compared(tiny):
    """The forced ids are documented too where they differ from the end marker."""
    documented = {"provenance": "verified", "close": (1, 2)}
    message = error_of(tiny, match_of(documented=documented, close="\n</think>\n"))
    assert "close '\\n</think>\\n'" in message
    assert "expected [1, 2]" in message


def test_parser_only(tiny):
    """Without a family the parser's strings are resolved, and nothing is compared."""
    server = ServerStrings(parser="qwen3", parser_start="<think>", parser_end="</think>")
    resolution = resolve_for(tiny, None, server)
    assert resolution.boundaries.family == "<parser qwen3>"
    assert resolution.boundaries.end == ((THINK_END,),)


def test_packaged_file_of_the_tiny_reasoner_is_right(tiny):
    """The ids in tiny_reasoner.yaml are those of the tokenizer that is built here."""
    from meridian_patch.config.family_files import load_families

    file = load_families()["tiny_reasoner"]
    match = FamilyMatch("tiny_reasoner", file.family, str(Path(file.path)), "name", "x")
    resolution = resolve_for(tiny, match)
    assert resolution.notes == ()
    assert file.family.documented_ids.end == resolution.boundaries.end[0]


def test_an_implicit_end_is_one_of_the_ends(tiny):
    """It ends a thought, is never forced, and is known as the answer's beginning."""
    boundaries = resolve_for(tiny, match_of(implicit_end=("<call>", "</think>"))).boundaries
    call = tuple(tiny.encode("<call>"))
    assert boundaries.end == ((THINK_END,), call)
    assert boundaries.implicit_end == (call,)
    assert boundaries.close == (THINK_END,)


def test_an_implicit_end_that_cannot_be_written_is_noted():
    """No request needs it: the engine starts, and says what it does not see."""
    vocabulary = vocabulary_of(prefixing_words([]))
    known = {"<think>": 5, "</think>": 6}
    match = match_of(implicit_end=("<call>",))
    resolution = resolve_for(replace(vocabulary, token_id=known.get), match)
    assert resolution.boundaries.end == ((6,),)
    assert any("implicit_end.0 '<call>'" in note for note in resolution.notes)


def test_turns_start_with_vocabulary_entries(tiny):
    """What the vocabulary does not have starts no turn."""
    match = match_of(turn_start=("<|user|>", "<|no such|>"))
    assert resolve_for(tiny, match).boundaries.turn_start == {tiny.token_id("<|user|>")}
    assert not resolve_for(tiny, match_of()).boundaries.turn_start


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("<|end|><|assistant|><think>\n", "<|assistant|>"),
        ("<|end|>\n<|assistant|>\n", "<|assistant|>"),
        ("<|end|><think><|assistant|>", "<|end|>"),
        # What stands behind the start of the thought, too, would hide it.
        ("<|end|><|assistant|><think><|assistant|>", "<|end|>"),
        ("<|end|></think>", "<|end|>"),
        ("<think><|end|>", None),
        ("Assistant: ", None),
    ],
)
def test_without_a_family_turns_start_as_in_the_template(tiny, template, expected):
    """The last token before a thought that is no marker; in all prompts it opens the answer."""
    server = ServerStrings("p", "<think>", "</think>", template_turn=tuple(tiny.encode(template)))
    entries = set() if expected is None else {tiny.token_id(expected)}
    assert resolve_for(tiny, None, server).boundaries.turn_start == entries


def test_white_space_starts_no_turn():
    """Some vocabularies have line breaks as added tokens."""
    tokenizer = build_tokenizer().backend_tokenizer
    tokenizer.add_tokens([AddedToken("\n", normalized=False)])
    vocabulary = vocabulary_of(tokenizer)
    tail = tuple(vocabulary.encode("<|end|>\n<|assistant|>\n"))
    server = ServerStrings("p", "<think>", "</think>", template_turn=tail)
    found = resolve_for(vocabulary, None, server).boundaries.turn_start
    assert found == {vocabulary.token_id("<|assistant|>")}


def test_told_turns_count_where_the_template_has_them(tiny):
    """A vocabulary may have tokens that the model's own template never writes."""
    tail = tuple(tiny.encode("<|end|><|assistant|>"))
    user, assistant = tiny.token_id("<|user|>"), tiny.token_id("<|assistant|>")
    for texts, expected in ((["<|assistant|>"], {assistant}), (["<|user|>"], {user, assistant})):
        match, server = match_of(turn_start=tuple(texts)), ServerStrings(template_turn=tail)
        assert resolve_for(tiny, match, server).boundaries.turn_start == expected
        told = ServerStrings(parser_turn_starts=tuple(texts), template_turn=tail)
        assert resolve_for(tiny, match_of(), told).boundaries.turn_start == expected
    assert resolve_for(tiny, match_of(turn_start=("<|user|>",))).boundaries.turn_start == {user}
