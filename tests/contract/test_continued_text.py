"""Text of an output that begins within a character, by vLLM's own detokenizers."""

import pytest
from served_driver import core_request
from vllm import SamplingParams
from vllm.v1.engine import output_processor as upstream

from meridian_patch.demo.tokenizer import build_tokenizer
from meridian_patch.engine.api.request_state import build_request_state

# The tiny reasoner's tokenizer has a token per byte.
TOKENIZER = build_tokenizer()
TEXT = "a é 中 😀 b."
# Another test of this process may have rebound the name.
STOCK = next(c for c in upstream.RequestState.__mro__ if c.__module__ == upstream.__name__)
PROMPT, SAID = (TOKENIZER.encode(each, add_special_tokens=False) for each in ("Why? é", TEXT))


def detokenizer(prompt, kind=None, **params):
    """That of a new request."""
    sampling = SamplingParams(max_tokens=100, **params)
    made = core_request("r", prompt, sampling, "r")
    kind = kind or build_request_state(STOCK)
    state = kind.from_new_request(TOKENIZER, made, None, None, 0, None, False, 1)
    return state.detokenizer


def text_of(detokenizer, token_ids):
    """The pieces that a stream gets of tokens, one at a time; what ends within one is held back."""
    pieces = []
    for token_id in token_ids:
        detokenizer.update([token_id], False)
        pieces.append(detokenizer.get_next_output_text(False, True))
    return "".join(pieces)


@pytest.mark.parametrize("cut", range(len(SAID)))
@pytest.mark.parametrize("stop", [None, ["never"]], ids=["", "with a stop string"])
def test_the_text_goes_on_where_it_was_cut(cut, stop):
    """A request whose output so far is its prompt: no character is lost, none is said again."""
    before = text_of(detokenizer(PROMPT), SAID[:cut])
    after = detokenizer([*PROMPT, *SAID[:cut]], stop=stop)
    rest = text_of(after, SAID[cut:])
    rest += after.get_next_output_text(True, True)
    assert before + rest == TEXT


def test_stock_repeats_the_prompt():
    """Why it is mended: vLLM's stream gives the whole prompt with the first whole character."""
    cut = len(TOKENIZER.encode("a é", add_special_tokens=False)) - 1
    stock = detokenizer([*PROMPT, *SAID[:cut]], STOCK)
    assert "Why?" in text_of(stock, SAID[cut:])


@pytest.mark.parametrize("prompt", [(), SAID[:1], [127], [127] * 6], ids=str)
def test_short_and_broken_prompts_are_as_in_stock(prompt):
    """No prompt, one token, the first byte of a character alone, and bytes that are none."""
    said = text_of(detokenizer(list(prompt)), SAID[:1])
    assert said.endswith("a")


def test_a_request_without_a_tokenizer_has_no_text():
    state = build_request_state(STOCK)
    made = core_request("r", PROMPT, SamplingParams(detokenize=False), "r")
    state = state.from_new_request(TOKENIZER, made, None, None, 0, None, False, 1)
    assert state.detokenizer.get_next_output_text(True, True) == ""
