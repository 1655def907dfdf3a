"""One multimodal LLM out of Hugging Face encoders and a language model; docs/compose.md shows how.

    model = csc.compose(encoders={"vision": clip}, projectors={"vision": "mlp"}, language_model=llama,
                        placeholders={"vision": 32000})
    processor = model.processor(tokenizer, {"vision": image_processor})

`compose`, `ComposedModel` (an ordinary nn.Module), `Processor` (texts, images and sound to batches).
"""

from csc.composition.composing import compose
from csc.composition.model import ComposedModel, Processor

__all__ = ["ComposedModel", "Processor", "compose"]
