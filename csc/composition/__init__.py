"""One multimodal LLM out of encoders, of Hugging Face or any library, and a language model; docs/compose.md shows how.

    model = csc.compose(encoders={"vision": clip}, projectors={"vision": "mlp"}, language_model=llama,
                        placeholders={"vision": 32000})
    processor = model.processor(tokenizer, {"vision": image_processor})

`compose`, `Tower` (an encoder of any library), `ComposedModel` (an ordinary nn.Module), `Processor` (texts, images and
sound to batches).
"""

from csc.composition.composing import compose
from csc.composition.model import ComposedModel, Processor
from csc.composition.towers import Tower

__all__ = ["ComposedModel", "Processor", "Tower", "compose"]
