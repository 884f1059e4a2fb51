"""Model directories of real sizes without weights, for vLLM's ``--load-format dummy``."""

import json
import shutil
from pathlib import Path
from typing import Any

from meridian_patch.bench.served.plan import packaged_model
from meridian_patch.errors import BenchError

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# Sizes as in the models' own config.json on the Hugging Face hub.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
}
_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "dtype": "bfloat16",
    "head_dim": 128,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
# A rehearsal keeps only the vocabulary.
_REHEARSED: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


def write_shape(name: str, folder: Path, *, rehearse: bool = False) -> Path:
    """Write a model directory of this shape, without weights.

    The tokenizer is the tiny reasoner's, whose ids are all within the vocabulary. Ids that it does
    not know have no text.

    Args:
        name: of ``SHAPES``.
        folder: takes the directory.
        rehearse: two narrow layers in place of the shape's.

    Returns:
        The directory.

    Raises:
        BenchError: an unknown name.
    """
    if name not in SHAPES:
        raise BenchError(f"--shape is {name!r}, expected one of {', '.join(SHAPES)}")
    # Families are found by the model's name, and the longest pattern counts: the markers are those
    # of the tokenizer, not of the model whose sizes these are.
    directory = folder / f"{name}-tiny-reasoner"
    directory.mkdir(parents=True, exist_ok=True)
    tiny = json.loads((packaged_model() / "config.json").read_text())
    ids = {key: tiny[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = _QWEN3 | SHAPES[name] | ids | (_REHEARSED if rehearse else {})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for file in _TOKENIZER:
        shutil.copy(packaged_model() / file, directory / file)
    return directory
