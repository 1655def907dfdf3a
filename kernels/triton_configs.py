"""Block sizes, warps and stages of the attention kernels, by architecture, head dim and dtype.

Terms
  architecture   sm_80, sm_86 (consumer cards too), sm_90, sm_100, gfx942; cpu: Triton's interpreter
  tile           (queries, keys) of the tile lists; every block of queries or keys divides it
  descriptors    K, V, Q and dO are loaded through tensor descriptors (TMA) rather than pointers

    architecture(device) -> str
    choose(architecture, head_dim, dtype) -> HeadDimConfigs

Chosen from what compilers report: no spills with Triton 3.6 to 3.9, shared memory within the device's limit, as few
registers as the blocks allow (docs/attention-kernels.md has the table; tests/aot keeps it true). Those of sm_90 for 64
and 128 go by times on an H100 with Triton 3.6; some spill a little: docs/measurements.md has what was tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
import triton

from csc import devices

MOST_HEAD_DIM = 256
DESCRIBED_BYTES = 16  # what the strides of a tensor descriptor are multiples of


@dataclass(frozen=True)
class Config:
    """Of one kernel: its own blocks, and how Triton builds it."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    descriptors: bool = False


Passes = tuple[tuple[str, Config], ...]


@dataclass(frozen=True)
class HeadDimConfigs:
    """Of all kernels for one head dim.

    dkv: runs of the dK/dV kernel: (the gradients that it makes, of "k" and "v"; its configuration). There are two runs
    where one has no registers for both sums. dkv_capped: the same with a soft cap, which keeps one more block.
    plain: of the forward where what is evaluated of a mask is one rule at most, without kinds and soft cap; None: as
    others.
    """

    tile: tuple[int, int]
    forward: Config
    dq: Config
    dkv: Passes
    dkv_capped: Passes
    plain: Config | None = None

    def of_forward(self, rules: int, kinds: bool, softcap: bool) -> Config:
        """What the forward is launched with. rules: of the mask; 0 without one."""
        return self.forward if self.plain is None or rules > 1 or kinds or softcap else self.plain


def _choice(
    forward: Config, dq: Config, *dkv: Config, capped: Config | None = None, plain: Config | None = None
) -> HeadDimConfigs:
    """Tiles of 128 x 128. dkv: one configuration for dK and dV, or those of dV and of dK."""
    passes = tuple(zip(("kv",) if len(dkv) == 1 else ("v", "k"), dkv))
    return HeadDimConfigs((128, 128), forward, dq, passes, passes if capped is None else (("kv", capped),), plain)


# (architecture, padded head dim): forward, dQ and dK/dV for 16-bit types (True: descriptors).
_HALF: dict[tuple[str, int], HeadDimConfigs] = {
    ("sm_90", 64): _choice(
        Config(128, 128, 8, 3, True), Config(64, 64, 4, 2, True), Config(64, 64, 4, 3, True),
        plain=Config(64, 64, 4, 2, True),
    ),
    ("sm_90", 128): _choice(
        Config(128, 128, 8, 2, True), Config(64, 64, 4, 2, True), Config(64, 64, 4, 2, True),
        capped=Config(32, 128, 8, 3, True), plain=Config(128, 64, 4, 2, True),
    ),
    ("sm_90", 256): _choice(
        Config(128, 64, 8, 2, True), Config(128, 32, 8, 3, True),
        Config(32, 128, 8, 3, True), Config(16, 128, 8, 3, True),
    ),
    ("sm_100", 64): _choice(Config(128, 64, 4, 3, True), Config(128, 64, 8, 2, True), Config(64, 128, 8, 3, True)),
    ("sm_100", 128): _choice(Config(128, 64, 8, 2, True), Config(128, 32, 8, 2, True), Config(64, 128, 8, 2, True)),
    ("sm_100", 256): _choice(
        Config(128, 32, 8, 2, True), Config(128, 32, 8, 2, True),
        Config(32, 128, 8, 2, True), Config(32, 128, 8, 2, True),
    ),
    ("sm_80", 64): _choice(
        Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(32, 128, 8, 2), capped=Config(32, 64, 8, 2),
    ),
    ("sm_80", 128): _choice(
        Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 64, 8, 2), capped=Config(32, 64, 8, 2),
    ),
    ("sm_80", 256): _choice(Config(64, 32, 8, 2), Config(64, 32, 8, 2), Config(32, 64, 8, 2), Config(32, 64, 8, 2)),
    ("sm_86", 64): _choice(
        Config(128, 64, 8, 3), Config(128, 64, 8, 2), Config(32, 128, 8, 2), capped=Config(32, 64, 8, 2),
    ),
    ("sm_86", 128): _choice(
        Config(128, 32, 8, 3), Config(64, 64, 8, 2), Config(64, 64, 8, 2), capped=Config(32, 64, 8, 2),
    ),
    ("sm_86", 256): _choice(Config(64, 32, 8, 2), Config(64, 32, 8, 1), Config(32, 64, 8, 1), Config(32, 64, 8, 1)),
    ("gfx942", 64): _choice(Config(128, 64, 4, 1), Config(64, 64, 4, 1), Config(64, 64, 4, 1)),
    ("gfx942", 128): _choice(Config(128, 64, 4, 1), Config(64, 32, 4, 1), Config(32, 64, 4, 1)),
    ("gfx942", 256): _choice(Config(64, 32, 4, 1), Config(64, 32, 4, 1), Config(16, 64, 4, 1), Config(16, 64, 4, 1)),
}  # fmt: skip

# Triton 3.6 to 3.8, and the assemblers that come with them, need more registers and spill with the blocks above. Rows
# of their own, since with 3.9 these would only cost: half the work for a load, or a stage less.
_BEFORE_3_9: dict[tuple[str, int], HeadDimConfigs] = {
    ("sm_90", 256): replace(
        _HALF["sm_90", 256],
        forward=Config(128, 32, 8, 3, True),
        dq=Config(64, 32, 8, 3, True),
    ),
    ("sm_100", 64): replace(_HALF["sm_100", 64], forward=Config(128, 64, 4, 2, True)),
    ("sm_86", 64): replace(_HALF["sm_86", 64], dkv=_HALF["sm_86", 64].dkv_capped),
    ("sm_86", 256): replace(_HALF["sm_86", 256], forward=Config(64, 16, 8, 2)),
}


def _small(block: int, forward: Config, passes: tuple[str, ...] = ("kv",)) -> HeadDimConfigs:
    """float32, tiles of 64 x 64."""
    other = Config(block, block, 8, 1)
    dkv = tuple((which, other) for which in passes)
    return HeadDimConfigs((64, 64), forward, other, dkv, dkv)


# True float32 has no tensor cores on NVIDIA, and its dots keep whole rows of operands in registers: small blocks.
_SINGLE: dict[int, HeadDimConfigs] = {
    64: _small(32, Config(32, 32, 8, 1)),
    128: _small(32, Config(32, 16, 8, 1)),
    256: _small(16, Config(16, 16, 8, 1), ("v", "k")),
}

# Few and small: the interpreter pays by the block. Parts, steps, descriptors, a forward of its own for plain masks and
# two runs for dK and dV are all in it.
_TALL, _WIDE = Config(32, 16, 4, 1), Config(16, 32, 4, 1)
_TALL_TMA, _WIDE_TMA = Config(32, 16, 4, 1, True), Config(16, 32, 4, 1, True)
_INTERPRETED = HeadDimConfigs((32, 32), _TALL_TMA, _WIDE, (("kv", _WIDE_TMA),), (("kv", _TALL),), _WIDE)
_INTERPRETED_WIDE = HeadDimConfigs((32, 32), _WIDE, _TALL_TMA, (("v", _WIDE), ("k", _TALL_TMA)), (("kv", _WIDE),))


def padded(head_dim: int) -> int:
    """The power of two that a kernel computes with. ValueError outside 1 .. 256."""
    if not 1 <= head_dim <= MOST_HEAD_DIM:
        raise ValueError(f"attention kernels take head dims of 1 to {MOST_HEAD_DIM}, not {head_dim}")
    return max(16, 1 << (head_dim - 1).bit_length())


@cache
def architecture(device: torch.device) -> str:
    """The row of the tables. ValueError for GPUs older than Ampere, which the kernels are not built for."""
    if device.type == "cpu":
        return "cpu"
    if torch.version.hip:
        return "gfx942"
    major, minor = devices.capability(device) or (0, 0)
    if major < 8:
        raise ValueError(f"attention kernels need compute capability 8.0 or later, this GPU has {major}.{minor}")
    return {(8, 0): "sm_80", (9, 0): "sm_90", (10, 0): "sm_100", (10, 3): "sm_100"}.get((major, minor), "sm_86")


@cache
def choose(architecture: str, head_dim: int, dtype: torch.dtype) -> HeadDimConfigs:
    """The configurations for heads of this width. ValueError for a dtype or head dim that has no kernel."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"attention kernels take float16, bfloat16 and float32, not {dtype}")
    width = padded(head_dim)
    if architecture == "cpu":
        return _pointers(_INTERPRETED if width <= 64 else _INTERPRETED_WIDE, head_dim, dtype)
    if dtype == torch.float32:
        return _SINGLE[max(64, width)]
    older = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9)
    rows = _HALF | _BEFORE_3_9 if older else _HALF
    return _pointers(rows[architecture, max(64, width)], head_dim, dtype)


def _pointers(found: HeadDimConfigs, head_dim: int, dtype: torch.dtype) -> HeadDimConfigs:
    """Without descriptors where rows have a length that they cannot describe."""
    if head_dim * dtype.itemsize % DESCRIBED_BYTES == 0:
        return found

    def without(config: Config) -> Config:
        return replace(config, descriptors=False)

    dkv, capped = (tuple((which, without(each)) for which, each in some) for some in (found.dkv, found.dkv_capped))
    plain = None if found.plain is None else without(found.plain)
    return HeadDimConfigs(found.tile, without(found.forward), without(found.dq), dkv, capped, plain)
