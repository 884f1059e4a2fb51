"""The tiny reasoner with eyes: a LLaVA model around it, its eyes drawn at random.

What it sees means nothing to it, but it thinks otherwise about one picture than about another.
"""

import torch
from PIL import Image
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen3ForCausalLM,
)

# To be written in a question; vLLM and the processor put a token there for each patch.
IMAGE = "<image>"
# The one id that the tiny reasoner's vocabulary has left.
IMAGE_ID = 263
SIDE, PATCH = 32, 4
IMAGE_TOKENS = (SIDE // PATCH) ** 2


def picture(seed):
    """A picture of coarse patches in random colours."""
    draw = torch.Generator().manual_seed(seed)
    colours = torch.randint(256, (SIDE // PATCH, SIDE // PATCH, 3), generator=draw)
    small = Image.fromarray(colours.to(torch.uint8).numpy())
    return small.resize((SIDE, SIDE), Image.Resampling.NEAREST)


def make_vlm(model, folder):
    """Write the model and its processor.

    Args:
        model: folder of the tiny reasoner.
        folder: to be made; of a name by which the tiny reasoner's family is found.
    """
    reasoner = Qwen3ForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=SIDE,
            patch_size=PATCH,
        ),
        text_config=reasoner.config,
        image_token_index=IMAGE_ID,
        image_seq_length=IMAGE_TOKENS,
        tie_word_embeddings=True,
    )
    network = LlavaForConditionalGeneration(config).eval()
    _draw(network)
    network.model.language_model.load_state_dict(reasoner.model.state_dict())
    network.tie_weights()
    processor = _processor(model)
    _match_embeddings(network, processor)
    network.save_pretrained(folder)
    processor.save_pretrained(folder)
    # A reasoner's settings for generation: it stops at the ends of turns.
    (folder / "generation_config.json").write_text((model / "generation_config.json").read_text())


def _draw(network):
    """Weights that do not depend on how transformers draws them."""
    draw = torch.Generator().manual_seed(0)
    for name, weight in network.named_parameters():
        if weight.dim() > 1 or name.endswith("class_embedding"):
            fan_in = weight[0].numel()
            weight.data = torch.randn(weight.shape, generator=draw) / fan_in**0.5


def _match_embeddings(network, processor):
    """Scale what is seen to the size of the tokens' embeddings, or it would be all or nothing."""
    pixels = processor.image_processor(picture(0), return_tensors="pt")["pixel_values"]
    with torch.inference_mode():
        seen = network.get_image_features(pixels).pooler_output[0]
    size = network.get_input_embeddings().weight.std() / seen.std()
    last = network.model.multi_modal_projector.linear_2
    last.weight.data *= size
    last.bias.data *= size


def _processor(model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"additional_special_tokens": [IMAGE]})
    size = {"height": SIDE, "width": SIDE}
    return LlavaProcessor(
        CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        # The class token, which the strategy takes out again.
        num_additional_image_tokens=1,
        chat_template=tokenizer.chat_template,
    )
