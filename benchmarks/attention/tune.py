"""Times configurations of the kernels on the GPU at hand: what csc.kernels.triton_configs is to be set to.

    tune(head_dim, tokens, progress) -> list[Tried]      causal, bfloat16, every kernel alone

A configuration that cannot be built or launched (registers, shared memory) is reported with its error, not hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from csc.kernels import triton_launch
from csc.kernels.tiles import tiles
from csc.kernels.triton_configs import Config, HeadDimConfigs, architecture, choose

from benchmarks.attention.masks import mask
from benchmarks.attention.timing import seconds_on_gpu

HEADS, KV_HEADS = 32, 8


@dataclass(frozen=True)
class Tried:
    kernel: str  # forward, dq or dkv
    config: Config
    default: bool
    seconds: float | None  # dq and dkv: of the whole backward with the others at their default
    error: str | None


def tune(head_dim: int, tokens: int, progress: Callable[[str, int, int], None]) -> list[Tried]:
    default = choose(architecture(torch.device("cuda")), head_dim, torch.bfloat16)
    given = mask("causal", tokens).to("cuda")
    lists = tiles(given, *default.tile)

    def heads(count: int) -> torch.Tensor:
        return torch.randn(1, tokens, count, head_dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2)

    q, k, v, d_out = heads(HEADS), heads(KV_HEADS), heads(KV_HEADS), heads(HEADS)
    rest = (given, lists, head_dim**-0.5, 0.0)
    out, lse = triton_launch.forward(q, k, v, *rest)

    def forward(choice: HeadDimConfigs) -> object:
        return triton_launch.forward(q, k, v, *rest, choice)

    def backward(choice: HeadDimConfigs) -> object:
        return triton_launch.backward(d_out, q, k, v, out, lse, *rest, choice)

    found: list[Tried] = []
    listed = list(_candidates(default))
    for kernel, config, choice in listed:
        seconds, error = None, None
        try:
            seconds = seconds_on_gpu(partial(forward if kernel == "forward" else backward, choice), 0.2)
        except Exception as problem:  # compilers and launchers raise errors of many kinds
            error = f"{type(problem).__name__}: {problem}".splitlines()[0][:200]
        found.append(Tried(kernel, config, choice == default, seconds, error))
        progress("tuning", len(found), len(listed))
    return found


def _candidates(default: HeadDimConfigs) -> Iterator[tuple[str, Config, HeadDimConfigs]]:
    """Blocks x warps x stages around the default, by kernel."""
    for kernel, sizes in (
        ("forward", ((128, 128), (128, 64), (128, 32), (64, 64))),
        ("dq", ((128, 128), (128, 64), (64, 128), (64, 64), (128, 32))),
        ("dkv", ((64, 128), (32, 128), (128, 128), (64, 64), (128, 64))),
    ):
        for (block_q, block_k), warps, stages in product(sizes, (4, 8), (2, 3)):
            config = Config(block_q, block_k, warps, stages, default.forward.descriptors)
            setting = (("kv", config),) if kernel == "dkv" else config
            yield kernel, config, replace(default, **{kernel: setting})
