"""Towers that are no Hugging Face encoders: a user's own, those of timm, open_clip, torchvision and torchaudio."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.composition import ComposedModel, Tower
from csc.errors import InputError
from csc.reports.verification import verify
from tests.models.composed import LANGUAGE_MODELS


class Trunk(nn.Module):
    """Patches of 8 x 8, a class token before them, and an end that a language model has no use for."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 24, 8, 8), nn.Parameter(torch.randn(1, 1, 24))
        self.mix, self.classes = nn.Linear(24, 24), nn.Linear(24, 5)

    def tokens(self, pictures: torch.Tensor) -> torch.Tensor:
        found = self.patches(pictures).flatten(2).transpose(1, 2)
        return self.mix(torch.cat([self.token.expand(found.shape[0], -1, -1), found], 1)).tanh()

    def forward(self, pictures: torch.Tensor) -> Any:
        return {"classes": self.classes(self.tokens(pictures)[:, 0])}


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()


def of_convolution(module: Any, pictures: torch.Tensor) -> torch.Tensor:
    features: torch.Tensor = module.trunk.patches(pictures)
    return features


def composed(tower: Any, projector: Any = "mlp", **options: Any) -> ComposedModel:
    torch.manual_seed(0)
    return csc.compose(
        encoders={"vision": tower}, projectors={"vision": projector}, language_model=LANGUAGE_MODELS["llama"](),
        placeholders={"vision": 99}, **options,
    )  # fmt: skip


def batch(model: ComposedModel, shape: tuple[int, ...], samples: int = 4) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 90, (samples, model.tokens("vision", shape) + 6), generator=generator)
    ids[:, 2 : 2 + model.tokens("vision", shape)] = 99
    items = torch.randn(samples, *shape, generator=generator)
    return {"input_ids": ids, "labels": ids.masked_fill(ids == 99, -100), model.inputs["vision"]: items}


TOWERS: dict[str, tuple[dict[str, Any], str, int]] = {
    "a path": ({"features": "trunk.tokens", "prefix": 1}, "pixel-shuffle-mlp", 4),
    "a function": ({"features": of_convolution, "entry": "pictures"}, "mlp", 16),
}


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.long_cases("a path")
def test_a_module_of_the_users_own_is_a_tower(name: str) -> None:
    options, projector, count = TOWERS[name]
    torch.manual_seed(1)
    model = composed(Tower(Outer(), item=(3, 32, 32), **options), projector)
    assert model.tokens("vision", (3, 32, 32)) == count and model.inputs["vision"] == options.get(
        "entry", "pixel_values"
    )
    given = batch(model, (3, 32, 32))
    compiled = csc.compile(model, example=given, mesh="pp=2", microbatches=2, freeze=["language_model"], cache=False)
    found = verify(compiled)
    assert found.params_missing == () and max(found.loss_rel, found.grad_rel_max) < 1e-5


def test_a_tower_is_saved_and_read_again(tmp_path: Path) -> None:
    made = lambda: Tower(Outer(), item=(3, 32, 32), features="trunk.tokens", prefix=1)  # noqa: E731
    model = composed(made())
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"vision_encoder was a module of your own, a Outer.*modules="):
        ComposedModel.from_pretrained(tmp_path)
    again = ComposedModel.from_pretrained(tmp_path, modules={"vision_encoder": made()})
    given = batch(model, (3, 32, 32))
    assert torch.equal(model(**given).loss, again(**given).loss)


REFUSED: dict[str, tuple[Any, str, str]] = {
    "no tower": (Trunk(), "no output of a Trunk", r"Tower\(module, item="),
    "no tokens": (Tower(Trunk(), (3, 32, 32)), "a dict, which could not stand", "features="),
    "no such method": (Tower(Trunk(), (3, 32, 32), "trunk.nothing"), "has no attribute 'trunk'", "features="),
    "another item": (
        Tower(Trunk(), (4, 32, 32), "tokens"),
        r"an item of shape \[4, 32, 32\]: RuntimeError",
        "features=",
    ),
    "another width": (Tower(Trunk(), (3, 32, 32), "tokens", width=7), "width is 7", "leave width out"),
    "no item": (Tower(Trunk(), ()), r"item is \(\)", r"\(3, 224, 224\)"),
    "all prefix": (Tower(Trunk(), (3, 32, 32), "tokens", prefix=17), "prefix is 17, and it makes 17", "count"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_tower_is_refused_with_a_way_out(name: str) -> None:
    tower, what, remedy = REFUSED[name]
    with pytest.raises(InputError, match=f"'vision'.*{what}.*{remedy}"):
        composed(tower)
    assert not isinstance(tower, Tower) or tower.module.training, "as it was"


def library(name: str) -> Any:
    """Skips where it is not installed, or not for this torch."""
    try:
        return importlib.import_module(name)
    except Exception as error:
        pytest.skip(f"{name}: {error}")


def of_timm() -> Any:
    return library("timm").create_model("vit_tiny_patch16_224", img_size=32, depth=2)


def of_transformers() -> Any:
    library("timm")
    from transformers import TimmWrapperConfig, TimmWrapperModel

    size = {"img_size": 32, "depth": 2}
    return TimmWrapperModel(TimmWrapperConfig(architecture="vit_tiny_patch16_224", do_pooling=False, model_args=size))


def of_open_clip() -> Any:
    model = library("open_clip.transformer").VisionTransformer(
        image_size=32, patch_size=8, width=24, layers=2, heads=2, mlp_ratio=2.0, output_dim=16, output_tokens=True
    )
    return Tower(model, (3, 32, 32), lambda module, items: module(items)[1])


def of_torchvision() -> Any:
    network = library("torchvision").models.resnet18(norm_layer=lambda width: nn.GroupNorm(4, width))
    return Tower(nn.Sequential(*list(network.children())[:-2]), (3, 64, 64))


def of_torchaudio() -> Any:
    model = library("torchaudio").models.Conformer(input_dim=16, num_heads=2, ffn_dim=32, num_layers=1,
                                                   depthwise_conv_kernel_size=3)  # fmt: skip

    def features(module: Any, items: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((items.shape[0],), items.shape[2])
        result: torch.Tensor = module(items.transpose(1, 2), lengths)[0]
        return result

    return Tower(model, (16, 20), features, entry="mel")


@pytest.mark.long
@pytest.mark.parametrize("make", [of_timm, of_transformers, of_open_clip, of_torchvision, of_torchaudio])
def test_towers_of_other_libraries(make: Any) -> None:
    torch.manual_seed(0)
    model = composed(make())
    given = batch(model, model.modalities["vision"].kind.tower.item)
    compiled = csc.compile(model.eval(), example=given, microbatches=2, cache=False)
    found = verify(compiled)
    assert found.params_missing == () and max(found.loss_rel, found.grad_rel_max) < 1e-4
