"""Tiny models of many architectures with random weights, for the tiny reasoner's tokenizer.

Their outputs mean nothing, but each token depends on the whole context: a wrong or missing KV block
shows at once. They never end a thought by themselves, so a request's prompt decides its phase.
"""

import json
import shutil
from pathlib import Path

import torch

VOCABULARY = 264
END_ID = 259
THINK_END_ID = 257
# What every text model here has in common; a kind may say otherwise.
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    "eos_token_id": END_ID,
    "pad_token_id": 258,
    "bos_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = {
    "dense": ("Qwen3Config", {"num_hidden_layers": 2}),
    "sliding": ("MistralConfig", {"num_hidden_layers": 2, "sliding_window": 40}),
    # Sliding window layers and full ones: two groups of KV cache.
    "two_groups": (
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mamba": (
        "NemotronHConfig",
        {
            "layers_block_type": ["mamba", "attention", "mamba", "attention"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 32,
        },
    ),
    "convolution": (
        "Lfm2Config",
        {
            "hidden_size": 128,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention"] * 2,
            "tie_word_embeddings": True,
            "conv_L_cache": 3,
            "conv_dim": 128,
            "block_dim": 128,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "mla": (
        "DeepseekV3Config",
        {
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            # The one size that vLLM's CPU kernel for MLA has.
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 32,
            "q_lora_rank": None,
            "head_dim": 64,
            # Dense layers only.
            "first_k_dense_replace": 2,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 32,
        },
    ),
    "moe": (
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 2,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
}


def make_tiny(kind: str, reasoner: Path, folder: Path) -> Path:
    """Write a model of a kind, with the tiny reasoner's tokenizer.

    Args:
        kind: a key of ``KINDS``.
        reasoner: folder of the tiny reasoner.
        folder: where the model's own is made, under a name by which the reasoner's family is found.
    """
    import transformers

    target = folder / f"{kind}-tiny-reasoner"
    if target.exists():
        return target
    config_class, changes = KINDS[kind]
    config = getattr(transformers, config_class)(**COMMON | changes)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    _draw(network)
    network.save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(reasoner / name, target / name)
    settings = {"eos_token_id": [END_ID], "pad_token_id": 258}
    (target / "generation_config.json").write_text(json.dumps(settings))
    return target


def _draw(network) -> None:
    """Weights that do not depend on how transformers draws them, and keep sizes as they are."""
    draw = torch.Generator().manual_seed(0)
    for name, weight in sorted(network.named_parameters()):
        if weight.dim() > 1 and "conv" not in name:
            fan_in = 1 if "embed" in name else weight[0].numel()
            weight.data = torch.randn(weight.shape, generator=draw) / fan_in**0.5
    if network.config.tie_word_embeddings:
        # Or every token's own embedding would be what it is most like.
        network.get_input_embeddings().weight.data *= 0.05
