"""Attention on GPUs: chooses configurations, allocates results and launches the Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import triton
from csc.kernels.mask import Mask, TileLists, Tiles
from csc.kernels.triton_kernels import dkv_kernel, dq_kernel, forward_kernel, rows_kernel
from triton.tools.tensor_descriptor import TensorDescriptor

from csc import devices

# --- Block sizes, warps and stages of the attention kernels, by architecture, head dim and dtype ---------------------
#
# Terms
#   architecture   sm_80, sm_86 (consumer cards too), sm_90, sm_100, gfx942; cpu: Triton's interpreter
#   tile           (queries, keys) of the tile lists; every block of queries or keys divides it
#   descriptors    K, V, Q and dO are loaded through tensor descriptors (TMA) rather than pointers
#
# Chosen from what compilers report: no spills with Triton 3.6 to 3.9, shared memory within the device's limit, as few
# registers as the blocks allow (docs/attention-kernels.md has the table; tests/aot keeps it true). Those of sm_90 for
# 64 and 128 go by times on an H100 with Triton 3.6; some spill a little: docs/attention-kernels.md has the times.


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


# --- Attention on GPUs: chooses configurations, allocates results and launches the Triton kernels --------------------
#
# q: [B, H, Tq, D]; k, v: [B, Hkv, Tk, D], H a multiple of Hkv, last stride 1; float16, bfloat16 or true float32. mask
# and tiles both None: every query sees every key. Their batch may be 1 for any B. out and the gradients are allocated
# as (B, T, H, D), transposed. lse: float32 [B, H, Tq], natural logarithm; -inf, and out 0, for a query that sees
# nothing.
#
# Nothing here waits for the device. `choice` replaces the configurations of the tables, for tuning.


LOG2E = 1.4426950408889634
CACHED_BYTES = 24 << 20  # of the L2 cache, for what the running programs read again and again
STATISTICS_BLOCK = 128


def blocks(head_dim: int, dtype: torch.dtype, device: torch.device | str) -> tuple[int, int]:
    """(queries, keys) of a tile. One granularity serves forward and backward. ValueError for what has no kernel."""
    return choose(architecture(torch.device(device)), head_dim, dtype).tile


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None,
    scale: float, softcap: float, choice: HeadDimConfigs | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out [B, H, Tq, D], lse float32 [B, H, Tq]). ValueError for sizes, types or scales that have no kernel."""
    choice = choice or choose(architecture(q.device), q.shape[-1], q.dtype)
    _check(q, k, v, mask, tiles, scale, choice)
    batch, heads, queries, _ = q.shape
    keys = k.shape[2]
    out = _empty_like(q)
    lse = q.new_empty((batch, heads, queries), dtype=torch.float32)
    if not out.numel() or not keys:
        return out.zero_(), lse.fill_(-float("inf"))
    rules, kinds = (0, False) if mask is None else (mask.rules, mask.kinds is not None)
    config = choice.of_forward(rules, kinds, softcap > 0)
    q, k, v = (_aligned(x, config) for x in (q, k, v))
    with _on(q):
        grid = (batch * heads * _programs(queries, choice.tile[0], config.block_q),)
        forward_kernel[grid](
            _rows(q, config, config.block_q), _rows(k, config, config.block_k), _rows(v, config, config.block_k),
            out, lse, *_lists(tiles.of_queries if tiles else None, q), *_rules(mask, q),
            *_strides(q, k, v, out), *_factors(scale, softcap), heads, batch * k.shape[1], _section(k), _batches(mask),
            queries, keys, _entries(tiles.of_queries if tiles else None),
            **_constants(q, k, mask, softcap, choice, config),
        )  # fmt: skip
    return out, lse


def backward(
    d_out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    mask: Mask | None, tiles: Tiles | None, scale: float, softcap: float, choice: HeadDimConfigs | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv), of the shapes of q, k, v.

    With the out and lse of more keys than k holds (those of other ranks too) it gives this part's exact share.
    """
    choice = choice or choose(architecture(q.device), q.shape[-1], q.dtype)
    _check(q, k, v, mask, tiles, scale, choice)
    batch, heads, queries, head_dim = q.shape
    keys, kv_heads, device = k.shape[2], k.shape[1], q.device
    dq, dk, dv = _empty_like(q), _empty_like(k), _empty_like(v)
    if not q.numel() or not k.numel():
        return dq.zero_(), dk.zero_(), dv.zero_()
    d_out = d_out.to(q.dtype)
    out, d_out = (x if x.stride(-1) == 1 else x.contiguous() for x in (out, d_out))
    lse = lse.contiguous()
    padded_rows = -(-queries // choice.tile[0]) * choice.tile[0]
    levels, deltas = torch.empty((2, batch, heads, padded_rows), dtype=torch.float32, device=device)
    of_queries, of_keys = (tiles.of_queries, tiles.of_keys) if tiles else (None, None)
    with _on(q):
        rows_kernel[(-(-padded_rows // STATISTICS_BLOCK), batch * heads)](
            out, d_out, lse, levels, deltas, *_strides(out, d_out), heads, queries, padded_rows,
            BLOCK=STATISTICS_BLOCK, DIM=head_dim, DIM_PADDED=padded(head_dim), num_warps=8, enable_fp_fusion=True,
        )  # fmt: skip

        config = choice.dq
        q, k, v, d_out = (_aligned(x, config) for x in (q, k, v, d_out))
        grid = (batch * heads * _programs(queries, choice.tile[0], config.block_q),)
        dq_kernel[grid](
            _rows(q, config, config.block_q), _rows(k, config, config.block_k), _rows(v, config, config.block_k),
            _rows(d_out, config, config.block_q), dq, levels, deltas, *_lists(of_queries, q), *_rules(mask, q),
            *_strides(q, k, v, d_out, dq), *_factors(scale, softcap), scale, heads, batch * kv_heads, _section(k),
            _batches(mask), queries, keys, _entries(of_queries), **_constants(q, k, mask, softcap, choice, config),
        )  # fmt: skip

        for which, config in choice.dkv_capped if softcap else choice.dkv:
            q, k, v, d_out = (_aligned(x, config) for x in (q, k, v, d_out))
            grid = (batch * kv_heads * _programs(keys, choice.tile[1], config.block_k),)
            dkv_kernel[grid](
                _rows(q, config, config.block_q), _rows(k, config, config.block_k), _rows(v, config, config.block_k),
                _rows(d_out, config, config.block_q), dk, dv, levels, deltas, *_lists(of_keys, q), *_rules(mask, q),
                *_strides(q, k, v, d_out, dk, dv), *_factors(scale, softcap), scale, heads, batch * kv_heads,
                _section(q, heads // kv_heads), _batches(mask), queries, keys, _entries(of_keys),
                DK="k" in which, DV="v" in which,
                STAGES=config.stages,
                **_constants(q, k, mask, softcap, choice, config),
            )  # fmt: skip
    return dq, dk, dv


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask | None, tiles: Tiles | None, scale: float,
    choice: HeadDimConfigs,
) -> None:  # fmt: skip
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v are {q.dtype}, {k.dtype} and {v.dtype}, not of one type")
    if any(x.stride(-1) != 1 and x.shape[-1] > 1 for x in (q, k, v)):
        raise ValueError("the head dim of q, k and v must be dense: their last stride is 1")
    if scale <= 0:
        raise ValueError(f"attention's scale is {scale}; the kernels take positive ones")
    if (mask is None) != (tiles is None):
        raise ValueError("a mask comes with its tiles, and tiles with their mask")
    if mask is not None and tiles is not None:
        if (mask.queries, mask.keys) != (q.shape[2], k.shape[2]) or mask.batch not in (1, q.shape[0]):
            sizes = f"{mask.batch} x {mask.queries} x {mask.keys}"
            raise ValueError(f"a mask of {sizes} does not fit q {list(q.shape)} and k {list(k.shape)}")
        if (tiles.block_q, tiles.block_k) != choice.tile:
            raise ValueError(f"tiles of {tiles.block_q} x {tiles.block_k}; this device's kernels walk {choice.tile}")


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    batch, heads, tokens, width = x.shape
    return x.new_empty((batch, tokens, heads, width)).transpose(1, 2)


def _programs(length: int, tile: int, block: int) -> int:
    """Blocks of a length, those of its last tile that are empty included."""
    return -(-length // tile) * (tile // block)


def _section(x: torch.Tensor, group: int = 1) -> int:
    """Heads of K and V whose programs run together, so that what they read, two tensors like x, stays cached."""
    each = 2 * group * x.shape[2] * x.shape[3] * x.element_size()
    return max(1, min(CACHED_BYTES // each, x.shape[0] * x.shape[1] // group))


def _lists(lists: TileLists | None, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(order, index, counts)."""
    if lists is None:
        return q, q, q  # not read
    return lists.order, lists.index.contiguous(), lists.counts.contiguous()


def _rules(mask: Mask | None, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ranges, admits, kinds), dense."""
    if mask is None:
        return q, q, q  # not read
    ranges = mask.ranges.contiguous()
    if mask.admits is None or mask.kinds is None:
        return ranges, ranges, ranges
    return ranges, mask.admits.contiguous(), mask.kinds.contiguous()


def _entries(lists: TileLists | None) -> int:
    return 0 if lists is None else lists.index.shape[-1]


def _batches(mask: Mask | None) -> int:
    return 1 if mask is None else mask.batch


def _strides(*tensors: torch.Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _factors(scale: float, softcap: float) -> tuple[float, float]:
    """(inner, factor), see csc.kernels.triton_kernels."""
    return (scale / softcap, softcap * LOG2E) if softcap else (1.0, scale * LOG2E)


def _constants(
    q: torch.Tensor, k: torch.Tensor, mask: Mask | None, softcap: float, choice: HeadDimConfigs, config: Config
) -> dict[str, Any]:
    return {
        "GROUP": q.shape[1] // k.shape[1],
        "RULES": 0 if mask is None else mask.rules,
        "KINDS": mask is not None and mask.kinds is not None,
        "CAP": softcap > 0,
        "TILE_Q": choice.tile[0],
        "TILE_K": choice.tile[1],
        "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k,
        "DIM": q.shape[3],
        "DIM_PADDED": padded(q.shape[3]),
        "DESCRIPTORS": config.descriptors,
        "num_warps": config.warps,
        "num_stages": config.stages,
        "enable_fp_fusion": True,  # the scaling of scores and the subtraction of their maximum are one instruction
    }


def _aligned(x: torch.Tensor, config: Config) -> torch.Tensor:
    """x, copied where a tensor descriptor could not describe it: odd strides, or a dimension that was expanded."""
    if x.stride(-1) != 1:
        return x.contiguous()
    if not config.descriptors:
        return x
    strides = [stride * x.element_size() for size, stride in zip(x.shape[:3], x.stride()) if size > 1]
    fits = x.data_ptr() % DESCRIBED_BYTES == 0 and all(
        stride > 0 and stride % DESCRIBED_BYTES == 0 for stride in strides
    )
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _rows(x: torch.Tensor, config: Config, block: int) -> Any:
    """What `load_rows` takes: the tensor, or a descriptor of blocks of its rows."""
    if not config.descriptors:
        return x
    # The stride of a dimension of size 1 means nothing, but has to look like one.
    strides: Sequence[int] = [stride if size > 1 else x.shape[3] for size, stride in zip(x.shape[:3], x.stride())]
    return TensorDescriptor(x, list(x.shape), [*strides, 1], [1, 1, block, padded(x.shape[3])])


def _on(x: torch.Tensor) -> AbstractContextManager[Any]:
    return devices.at(x.device)
