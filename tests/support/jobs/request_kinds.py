"""Makes vLLM's own objects from an engine job's plain data, in the job's process."""

import zlib
from pathlib import Path

import numpy as np

# Arguments of an engine that are objects, by the module and the name of their class.
OBJECTS = {
    "kv_transfer_config": ("vllm.config", "KVTransferConfig"),
    "kv_events_config": ("vllm.config", "KVEventsConfig"),
}
SOUND_HZ = 16_000


def engine_arguments(plain: dict) -> dict:
    """Arguments of ``vllm.LLM``."""
    from importlib import import_module

    made = dict(plain)
    for name, (module, kind) in OBJECTS.items():
        if name in made:
            made[name] = getattr(import_module(module), kind)(**made[name])
    return made


def params(request: dict):
    """Sampling parameters, or with ``"pooling"`` those of a pooling request."""
    from vllm import PoolingParams, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    if "pooling" in request:
        return PoolingParams(**request["pooling"])
    made = dict(request["params"])
    if "regex" in made:
        made["structured_outputs"] = StructuredOutputsParams(regex=made.pop("regex"))
    if "choice" in made:
        made["structured_outputs"] = StructuredOutputsParams(choice=made.pop("choice"))
    if "logit_bias" in made:
        made["logit_bias"] = {int(token): bias for token, bias in made["logit_bias"].items()}
    return SamplingParams(**made)


def lora(folder: str | None):
    """An adapter; its number is made from its folder's name."""
    from vllm.lora.request import LoRARequest

    if folder is None:
        return None
    name = Path(folder).name
    return LoRARequest(name, 1 + zlib.crc32(name.encode()) % 10_000, folder)


def prompt(text: str, request: dict):
    """A prompt with the request's picture or sound, both drawn from a seed."""
    if "image" in request:
        from tiny_vlm import picture

        return {"prompt": text, "multi_modal_data": {"image": picture(request["image"])}}
    if "sound" in request:
        return {
            "encoder_prompt": {
                "prompt": "",
                "multi_modal_data": {"audio": sound(request["sound"])},
            },
            "decoder_prompt": text,
        }
    return text


def sound(seed: int) -> tuple[np.ndarray, int]:
    """One second of noise, and its rate."""
    draw = np.random.default_rng(seed)
    return draw.standard_normal(SOUND_HZ).astype(np.float32), SOUND_HZ


def plain_logprobs(per_token: list) -> list:
    """Log probabilities of a prompt by token id, rounded; None where there are none."""
    return [
        row and {str(token): round(entry.logprob, 4) for token, entry in row.items()}
        for row in per_token
    ]


def beam_search(llm, watch, run: dict) -> dict:
    """A run of beam searches, all at once."""
    from vllm.sampling_params import BeamSearchParams

    seen = watch.restart()
    tokenizer = llm.get_tokenizer()
    prompts = [
        {
            "prompt": tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
        }
        for question in run["beams"]
    ]
    outputs = llm.beam_search(prompts, BeamSearchParams(**run["params"]))
    found = [[beam.tokens for beam in output.sequences] for output in outputs]
    return {"beams": found, "steps": seen.steps, "probes": len(seen.probes)}
