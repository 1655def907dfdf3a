"""How often a LLaVA reads a row right: the whole answer, decoded token by token from its own words."""

import torch
from data import ANSWER_LENGTH, CELLS, PROMPT_LENGTH, ROWS, ask_about_images
from torch import Tensor
from torch.nn import functional
from transformers import LlavaForConditionalGeneration


@torch.no_grad()
def answer(model: LlavaForConditionalGeneration, images: Tensor, rows: Tensor) -> Tensor:
    """Decode greedily what the model answers about ``rows`` [B] of ``images`` [B, 3, H, W].

    The model is given the prompt alone. Returns the tokens it writes, [B, 4], padded after <eos>.
    """
    # The prompt holds no digit; ask() is given zeros where the answer, which is cut off, would be.
    unknown = torch.zeros(len(images), CELLS, dtype=torch.int64)
    prompt = ask_about_images(unknown, rows.cpu())[0][:, :PROMPT_LENGTH].to(model.device)
    written = model.generate(
        input_ids=prompt,
        attention_mask=torch.ones_like(prompt),
        pixel_values=images.to(model.device),
        max_new_tokens=ANSWER_LENGTH,
        do_sample=False,
        use_cache=True,
    )[:, PROMPT_LENGTH:]
    missing = ANSWER_LENGTH - written.shape[1]  # generate() stops early once every answer has ended
    return functional.pad(written, (0, missing), value=model.config.text_config.pad_token_id).cpu()


def exact_match(
    model: LlavaForConditionalGeneration, images: Tensor, digits: Tensor, batch_size: int = 200
) -> dict[str, float]:
    """Share of right answers about each row, by its name, when every image [I, 3, H, W] is asked for it.

    ``digits`` is [I, 9]. An answer is right if it is the row's three digits in order and then ends. Every row
    has the same number of questions, so the share over all questions is the mean of the values.
    """
    was_training = model.training
    model.eval()
    shares = {}
    for row, name in enumerate(ROWS):
        right = 0
        for start in range(0, len(images), batch_size):
            part = slice(start, start + batch_size)
            rows = torch.full((len(images[part]),), row)
            expected = ask_about_images(digits[part], rows)[0][:, PROMPT_LENGTH:]
            right += int((answer(model, images[part], rows) == expected).all(dim=1).sum())
        shares[name] = right / len(images)
    model.train(was_training)
    return shares
