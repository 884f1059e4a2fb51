"""What transformers says behind a prefix with a picture in it."""

from probe_reference import Reference
from tiny_vlm import picture
from transformers import LlavaForConditionalGeneration, LlavaProcessor


class SeeingReference(Reference):
    """The model that ``tiny_vlm.make_vlm`` wrote, in transformers, float32."""

    def __init__(self, folder):
        super().__init__(folder, network=LlavaForConditionalGeneration)
        self._processor = LlavaProcessor.from_pretrained(folder)

    def look(self, question, seed):
        """The prompt of a question about a picture, and the picture's pixels."""
        both = self._processor(
            text=self._text(question), images=[picture(seed)], return_tensors="pt"
        )
        return both["input_ids"][0].tolist(), both["pixel_values"]
