"""Generators of images behind a language model: a flow head on latents, and a language model of image tokens.

    csc verify examples/generator.py:flow       every gradient against eager PyTorch, the draws of noise included
    csc explain examples/generator.py:flow      what is frozen, what runs F alone, where stages begin
    python examples/generator.py                six steps of each, all ranks in this process
    python examples/generator.py flow           of one of them

`pip install diffusers==0.42.1 -e ".[hf]"` brings all that is imported here; a CPU will do. Weights are random.

`Flow` is what a text-to-image model trains (SD3): an autoencoder makes latents of the pixels, a language model reads
the caption, and a transformer learns the flow from noise to latents. The first two are frozen. Latents are kept on
disk, so the autoencoder runs once for each image and is no part of a step; the language model has no backward, and one
rank, which serves both replicas of the transformer; this one has two stages. Noise, times and the captions that are
dropped are drawn in forward, sample by sample: any number of microbatches trains on the same draws. A moving average
of the head's weights is in the loop.

`Tokens` is the other kind (Chameleon, Janus): a frozen VQ autoencoder makes token ids of the pixels, and a language
model predicts them behind the caption.
"""

from __future__ import annotations

import logging
import os
import sys

import torch
from diffusers import AutoencoderKL, SD3Transformer2DModel, VQModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import csc

WORDS, CODES, WIDTH = 64, 32, 32
BLOCKS = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (8, 16), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4,
}  # fmt: skip


def language_model(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=vocabulary
    )


class Flow(nn.Module):
    """A head that learns the flow between latents of images and noise, by captions."""

    def __init__(self) -> None:
        super().__init__()
        self.vae = AutoencoderKL(sample_size=16, **BLOCKS)
        self.text_encoder = LlamaModel(language_model(WORDS))
        self.head = SD3Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH,
            pooled_projection_dim=WIDTH, pos_embed_max_size=8,
        )  # fmt: skip
        self.no_caption = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        latents = self.vae.encode(pixel_values).latent_dist.mode()
        caption = self.text_encoder(input_ids).last_hidden_state
        dropped = torch.rand(len(caption), 1, 1, device=caption.device) < 0.1  # for guidance without a classifier
        caption = torch.where(dropped, self.no_caption, caption)
        noise = torch.randn_like(latents)
        time = torch.randn(len(latents), device=latents.device).sigmoid()  # more in the middle, as SD3 draws them
        at = time[:, None, None, None]
        flow = self.head(
            hidden_states=(1 - at) * latents + at * noise, encoder_hidden_states=caption,
            pooled_projections=caption[:, -1], timestep=1000 * time, return_dict=False,
        )[0]  # fmt: skip
        signal = ((1 - time) / time).square()  # to noise
        weight = signal.clamp(max=5) / (signal + 1)  # min-SNR, of predicted velocities
        return (weight * (flow - (noise - latents)).square().mean((1, 2, 3))).mean()


class Tokens(nn.Module):
    """A language model of captions and of the tokens of their images."""

    def __init__(self) -> None:
        super().__init__()
        self.vqvae = VQModel(num_vq_embeddings=CODES, **BLOCKS)
        self.language_model = LlamaForCausalLM(language_model(WORDS + CODES))

    def forward(self, pixel_values: Tensor, input_ids: Tensor) -> Tensor:
        codes = self.vqvae.quantize(self.vqvae.encode(pixel_values).latents)[2][2]
        ids = torch.cat([input_ids, WORDS + codes.view(len(pixel_values), -1)], 1)
        logits = self.language_model(ids).logits[:, input_ids.shape[1] - 1 : -1]
        return F.cross_entropy(logits.flatten(0, 1), ids[:, input_ids.shape[1] :].flatten())


def batch_of(step: int) -> dict[str, Tensor]:
    """Eight pictures of one colour each, and captions that name it. There are two batches, which take turns."""
    generator = torch.Generator().manual_seed(step % 2)
    colours = torch.randint(WORDS, (8,), generator=generator)
    captions = torch.randint(WORDS, (8, 6), generator=generator)
    captions[:, 2] = colours
    levels = torch.stack([colours % 4, colours // 4 % 4, colours // 16], 1) / 1.5 - 1
    return {"pixel_values": levels[:, :, None, None].expand(8, 3, 16, 16).contiguous(), "input_ids": captions}


@csc.compile(
    mesh={"text_encoder": {"pp": 1, "dp": 1}, "head": {"pp": 2, "dp": 2}}, microbatches=2, example=batch_of(0),
    freeze=["vae", "text_encoder"], cache_features="build/generator_latents",
)  # fmt: skip
def flow() -> Flow:
    torch.manual_seed(0)
    return Flow()


@csc.compile(mesh="pp=2", microbatches=2, example=batch_of(0), freeze=["vqvae"])
def tokens() -> Tokens:
    torch.manual_seed(0)
    return Tokens()


def train(compiled: csc.CompiledModel, name: str) -> None:
    """Six steps, with a moving average of the weights that train."""
    trained = [parameter for parameter in compiled.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    average = [parameter.detach().clone() for parameter in trained]
    for step in range(6):
        loss = compiled.train_step(batch_of(step))
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, [parameter.detach() for parameter in trained], 0.1)
        features = compiled.metrics.get("features_read"), compiled.metrics.get("features_made")
        if os.environ.get("RANK", "0") == "0":
            kept = f", latents: {features[0]} from disk, {features[1]} encoded" if features[0] is not None else ""
            print(f"{name} step {step}: loss {loss:.4f}{kept}")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in sys.argv[1:] or ["flow", "tokens"]:
        train({"flow": flow, "tokens": tokens}[name], name)
