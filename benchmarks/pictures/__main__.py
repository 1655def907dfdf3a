"""The pictures of the README and of the documentation, made anew.

    python -m benchmarks.pictures [--quick] [--output docs/images]

plan.svg              a step of csc's plan above one of the baseline of `csc simulate`, memory accounted alike; one
                      stage on each rank, so that boxes are wide enough to be told apart
mask-*.svg            `csc mask` of two masks; they need matplotlib
--quick               plan.svg of a model of 0.1 million parameters, in seconds
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn

import csc
from benchmarks.mllm.configurations import CONFIGURATIONS
from benchmarks.mllm.meta_init import meta_init
from benchmarks.mllm.models import batch, build
from csc.commands.mask_command import Dispatcher
from csc.commands.mask_command import mask as draw_mask
from csc.reports.forecast import Forecast, forecast
from csc.simulation.page import svg

MICROBATCHES = 24
RANKS, HARDWARE = 8, "h100"
MASKS = {"mask-generation.svg": ("generation:8192,seed=1", None), "mask-ranks.svg": ("packed:16384,seed=2", 4)}


def large() -> tuple[csc.CompiledModel, str]:
    """Gemma 2 27B behind a frozen InternViT 6B, without weights. Every layer runs its forward again in its backward."""
    configuration = CONFIGURATIONS["VLM-M"]
    with meta_init(torch.bfloat16):
        model = build(configuration, {name: part.layers for name, part in configuration.components.items()})
    said = {"loss_weight": "tokens"}  # as a batch of one sample that nothing checks asks
    return compiled(
        model, [batch(configuration)], ["vision"], RANKS, **said
    ), "Gemma 2 27B behind a frozen InternViT 6B"


def small() -> tuple[csc.CompiledModel, str]:
    """Four layers behind a frozen one."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.vision(x)
            for layer in self.layers:
                x = layer(x)
            return x.square().mean()

    return compiled(Small(), [{"x": torch.zeros(4, 64)}], ["vision"], 2), "four layers behind a frozen encoder"


def compiled(model: nn.Module, example: list, frozen: list[str], ranks: int, **options: Any) -> csc.CompiledModel:
    return csc.compile(
        model, mesh=csc.Mesh(pp=ranks), example=example, freeze=frozen, microbatches=MICROBATCHES, hardware=HARDWARE,
        recompute="full", chunks=1, check=False, cache=False, **options,
    )  # fmt: skip


def plan_picture(found: Forecast, title: str, ranks: int) -> str:
    """Both timelines under the limit that the device has."""
    assert found.baseline is not None
    named = f"{title}: {ranks} {HARDWARE.upper()}, {MICROBATCHES} microbatches"
    return svg([found.plan, found.baseline], named, found.bound, found.memory)


def main() -> None:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--quick", action="store_true")
    reader.add_argument("--output", type=Path, default=Path("docs/images"))
    given = reader.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    made, title = small() if given.quick else large()
    found = forecast(made)
    (given.output / "plan.svg").write_text(plan_picture(found, title, made.options.mesh.pp))
    assert found.baseline is not None
    for one in (found.plan, found.baseline):
        print(f"{one.name}: {one.makespan:.4g} s, fullest rank {max(one.peak_memory) / 2**30:.3g} GiB")
    print(f"limit {(found.memory or 0) / 2**30:.3g} GiB, lower bound {found.bound:.4g} s")
    for name, (spec, ranks) in {} if given.quick else MASKS.items():
        draw_mask(spec, 128, ranks, Dispatcher.balanced, 50.0, given.output / name, None, False, False)


if __name__ == "__main__":
    main()
