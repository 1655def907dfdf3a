"""Block sizes, warps and stages of the attention kernels, by architecture, head dim and dtype.

Terms
  architecture   sm_80, sm_86 (consumer cards too), sm_90, sm_100, gfx942; cpu: Triton's interpreter
  tile           (queries, keys) of the tile lists; every block of queries or keys divides it
  descriptors    K, V, Q and dO are loaded through tensor descriptors (TMA) rather than pointers

    architecture(device) -> str
    choose(architecture, head_dim, dtype) -> Choice(tile, forward, dq, dkv, ...)

Chosen from what compilers report without a GPU: no spills, shared memory within the device's limit, as few registers as
the blocks allow (docs/attention-kernels.md has the table; tests/aot keeps it true).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

MOST_HEAD_DIM = 256
DESCRIBED_BYTES = 16  # what the strides of a tensor descriptor are multiples of
KERNELS = ("forward", "dq", "dkv", "dkv_capped")


@dataclass(frozen=True)
class Config:
    """Of one kernel: its own blocks, and how Triton builds it."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False


@dataclass(frozen=True)
class Choice:
    """Of all kernels for one head dim.

    dkv_capped: dK/dV with a soft cap, which keeps one block more. passes: the gradients that each run of the dK/dV
    kernel makes; two runs where one has no registers for both sums.
    """

    tile: tuple[int, int]
    forward: Config
    dq: Config
    dkv: Config
    dkv_capped: Config
    passes: tuple[str, ...] = ("kv",)


def _choice(
    forward: Config, dq: Config, dkv: Config, capped: Config | None = None, passes: tuple[str, ...] = ("kv",)
) -> Choice:
    return Choice((128, 128), forward, dq, dkv, capped or dkv, passes)


def _alike(config: Config) -> tuple[Config, Config, Config, Config]:
    """One configuration for all four kernels."""
    return config, config, config, config


# (architecture, padded head dim): forward, dQ and dK/dV for 16-bit types (True: descriptors). Tiles are 128 x 128.
_SPLIT = ("v", "k")
_HALF: dict[tuple[str, int], Choice] = {
    ("sm_90", 64): _choice(Config(128, 128, 8, 3, True), Config(128, 64, 8, 3, True), Config(64, 128, 8, 3, True)),
    ("sm_90", 128): _choice(
        Config(128, 128, 8, 2, True), Config(128, 64, 8, 2, True), Config(64, 128, 8, 2, True),
        capped=Config(32, 128, 8, 2, True),
    ),
    ("sm_90", 256): _choice(
        Config(128, 64, 8, 2, True), Config(128, 32, 8, 2, True), Config(32, 128, 8, 2, True), passes=_SPLIT
    ),
    ("sm_100", 64): _choice(Config(128, 64, 8, 3, True), Config(128, 64, 8, 3, True), Config(64, 128, 8, 3, True)),
    ("sm_100", 128): _choice(Config(128, 64, 8, 2, True), Config(128, 64, 8, 2, True), Config(64, 128, 8, 2, True)),
    ("sm_100", 256): _choice(
        Config(128, 32, 8, 2, True), Config(128, 32, 8, 2, True), Config(32, 128, 8, 2, True), passes=_SPLIT
    ),
    ("sm_80", 64): _choice(Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(32, 128, 8, 2)),
    ("sm_80", 128): _choice(Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    ("sm_80", 256): _choice(Config(64, 32, 8, 2), Config(64, 32, 8, 2), Config(32, 64, 8, 2), passes=_SPLIT),
    ("sm_86", 64): _choice(Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(32, 128, 8, 2)),
    ("sm_86", 128): _choice(Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 64, 8, 2)),
    ("sm_86", 256): _choice(Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(32, 64, 8, 1), passes=_SPLIT),
    ("gfx942", 64): _choice(Config(128, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
    ("gfx942", 128): _choice(Config(128, 64, 4, 1), Config(64, 32, 4, 1), Config(32, 64, 4, 1)),
    ("gfx942", 256): _choice(Config(64, 32, 4, 1), Config(64, 32, 4, 1), Config(16, 64, 4, 1), passes=_SPLIT),
}  # fmt: skip

# True float32 has no tensor cores on NVIDIA, and its dots keep whole rows of operands in registers: small blocks.
_SINGLE: dict[int, Choice] = {
    64: Choice((64, 64), *_alike(Config(32, 32, 8, 1))),
    128: Choice((64, 64), Config(32, 16, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    256: Choice((64, 64), *_alike(Config(16, 16, 8, 1)), _SPLIT),
}

# Few and small: the interpreter pays by the block. Parts, steps and descriptors are all in it.
_INTERPRETED = Choice(
    (32, 32), Config(32, 16, 4, 1, True), Config(16, 32, 4, 1), Config(16, 32, 4, 1, True), Config(32, 16, 4, 1)
)
_INTERPRETED_WIDE = replace(_INTERPRETED, forward=Config(16, 32, 4, 1), dq=Config(32, 16, 4, 1, True), passes=_SPLIT)


def padded(head_dim: int) -> int:
    """The power of two that a kernel computes with. ValueError outside 1 .. 256."""
    if not 1 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"attention kernels take head dims of 1 to {MOST_HEAD_DIM}, not {head_dim}")
    return max(16, 1 << (head_dim - 1).bit_length())


def architecture(device: torch.device) -> str:
    """The row of the tables. ValueError for GPUs older than Ampere, which the kernels are not built for."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return "gfx942"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise ValueError(f"attention kernels need compute capability 8.0 or later, this GPU has {major}.{minor}")
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get((major, minor), "sm_86")


def choose(architecture: str, head_dim: int, dtype: torch.dtype) -> Choice:
    """The configurations for heads of this width. ValueError for a dtype or head dim that has no kernel."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"attention kernels take float16, bfloat16 and float32, not {dtype}")
    width = padded(head_dim)
    if architecture == "cpu":
        return _pointers(_INTERPRETED if width <= 64 else _INTERPRETED_WIDE, head_dim, dtype)
    if dtype == torch.float32:
        return _SINGLE[max(64, width)]
    return _pointers(_HALF[architecture, max(64, width)], head_dim, dtype)


def _pointers(found: Choice, head_dim: int, dtype: torch.dtype) -> Choice:
    """Without descriptors where rows have a length that they cannot describe."""
    if head_dim * dtype.itemsize % DESCRIBED_BYTES == 0:
        return found
    kernels = {name: replace(getattr(found, name), descriptors=False) for name in KERNELS}
    return replace(found, **kernels)
