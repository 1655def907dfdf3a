"""Models of other libraries than Hugging Face's transformers, each small, with random weights, and its loss.

MODELS = {"library: model": LibraryModel}      PINS: what pip installs for them
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PINS = (
    "axial-attention==0.6.1", "beartype==0.23.1", "conformer==0.3.2", "diffusers==0.42.1",
    "efficientnet-pytorch==0.7.1", "egnn-pytorch==0.2.8", "einops==0.8.2", "einops-exts==0.0.4", "einx==0.4.3",
    "entmax==1.3",
    "flamingo-pytorch==0.1.2", "frozendict==2.5.1", "hyper-connections==0.4.11", "importlib-metadata==10.2.0",
    "kornia==0.9.0", "kornia-rs==0.2.0", "lambda-networks==0.4.0", "linformer==0.2.3", "litgpt==0.5.13",
    "local-attention==1.11.2", "loguru==0.7.3", "memory-efficient-attention-pytorch==0.1.6", "monai==1.6.1",
    "ncps==1.0.1", "nystrom-attention==0.0.14", "peft==0.21.2", "perceiver-pytorch==0.11.0",
    "pytorch-metric-learning==2.9.0", "pytorch-msssim==1.0.0", "rotary-embedding-torch==0.9.1",
    "rtdl-revisiting-models==0.0.2", "delu==0.0.26", "slot-attention==1.5.2", "snac==1.2.1", "soft-moe-pytorch==0.1.9",
    "torch-einops-utils==0.2.0", "torch-geometric==2.8.1", "torchdiffeq==0.2.5", "vector-quantize-pytorch==1.32.0",
    "x-transformers==2.31.10", "xxhash==4.1.0", "zipp==4.1.2", "zuko==1.6.0",
)  # fmt: skip

Batch = Mapping[str, Any]
PIPELINE: Mapping[str, Any] = {"pp": 2, "microbatches": 2}
REPLICAS: Mapping[str, Any] = {"dp": 2}  # of a model that is one layer
WHOLE_BATCH: Mapping[str, Any] = {"pp": 2}  # statistics of all samples, or one graph
ALONE: Mapping[str, Any] = {}  # both
WORDS, WIDTH = 32, 32


class Trained(nn.Module):
    """A model and what its loss is of its outputs and the batch."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: Any) -> Tensor:
        return self.loss(self.model, **batch)


@dataclass(frozen=True)
class LibraryModel:
    """build: the model, without a loss. setting: as of benchmarks.judge. still: batch norms keep their statistics."""

    build: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    entries: Callable[[], Batch]
    setting: Mapping[str, Any] = field(default_factory=lambda: PIPELINE)
    still: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        model = Trained(self.build(), self.loss).train()
        for module in model.modules() if self.still else ():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return model

    def batch(self, seed: int, samples: int, tokens: int) -> Batch:
        """The one batch that there is."""
        torch.manual_seed(1)
        return self.entries()


def of(module: str, name: str) -> Any:
    """A class of a library, which is imported where it is used."""
    return getattr(importlib.import_module(module), name)


def numbers(*shape: int, **more: tuple[int, ...]) -> Callable[[], Batch]:
    """An entry x of random numbers, and others by name."""
    return lambda: {"x": torch.randn(shape)} | {name: torch.randn(size) for name, size in more.items()}


def words(length: int = 8) -> Batch:
    return {"x": torch.randint(WORDS, (4, length))}


def squares(output: Any) -> Tensor:
    """A mean of squares of each output, none of which is 0 by symmetry."""
    outputs = output if isinstance(output, (tuple, list)) else [output]
    return torch.stack([(one - 0.3).square().mean() for one in outputs if isinstance(one, Tensor)]).sum()


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return squares(model(x))


def next_word(model: nn.Module, x: Tensor) -> Tensor:
    return F.cross_entropy(model(x)[:, :-1].flatten(0, 1), x[:, 1:].flatten())


# --- Diffusion -------------------------------------------------------------------------------------------------------


def sample_of(model: nn.Module, x: Tensor, **more: Any) -> Tensor:
    """Of the first output of diffusers' models, which take x by several names."""
    return squares(model(x, return_dict=False, **more)[0])


def conditioned(model: nn.Module, x: Tensor, text: Tensor) -> Tensor:
    times = 1000 * torch.sigmoid(x.flatten(1).mean(1))
    return sample_of(model, x, timestep=times, encoder_hidden_states=text)


def unet_2d() -> nn.Module:
    return of("diffusers", "UNet2DModel")(
        sample_size=8, in_channels=3, out_channels=3, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )  # fmt: skip


def unet_2d_condition() -> nn.Module:
    return of("diffusers", "UNet2DConditionModel")(
        sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, cross_attention_dim=16,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


def dit() -> nn.Module:
    return of("diffusers", "DiTTransformer2DModel")(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        num_embeds_ada_norm=10,
    )  # fmt: skip


def classes(model: nn.Module, x: Tensor) -> Tensor:
    labels = torch.arange(len(x), device=x.device) % 3
    model.eval()  # no label is dropped
    return sample_of(model, x, timestep=labels.float(), class_labels=labels)


def sd3() -> nn.Module:
    return of("diffusers", "SD3Transformer2DModel")(
        sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=WIDTH, pooled_projection_dim=WIDTH,
        pos_embed_max_size=8,
    )  # fmt: skip


def pooled(model: nn.Module, x: Tensor, text: Tensor) -> Tensor:
    times = 1000 * torch.sigmoid(x.flatten(1).mean(1))
    return sample_of(model, x, encoder_hidden_states=text, pooled_projections=text.mean(1), timestep=times)


def pixart() -> nn.Module:
    return of("diffusers", "PixArtTransformer2DModel")(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, num_layers=2, sample_size=8,
        cross_attention_dim=WIDTH, caption_channels=WIDTH, use_additional_conditions=False,
    )  # fmt: skip


def flux() -> nn.Module:
    return of("diffusers", "FluxTransformer2DModel")(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=WIDTH, axes_dims_rope=(4, 4, 8), guidance_embeds=False,
    )  # fmt: skip


def of_flux(model: nn.Module, x: Tensor, text: Tensor) -> Tensor:
    places = [torch.zeros(part.shape[1], 3, device=x.device) for part in (x, text)]
    return sample_of(
        model, x, encoder_hidden_states=text, pooled_projections=text.mean(1), timestep=x.mean((1, 2)).sigmoid(),
        img_ids=places[0], txt_ids=places[1],
    )  # fmt: skip


def autoencoder(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: of("diffusers", name)(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4, **options,
    )  # fmt: skip


DIFFUSION = {
    "diffusers: UNet2DModel": LibraryModel(
        unet_2d, lambda model, x: sample_of(model, x, timestep=5), numbers(4, 3, 8, 8)
    ),
    "diffusers: UNet2DConditionModel": LibraryModel(
        unet_2d_condition, conditioned, numbers(4, 4, 8, 8, text=(4, 5, 16))
    ),
    "diffusers: DiTTransformer2DModel": LibraryModel(dit, classes, numbers(4, 4, 8, 8), WHOLE_BATCH),
    "diffusers: SD3Transformer2DModel": LibraryModel(sd3, pooled, numbers(4, 4, 8, 8, text=(4, 5, WIDTH))),
    "diffusers: PixArtTransformer2DModel": LibraryModel(pixart, conditioned, numbers(4, 4, 8, 8, text=(4, 5, WIDTH))),
    "diffusers: FluxTransformer2DModel": LibraryModel(flux, of_flux, numbers(4, 6, 4, text=(4, 5, WIDTH))),
    "diffusers: AutoencoderKL": LibraryModel(
        autoencoder("AutoencoderKL", sample_size=8), sample_of, numbers(4, 3, 8, 8)
    ),
    "diffusers: VQModel": LibraryModel(autoencoder("VQModel", num_vq_embeddings=16), sample_of, numbers(4, 3, 8, 8)),
}


# --- Language models, adapters and attentions ------------------------------------------------------------------------


def decoder(**options: Any) -> nn.Module:
    return of("x_transformers", "TransformerWrapper")(
        num_tokens=WORDS, max_seq_len=16,
        attn_layers=of("x_transformers", "Decoder")(dim=WIDTH, depth=2, heads=2, attn_dim_head=16, **options),
    )  # fmt: skip


def image_encoder() -> nn.Module:
    return of("x_transformers", "ViTransformerWrapper")(
        image_size=8, patch_size=4, num_classes=5,
        attn_layers=of("x_transformers", "Encoder")(dim=WIDTH, depth=2, heads=2, attn_dim_head=16),
    )  # fmt: skip


def translator() -> nn.Module:
    sizes = {"num_tokens": WORDS, "depth": 2, "heads": 2, "max_seq_len": 16}
    options = {f"{side}_{name}": value for side in ("enc", "dec") for name, value in sizes.items()}
    return of("x_transformers", "XTransformer")(dim=WIDTH, **options)


def litgpt(**options: Any) -> Callable[[], nn.Module]:
    sizes = {
        "block_size": 16,
        "vocab_size": WORDS,
        "padded_vocab_size": WORDS,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": WIDTH,
    }
    return lambda: of("litgpt.model", "GPT")(of("litgpt.config", "Config")(**sizes, **options))


def adapted(config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        base = LlamaForCausalLM(LlamaConfig(
            hidden_size=WIDTH, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=WORDS,
        ))  # fmt: skip
        return of("peft", "get_peft_model")(base, of("peft", config)(task_type="CAUSAL_LM", **options))

    return build


def labelled(model: nn.Module, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss


def wrapped(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    """A class of a library with these arguments."""
    return lambda: of(module, name)(*arguments, **options)


def between(module: str, name: str, *arguments: Any, **options: Any) -> Callable[[], nn.Module]:
    """The same between two linear layers, as such a layer is trained."""
    return lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), of(module, name)(*arguments, **options), nn.Linear(WIDTH, 8))


class Resampled(nn.Module):
    """Flamingo's resampler of images, and a layer that looks at what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.resampler = of("flamingo_pytorch", "PerceiverResampler")(
            dim=WIDTH, depth=1, dim_head=16, heads=2, num_latents=4
        )
        self.cross = of("flamingo_pytorch", "GatedCrossAttentionBlock")(dim=WIDTH, dim_head=16, heads=2)

    def forward(self, text: Tensor, media: Tensor) -> Tensor:
        return self.cross(text + 1, self.resampler(media), media_locations=(text[..., 0] * 0 == 0))


class Sparse(nn.Module):
    """Attention whose weights entmax makes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weigh, self.qkv = of("entmax", name), nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.weigh(q @ k.transpose(1, 2) / WIDTH**0.5, dim=-1) @ v


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = of("rotary_embedding_torch", "RotaryEmbedding")(dim=8)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = map(self.rotary.rotate_queries_or_keys, (q, k))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


LANGUAGE = {
    "x-transformers: Decoder": LibraryModel(
        lambda: decoder(rotary_pos_emb=True, ff_swish=True, ff_glu=True), next_word, words
    ),
    "x-transformers: Decoder, ALiBi": LibraryModel(lambda: decoder(alibi_pos_bias=True), next_word, words),
    "x-transformers: ViTransformerWrapper": LibraryModel(image_encoder, plain, numbers(4, 3, 8, 8)),
    "x-transformers: XTransformer": LibraryModel(translator, lambda model, x: model(x, x.flip(1)), words),
    "litgpt: GPT, as Pythia": LibraryModel(litgpt(), next_word, words),
    "litgpt: GPT, as Llama": LibraryModel(
        litgpt(
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=64,
            bias=False,
            n_query_groups=1,
            rotary_percentage=1.0,
            parallel_residual=False,
        ),
        next_word,
        words,
    ),
    "peft: LoRA": LibraryModel(adapted("LoraConfig", r=4, init_lora_weights=False), labelled, words),
    "peft: DoRA": LibraryModel(adapted("LoraConfig", r=4, use_dora=True, init_lora_weights=False), labelled, words),
    "peft: IA3": LibraryModel(adapted("IA3Config"), labelled, words),
    "peft: prefix tuning": LibraryModel(adapted("PrefixTuningConfig", num_virtual_tokens=3), labelled, words),
    "local-attention: LocalTransformer": LibraryModel(
        wrapped(
            "local_attention.transformer",
            "LocalTransformer",
            num_tokens=WORDS,
            dim=WIDTH,
            depth=2,
            max_seq_len=16,
            local_attn_window_size=4,
            heads=2,
            dim_head=16,
            causal=True,
        ),
        next_word,
        words,
    ),
    "linformer: LinformerLM": LibraryModel(
        wrapped("linformer", "LinformerLM", num_tokens=WORDS, dim=WIDTH, seq_len=8, depth=2, k=4, heads=2),
        next_word,
        words,
    ),
    "nystrom-attention: Nystromformer": LibraryModel(
        wrapped("nystrom_attention", "Nystromformer", dim=WIDTH, dim_head=16, heads=2, depth=2, num_landmarks=4),
        plain,
        numbers(4, 8, WIDTH),
        WHOLE_BATCH,
    ),
    "memory-efficient-attention-pytorch: Attention": LibraryModel(
        between(
            "memory_efficient_attention_pytorch",
            "Attention",
            dim=WIDTH,
            dim_head=16,
            heads=2,
            causal=True,
            memory_efficient=True,
            q_bucket_size=4,
            k_bucket_size=4,
        ),
        plain,
        numbers(4, 8, WIDTH),
        REPLICAS,
    ),
    "rotary-embedding-torch: attention": LibraryModel(Rotated, plain, numbers(4, 8, WIDTH), REPLICAS),
    "entmax: sparsemax": LibraryModel(lambda: Sparse("sparsemax"), plain, numbers(4, 8, WIDTH), REPLICAS),
    "entmax: entmax15": LibraryModel(lambda: Sparse("entmax15"), plain, numbers(4, 8, WIDTH), REPLICAS),
    "soft-moe-pytorch: SoftMoE": LibraryModel(
        between("soft_moe_pytorch", "SoftMoE", dim=WIDTH, seq_len=8, num_experts=2), plain, numbers(4, 8, WIDTH)
    ),
    "flamingo-pytorch: PerceiverResampler": LibraryModel(
        Resampled,
        lambda model, x, media: squares(model(x, media)),
        numbers(4, 6, WIDTH, media=(4, 1, 9, WIDTH)),
        REPLICAS,
    ),
}


# --- Images, volumes, sounds -----------------------------------------------------------------------------------------


class Pictured(nn.Module):
    """A convolution in front of a layer for images, and one behind it."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.layer, self.last = (
            nn.Conv2d(3, WIDTH, 3, padding=1),
            layer(),
            nn.Conv2d(WIDTH, 3, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x)))


def alike(model: nn.Module, x: Tensor) -> Tensor:
    """1 less the structural similarity of a picture and what is made of it."""
    return 1 - of("pytorch_msssim", "ssim")(model(x).sigmoid(), x.sigmoid(), data_range=1.0, win_size=5)


def metric(model: nn.Module, x: Tensor) -> Tensor:
    labels = torch.tensor([0, 0, 1, 1], device=x.device)
    return of("pytorch_metric_learning.losses", "NTXentLoss")()(model(x), labels)


SIGHT = {
    "monai: BasicUNet": LibraryModel(
        wrapped("monai.networks.nets", "BasicUNet", spatial_dims=2, features=(4, 4, 8, 8, 8, 4)),
        plain,
        numbers(4, 1, 32, 32),
    ),
    "monai: ViT": LibraryModel(
        wrapped(
            "monai.networks.nets",
            "ViT",
            in_channels=1,
            img_size=(8, 8, 8),
            patch_size=(4, 4, 4),
            hidden_size=WIDTH,
            mlp_dim=64,
            num_layers=2,
            num_heads=2,
        ),
        lambda model, x: squares(model(x)[0]),
        numbers(4, 1, 8, 8, 8),
    ),
    "monai: UNETR": LibraryModel(
        wrapped(
            "monai.networks.nets",
            "UNETR",
            in_channels=1,
            out_channels=2,
            img_size=(16, 16),
            feature_size=4,
            hidden_size=24,
            mlp_dim=32,
            num_heads=2,
            spatial_dims=2,
        ),
        plain,
        numbers(4, 1, 16, 16),
    ),
    "monai: SwinUNETR": LibraryModel(
        wrapped(
            "monai.networks.nets",
            "SwinUNETR",
            in_channels=1,
            out_channels=2,
            feature_size=12,
            spatial_dims=2,
            depths=(1, 1, 1, 1),
            num_heads=(1, 1, 1, 1),
        ),
        plain,
        numbers(4, 1, 64, 64),
        REPLICAS,
    ),
    "kornia: VisionTransformer": LibraryModel(
        wrapped(
            "kornia.models.vit",
            "VisionTransformer",
            image_size=8,
            patch_size=4,
            embed_dim=WIDTH,
            depth=2,
            num_heads=2,
            dropout_rate=0.0,
            dropout_attn=0.0,
        ),
        plain,
        numbers(4, 3, 8, 8),
    ),
    "efficientnet-pytorch: EfficientNet": LibraryModel(
        lambda: of("efficientnet_pytorch", "EfficientNet").from_name(
            "efficientnet-b0", num_classes=3, drop_connect_rate=0.0, dropout_rate=0.0, image_size=32
        ),
        plain,
        numbers(4, 3, 32, 32),
        WHOLE_BATCH,
    ),
    "lambda-networks: LambdaLayer": LibraryModel(
        lambda: Pictured(
            wrapped("lambda_networks", "LambdaLayer", dim=WIDTH, dim_out=WIDTH, n=8, dim_k=8, heads=2, dim_u=1)
        ),
        plain,
        numbers(4, 3, 8, 8),
        REPLICAS,
        still=True,
    ),
    "axial-attention: AxialAttention": LibraryModel(
        lambda: Pictured(
            wrapped("axial_attention", "AxialAttention", dim=WIDTH, dim_index=1, heads=2, num_dimensions=2)
        ),
        plain,
        numbers(4, 3, 8, 8),
        REPLICAS,
    ),
    "slot-attention: SlotAttention": LibraryModel(
        between("slot_attention", "SlotAttention", num_slots=3, dim=WIDTH, iters=2),
        plain,
        numbers(4, 8, WIDTH),
        REPLICAS,
    ),
    "pytorch-msssim: ssim": LibraryModel(lambda: Pictured(nn.ReLU), alike, numbers(4, 3, 8, 8), REPLICAS),
    "pytorch-metric-learning: NTXentLoss": LibraryModel(lambda: nn.Linear(WIDTH, 8), metric, numbers(4, WIDTH), ALONE),
    "perceiver-pytorch: Perceiver": LibraryModel(
        wrapped(
            "perceiver_pytorch",
            "Perceiver",
            input_channels=3,
            input_axis=2,
            num_freq_bands=2,
            max_freq=4.0,
            depth=2,
            num_latents=4,
            latent_dim=WIDTH,
            cross_dim_head=16,
            latent_heads=2,
            latent_dim_head=16,
            num_classes=5,
        ),
        plain,
        numbers(4, 6, 6, 3),
    ),
    "perceiver-pytorch: PerceiverIO": LibraryModel(
        wrapped(
            "perceiver_pytorch",
            "PerceiverIO",
            dim=WIDTH,
            queries_dim=WIDTH,
            logits_dim=5,
            depth=2,
            num_latents=4,
            latent_dim=WIDTH,
            cross_dim_head=16,
            latent_heads=2,
            latent_dim_head=16,
        ),
        lambda model, x: squares(model(x, queries=x[:, :3])),
        numbers(4, 8, WIDTH),
    ),
    "conformer: Conformer": LibraryModel(
        wrapped("conformer", "Conformer", WIDTH, depth=2, dim_head=16, heads=2, ff_mult=2, conv_kernel_size=5),
        plain,
        numbers(4, 8, WIDTH),
        still=True,
    ),
    "snac: SNAC": LibraryModel(
        wrapped(
            "snac",
            "SNAC",
            encoder_dim=4,
            encoder_rates=[2, 2],
            decoder_dim=16,
            decoder_rates=[2, 2],
            attn_window_size=None,
            codebook_size=8,
            codebook_dim=4,
            vq_strides=[2, 1],
            noise=False,
        ),
        lambda model, x: squares(model(x)[0]),
        numbers(4, 1, 64),
    ),
    "vector-quantize-pytorch: VectorQuantize": LibraryModel(
        between(
            "vector_quantize_pytorch",
            "VectorQuantize",
            dim=WIDTH,
            codebook_size=8,
            learnable_codebook=True,
            ema_update=False,
        ),
        lambda model, x: squares(model[2](model[1](model[0](x))[0])),
        numbers(4, 8, WIDTH),
        REPLICAS,
    ),
    "vector-quantize-pytorch: FSQ": LibraryModel(
        between("vector_quantize_pytorch", "FSQ", levels=[4, 3, 3], dim=WIDTH),
        lambda model, x: squares(model[2](model[1](model[0](x))[0])),
        numbers(4, 8, WIDTH),
        REPLICAS,
    ),
}


# --- Tables, graphs, series, densities -------------------------------------------------------------------------------


class Graph(nn.Module):
    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.layers = of("torch_geometric.nn", name)(8, 16, num_layers=3, out_channels=4, **options)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.layers(x, edges)


def graph() -> Batch:
    return {"x": torch.randn(10, 8), "edges": torch.randint(10, (2, 30))}


def on_graph(model: nn.Module, x: Tensor, edges: Tensor) -> Tensor:
    return squares(model(x, edges))


class Flowing(nn.Module):
    """What a layer does to a state in time, by a solver of fixed steps."""

    def __init__(self) -> None:
        super().__init__()
        self.field, self.last = (
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)),
            nn.Linear(WIDTH, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        times = torch.linspace(0, 1, 4, device=x.device)
        return self.last(of("torchdiffeq", "odeint")(lambda _, state: self.field(state), x, times, method="rk4")[-1])


def likelihood(model: nn.Module, x: Tensor, context: Tensor) -> Tensor:
    return -model(context).log_prob(x).mean()


NUMBERS = {
    "rtdl-revisiting-models: FTTransformer": LibraryModel(
        wrapped(
            "rtdl_revisiting_models",
            "FTTransformer",
            n_cont_features=6,
            cat_cardinalities=[],
            d_out=2,
            n_blocks=2,
            d_block=16,
            attention_n_heads=2,
            attention_dropout=0.0,
            ffn_d_hidden_multiplier=2.0,
            ffn_dropout=0.0,
            residual_dropout=0.0,
        ),
        lambda model, x: squares(model(x, None)),
        numbers(4, 6),
    ),
    "rtdl-revisiting-models: ResNet": LibraryModel(
        wrapped(
            "rtdl_revisiting_models",
            "ResNet",
            d_in=6,
            d_out=2,
            n_blocks=2,
            d_block=16,
            d_hidden=32,
            d_hidden_multiplier=None,
            dropout1=0.0,
            dropout2=0.0,
        ),
        plain,
        numbers(4, 6),
        still=True,
    ),
    "torch-geometric: GCN": LibraryModel(lambda: Graph("GCN"), on_graph, graph, WHOLE_BATCH),
    "torch-geometric: GAT": LibraryModel(lambda: Graph("GAT", heads=2), on_graph, graph, WHOLE_BATCH),
    "torch-geometric: GraphSAGE": LibraryModel(lambda: Graph("GraphSAGE"), on_graph, graph, WHOLE_BATCH),
    "egnn-pytorch: EGNN_Network": LibraryModel(
        wrapped("egnn_pytorch", "EGNN_Network", dim=WIDTH, depth=2, num_tokens=WORDS),
        lambda model, x, places: squares(model(x, places)),
        lambda: {"x": torch.randint(WORDS, (4, 6)), "places": torch.randn(4, 6, 3)},
    ),
    "torchdiffeq: odeint, rk4": LibraryModel(Flowing, plain, numbers(4, WIDTH), REPLICAS),
    "ncps: CfC": LibraryModel(
        wrapped("ncps.torch", "CfC", 8, 16), lambda model, x: squares(model(x)[0]), numbers(4, 5, 8), REPLICAS
    ),
    "ncps: LTC": LibraryModel(
        wrapped("ncps.torch", "LTC", 8, 16), lambda model, x: squares(model(x)[0]), numbers(4, 3, 8), REPLICAS
    ),
    "zuko: NSF": LibraryModel(
        wrapped("zuko.flows", "NSF", 3, 5, transforms=2, hidden_features=(16, 16)),
        likelihood,
        numbers(4, 3, context=(4, 5)),
    ),
    "zuko: MAF": LibraryModel(
        wrapped("zuko.flows", "MAF", 3, 5, transforms=2, hidden_features=(16, 16)),
        likelihood,
        numbers(4, 3, context=(4, 5)),
    ),
}


MODELS: dict[str, LibraryModel] = DIFFUSION | LANGUAGE | SIGHT | NUMBERS
