"""The puppet: a real model that writes what a test scripts, because each token has one successor.

"30 tokens of thought, then a tool call, never ``</think>``" is one script:

    [THINK, *words("t", 30), *tool_call("look_up", city="Paris")]

The first token of a script ends the prompt, and behind the last one the puppet ends its turn. It
reads nothing but the last token: behind a forced ``</think>`` it goes on as a script says of
``</think>``. One puppet may have many scripts, and a script may lead into another one, or back.
"""

import json
from itertools import pairwise
from pathlib import Path

import torch
from tiny_models import COMMON, END_ID

THINK, THINK_END = "<think>", "</think>"
PAD, TURN_END, TURN_START = "<|pad|>", "<|im_end|>", "<|im_start|>"
# `opens`, a template argument of a request, is what stands behind the turn's start instead.
_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' + (opens if opens is defined else OPENS) -}}
{%- endif -%}
"""
# Of the one token that the puppet can write next; all others have 0.
LOGIT = 20.0


def words(stem: str, number: int) -> list[str]:
    """So many tokens that differ from each other and from those of other stems."""
    return [f" {stem}{index}" for index in range(number)]


def tool_call(name: str, **arguments: str | list[str]) -> list[str]:
    """A call as ``--tool-call-parser qwen3_coder`` reads it; a list has an argument's tokens."""
    parts = ["<tool_call>", f"\n<function={name}>"]
    for key, value in arguments.items():
        *first, last = [value] if isinstance(value, str) else value
        parts += [f"\n<parameter={key}>\n", *first, f"{last}\n</parameter>"]
    return [*parts, "\n</function>\n", "</tool_call>"]


def make_puppet(
    folder: Path, name: str, scripts: list[list[str]], *, opens: str = THINK, logit: float = LOGIT
) -> Path:
    """Write a puppet with the architecture of Qwen3.

    Args:
        folder: where the model's own is made.
        name: by which its family is found, such as ``qwen3-puppet-thinking-2507``.
        scripts: what it writes, token by token as text.
        opens: what the chat template writes behind ``<|im_start|>assistant`` and a line break.
        logit: of the scripted token, in every row.

    Raises:
        ValueError: two scripts differ in what follows a token.
    """
    import transformers

    after = successors(scripts)
    target = folder / name
    tokenizer = _tokenizer(list(after), opens)
    ids = tokenizer.get_vocab()
    width = -(-len(ids) // 64) * 64
    sizes = {"vocab_size": width, "hidden_size": width, "num_hidden_layers": 1}
    config = transformers.Qwen3Config(**COMMON | sizes)
    network = transformers.Qwen3ForCausalLM(config).to(torch.float32).eval()
    following = torch.full((width,), END_ID)
    for text, successor in after.items():
        following[ids[text]] = ids[successor]
    _pull_strings(network, following, logit)
    network.save_pretrained(target)
    tokenizer.save_pretrained(target)
    settings = {"eos_token_id": [END_ID], "pad_token_id": COMMON["pad_token_id"]}
    (target / "generation_config.json").write_text(json.dumps(settings))
    return target


def successors(scripts: list[list[str]]) -> dict[str, str]:
    """The successor of each scripted token; the last one of a script may have one in another."""
    after: dict[str, str] = {}
    for token, successor in (pair for script in scripts for pair in pairwise(script)):
        if after.setdefault(token, successor) != successor:
            raise ValueError(f"{token!r} is followed by {after[token]!r} and by {successor!r}")
    for script in scripts:
        after.setdefault(script[-1], TURN_END)
    return after


def _tokenizer(pieces: list[str], opens: str):
    """A token for each byte, for each marker and for each scripted text."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The ids of all these are those of the tiny reasoner's markers.
    tokenizer.add_tokens([AddedToken(text, special=False) for text in (THINK, THINK_END)])
    special = (PAD, TURN_END, TURN_START)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    others = [text for text in ("<tool_call>", "</tool_call>", *pieces) if text not in special]
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in others])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=COMMON["max_position_embeddings"],
        chat_template=_TEMPLATE.replace("OPENS", repr(opens)),
    )


def _pull_strings(network, following: torch.Tensor, logit: float) -> None:
    """Let the hidden state be the last token's own axis, and the head read off its successor."""
    width = len(following)
    axes = torch.eye(width)
    network.get_input_embeddings().weight.data = axes
    for name, weight in network.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data.zero_()
    # The last norm stretches an axis to the root of its width.
    network.get_output_embeddings().weight.data = (
        axes[following].T * (logit / width**0.5)
    ).contiguous()
