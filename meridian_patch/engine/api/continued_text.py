"""Lets the text of an output begin within a character, where the prompt's tokens end within one."""

from collections.abc import Sequence
from typing import Any, Final

import tokenizers
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer

# A character has at most four bytes, and a token at least one of them.
_MOST_PARTIAL_TOKENS: Final = 3
# Tokens that are looked at; the first ones may be the rest of a character, too.
_LOOKED_AT: Final = 8
_REPLACEMENT: Final = "\ufffd"


def begin_within_character(detokenizer: Any, prompt: Sequence[int] | None) -> None:
    """Let a new request's text begin with the character that its prompt has begun.

    A request that is continued on another engine has all earlier tokens in its prompt, and their
    last character may not be whole. Load-bearing: vLLM primes the stream of tokens with the prompt.
    A stream primed within a character gives no text until it is whole, and then the text of the
    whole prompt, too.

    Args:
        detokenizer: vLLM's, of a new request; changed if it is the fast one. The slow one, for
            tokenizers without a Rust part, loses that character and nothing else.
        prompt: token ids.
    """
    if not prompt or not isinstance(detokenizer, FastIncrementalDetokenizer):
        return
    num_partial = _num_partial_tokens(detokenizer.tokenizer, prompt)
    if not num_partial:
        return
    stream = tokenizers.decoders.DecodeStream(
        ids=list(prompt[:-num_partial]), skip_special_tokens=detokenizer.skip_special_tokens
    )
    for token_id in prompt[-num_partial:]:
        stream.step(detokenizer.tokenizer, token_id)
    detokenizer.stream = stream


def _num_partial_tokens(tokenizer: Any, prompt: Sequence[int]) -> int:
    """Number of tokens at the end that are the beginning of a character; 0 for none."""
    last = prompt[-_LOOKED_AT:]
    for number in range(min(_MOST_PARTIAL_TOKENS, len(last)) + 1):
        text = tokenizer.decode(last[: len(last) - number], skip_special_tokens=False)
        if not text.endswith(_REPLACEMENT):
            return number
    return 0
