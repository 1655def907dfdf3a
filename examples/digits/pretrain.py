"""The two models that a LLaVA starts from, each pretrained on its own and without the other.

The vision encoder sees images and no text; the LLM sees text and no image.

    python examples/digits/pretrain.py --output llm.safetensors          the LLM, in a process of its own
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from data import Scans, image_batches, text_batches
from models import build_encoder, build_llm, save_weights
from progress import showing
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from transformers import CLIPVisionModel, LlamaForCausalLM

# Called after every step with the name of the phase, the step (from 1), the number of steps and the loss.
Report = Callable[[str, int, int, float], None]

ENCODER_STEPS, ENCODER_BATCH, ENCODER_RATE = 200, 64, 2e-3
LLM_STEPS, LLM_BATCH, LLM_RATE = 100, 64, 2e-3
WARM_UP = 0.1  # share of the steps in which the learning rate rises


def pretrain_encoder(scans: Scans, device: torch.device, seed: int, report: Report) -> CLIPVisionModel:
    """Learn to name the digit in each cell from that cell's patch feature.

    The classifier on top is thrown away: what LLaVA takes over are the features.
    """
    encoder = build_encoder(seed).to(device)
    classifier = nn.Linear(encoder.config.hidden_size, 10).to(device)
    optimizer = AdamW([*encoder.parameters(), *classifier.parameters()], lr=ENCODER_RATE, weight_decay=0.05)
    schedule = OneCycleLR(optimizer, ENCODER_RATE, total_steps=ENCODER_STEPS, pct_start=WARM_UP)
    batches = image_batches(scans, ENCODER_BATCH, seed)
    for step in range(1, ENCODER_STEPS + 1):
        pixel_values, digits = next(batches)
        features = encoder(pixel_values.to(device)).last_hidden_state[:, 1:]  # without CLS: [B, 9, hidden]
        loss = functional.cross_entropy(classifier(features).flatten(0, 1), digits.to(device).flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report("encoder", step, ENCODER_STEPS, loss.item())
    return encoder


def pretrain_llm(device: torch.device, seed: int, report: Report) -> LlamaForCausalLM:
    """Learn the task as text: read nine digits, be asked for a row, answer with its three digits."""
    llm = build_llm(seed).to(device)
    # The loss falls in sudden steps: a short memory of squared gradients and clipping keep it down.
    optimizer = AdamW(llm.parameters(), lr=LLM_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = OneCycleLR(optimizer, LLM_RATE, total_steps=LLM_STEPS, pct_start=WARM_UP)
    batches = text_batches(LLM_BATCH, seed)
    for step in range(1, LLM_STEPS + 1):
        batch = {name: tensor.to(device) for name, tensor in next(batches).items()}
        loss = llm(**batch).loss
        loss.backward()
        clip_grad_norm_(llm.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report("llm", step, LLM_STEPS, loss.item())
    return llm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="safetensors to write")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with showing() as report:
        save_weights(pretrain_llm(device, arguments.seed, report), arguments.output)


if __name__ == "__main__":
    main()
