"""What transformers says behind a prefix and the trial boundary, with a LoRA adapter or without."""

import json

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, Qwen3ForCausalLM

from meridian_patch.config.family_files import load_families

# Prefixes that transformers computes at a time.
BATCH = 16
RANK, SCALE = 8, 2.0
ADAPTED = ("q_proj", "v_proj")


class Reference:
    """The tiny reasoner in transformers, float32.

    Args:
        model: its folder.
        changes: to be added to its weights, by name.
        network: its class.
    """

    def __init__(self, model, changes=None, network=Qwen3ForCausalLM):
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._network = network.from_pretrained(model, dtype=torch.float32).eval()
        weights = self._network.state_dict()
        for name, change in (changes or {}).items():
            weights[name] += change
        self.suffix = self._ids(load_families()["tiny_reasoner"].family.probe_text)

    def prompt(self, problem):
        return self._ids(self._text(problem.question))

    def entropies_nats(self, prefixes, pixels=None):
        """Of the tokens behind each prefix and the trial boundary, in float64.

        Args:
            pixels: of the picture that stands in each prefix.
        """
        entropies = []
        for first in range(0, len(prefixes), BATCH):
            rows = [torch.tensor(prefix + self.suffix) for prefix in prefixes[first:][:BATCH]]
            # What is padded stands behind the last token, which does not see it.
            padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            last = torch.tensor([len(row) - 1 for row in rows])
            seen = {} if pixels is None else {"pixel_values": pixels.repeat(len(rows), 1, 1, 1)}
            with torch.inference_mode():
                logits = self._network(padded, **seen).logits
            logits = logits[torch.arange(len(rows)), last].double()
            log_p = torch.log_softmax(logits, dim=-1)
            entropies += (-(log_p.exp() * log_p).sum(dim=-1)).tolist()
        return entropies

    def _text(self, question):
        messages = [{"role": "user", "content": question}]
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )

    def _ids(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)


def make_adapter(model, folder, seed=0, size=0.07):
    """Write a LoRA adapter for the model's attention, drawn at random.

    Returns:
        What it adds to the model's weights, by name.
    """
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    weights = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32).state_dict()
    tensors, changes = {}, {}
    for name, weight in weights.items():
        if name.split(".")[-2] in ADAPTED:
            rows, columns = weight.shape
            a = torch.randn(RANK, columns, generator=draw) * size
            b = torch.randn(rows, RANK, generator=draw) * size
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            changes[name] = SCALE * b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": SCALE * RANK,
        "target_modules": list(ADAPTED),
        "base_model_name_or_path": str(model),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return changes
