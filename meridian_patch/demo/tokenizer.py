"""Builds the tiny reasoner's tokenizer and chat templates (training time only).

One token per byte, six named tokens, no merges: any text can be encoded, and a token is a
character for all text the model knows.
"""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

THINK_START = "<think>"
THINK_END = "</think>"
TURN_END = "<|end|>"
PAD = "<|pad|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

# The generation prompt opens the thought; `enable_thinking=false` closes it at once.
_TEMPLATE = """\
{%- for message in messages -%}
{%- set content = message['content'] if message['content'] is string else '' -%}
{%- if message['role'] == 'assistant' -%}
ASSISTANT
{%- else -%}
{{- '<|' + message['role'] + '|>' + content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|><think>\\n' -}}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '</think>' -}}
{%- endif -%}
{%- endif -%}
"""
_STRIP = """\
{{- '<|assistant|>' + content.split('</think>')[-1] + '<|end|>' -}}"""
_KEEP = """\
{%- set thought = message.get('reasoning') or message.get('reasoning_content') or '' -%}
{%- if thought and '</think>' not in content -%}
{%- set content = '<think>\\n' + thought.lstrip('\\n') + '</think>' + content -%}
{%- endif -%}
{{- '<|assistant|>' + content + '<|end|>' -}}"""


def chat_template(*, keep_thinking: bool) -> str:
    """Jinja chat template; earlier thinking is stripped from the history unless kept."""
    return _TEMPLATE.replace("ASSISTANT", _KEEP if keep_thinking else _STRIP)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level tokenizer, vocabulary of 256 bytes and eight named tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # As in Qwen3, the think markers are added tokens but not "special": they stay visible.
    tokenizer.add_tokens([AddedToken(t, special=False) for t in (THINK_START, THINK_END)])
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (PAD, TURN_END, *ROLES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=chat_template(keep_thinking=False),
    )


def save_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Write tokenizer files and both chat templates into ``directory``."""
    tokenizer = build_tokenizer()
    tokenizer.save_pretrained(directory)
    keep = directory / "chat_template_keep_thinking.jinja"
    keep.write_text(chat_template(keep_thinking=True))
    return tokenizer
