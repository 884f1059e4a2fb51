"""Patterns that end a thought: what may be written, and which tokens they are."""

from dataclasses import replace

import pytest
from tokenizers_for_tests import merging_bpe, prefixing_words, vocabulary_of, word_bpe

from meridian_patch.config.load import load_config
from meridian_patch.config.request_options import parse_options
from meridian_patch.config.schema import ExitConfig
from meridian_patch.errors import ConfigError
from meridian_patch.exit.patterns import PatternTokens
from meridian_patch.exit.strategies.base import ThoughtStart
from meridian_patch.exit.strategies.build import build_strategies
from meridian_patch.exit.text_breaks import find_breaks

FIELD = "meridian_exit_patterns"
VARIABLE = "MERIDIAN_PATCH_SET_EXIT__PATTERNS"


def tokens_of(tokenizer, vocab_size=1000):
    return PatternTokens(lambda: vocabulary_of(tokenizer), vocab_size)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("so", "a list of patterns"),
        ([" "], "pattern 1 to be text that is not blank"),
        (["so", ""], "pattern 2 to be text that is not blank"),
        (["ä" * 51], "pattern 1 to be at most 100 bytes of text"),
        ([[]], "pattern 1 to be a text, or a list of token ids that is not empty"),
        ([7], "pattern 1 to be a text, or a list of token ids that is not empty"),
        ([[1, -1]], "pattern 1 to be 1 to 128 token ids, whole numbers from 0 on"),
        ([[True]], "pattern 1 to be 1 to 128 token ids, whole numbers from 0 on"),
        ([["so"]], "pattern 1 to be 1 to 128 token ids, whole numbers from 0 on"),
        ([[1] * 129], "pattern 1 to be 1 to 128 token ids, whole numbers from 0 on"),
        ([[[1]] * 17], "pattern 1 to be at most 16 lists of token ids"),
        (["so"] * 9, "at most 8 patterns"),
    ],
)
def test_what_is_wrong_is_said(value, expected):
    """The field, what came and what was expected."""
    with pytest.raises(ConfigError) as error:
        parse_options({FIELD: value})
    assert str(error.value).startswith(
        f"vllm_xargs field {FIELD} is {value!r}, expected {expected}"
    )


def test_a_server_may_have_more():
    """64, in the configuration; the variable is named where there are more."""
    config = load_config({VARIABLE: str(["so"] * 64)}).config.exit
    assert len(config.patterns) == 64
    with pytest.raises(ConfigError, match=r"exit\.patterns is .*expected at most 64 patterns"):
        load_config({VARIABLE: str(["so"] * 65)})


def test_a_requests_patterns_stand_in_for_the_servers():
    """Also an empty list; without the field the server's count."""
    config = ExitConfig(patterns=["so"])
    assert parse_options({FIELD: ["a", [1, 2]]}).exit_config(config).patterns == ("a", (1, 2))
    assert parse_options({FIELD: []}).exit_config(config).patterns == ()
    assert parse_options({}).exit_config(config).patterns == ("so",)


def test_they_are_a_strategy():
    """Before the bounds, and only where there are some."""
    config = ExitConfig(eat=False, rpdi=False, patterns=(((1, 2),),), max_think_tokens=900)
    reasons = [s.reason for s in build_strategies(config, ThoughtStart(find_breaks([])))]
    assert reasons == ["pattern", "hard_cap"]


def test_a_text_is_all_ways_in_which_it_is_written():
    """Behind a space or a line break its first token may be another one."""
    tokenizer = merging_bpe()
    options = parse_options({FIELD: ["</think>", "It", [5, 6]]})
    found = tokens_of(tokenizer).in_options(options).meridian_exit_patterns
    marker, word, ids = found
    assert len(marker) > 1
    assert all("</think>" in tokenizer.decode(list(each)) for each in marker)
    assert {tokenizer.decode(list(each)).strip() for each in word} == {"It"}
    assert ids == ((5, 6),)


def test_what_the_api_server_sends_is_read_in_the_engine():
    """Tokens once are tokens for good, and no tokenizer is asked again."""
    fields = {FIELD: ["</think>", [5, 6]], "other": 1}
    sent = tokens_of(merging_bpe()).in_fields(fields, parse_options(fields))
    assert sent["other"] == 1
    engine = PatternTokens(lambda: pytest.fail("a tokenizer was asked"), 1000)
    found = engine.in_options(parse_options(sent)).meridian_exit_patterns
    assert [list(map(list, sequences)) for sequences in found] == sent[FIELD]


def test_a_text_that_has_no_tokens_of_its_own():
    """The message names field and text; ids that the model does not have, too."""
    tokens = tokens_of(prefixing_words(["_a"]))
    with pytest.raises(ConfigError, match=rf"{FIELD} holds 'so', which cannot be followed"):
        tokens.in_options(parse_options({FIELD: ["so"]}))
    with pytest.raises(ConfigError, match="holds token id 1000, expected ids below 1000"):
        tokens.find([(3, 1000)], "exit.patterns")


def test_a_word_of_the_vocabulary_is_found_behind_a_space():
    """It is another entry there, as in the vocabularies of most models."""
    tokenizer = word_bpe()
    (found,) = tokens_of(tokenizer).find(["Wait"], "exit.patterns")
    assert {(tokenizer.token_to_id("Wait"),), (tokenizer.token_to_id("ĠWait"),)} <= set(found)


def test_texts_are_encoded_once_also_if_they_are_refused():
    """Requests may send the same ones again and again."""
    vocabulary, asked = vocabulary_of(prefixing_words(["_a"])), []
    counting = replace(
        vocabulary, encode=lambda text: asked.append(text) or vocabulary.encode(text)
    )
    tokens = PatternTokens(lambda: counting, 1000)
    for where in ("exit.patterns", FIELD):
        with pytest.raises(ConfigError, match=rf"{where} holds 'so', which cannot be followed"):
            tokens.find(["so"], where)
    assert len(asked) == 17


def test_a_long_text_is_decoded_a_few_times():
    """The API server serves nothing else meanwhile."""
    vocabulary, lengths = vocabulary_of(merging_bpe()), []
    counting = replace(
        vocabulary, decode=lambda ids: lengths.append(len(ids)) or vocabulary.decode(ids)
    )
    PatternTokens(lambda: counting, 1000).find(["xq" * 49], "exit.patterns")
    assert len(lengths) <= 40


def test_texts_need_a_tokenizer():
    """Ids do not."""
    tokens = PatternTokens(lambda: None, 1000)
    assert tokens.find([(3,)], "exit.patterns") == (((3,),),)
    with pytest.raises(ConfigError, match="need a tokenizer"):
        tokens.find(["so"], "exit.patterns")
