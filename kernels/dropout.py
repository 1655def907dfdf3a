"""Random numbers that depend on a seed and a place in the model, not on what was drawn before.

seed: three int64 on the CPU, for one region: its seed in the microbatch, its seed in the step, and which sample of the
step is the microbatch's first. index: which draw of the region. A draw takes its numbers from a generator of its own,
seeded with a hash of the microbatch's seed and the index, so that it is the same however often and in whichever order
draws are made. samples: how many have rows along `dim`, `inner` one behind the other (0: all of its own); each then
takes its numbers by its place in the step, and has the same in whichever microbatch it is. 0: there are none. What is
drawn once for all samples of a step is given `seed[1:]`, in which the step's seed stands where the microbatch's does.
The backward of dropout is dropout of the gradient: nothing is saved for it. A negative seed leaves nothing to chance,
so that a step can be compared with another program's: every uniform number is 0.25, every normal one 0.5.

tokens: for a value that has some of `whole` tokens along `dim`: which; it gets their part of the whole's mask. So do
`entries` of `total` along another dimension (of heads, of hidden features), where ranks divide both. Numbers on a GPU
differ from those on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

WORD = (1 << 64) - 1
CONSTANT_UNIFORM, CONSTANT_NORMAL = 0.25, 0.5  # what is drawn if nothing is left to chance


def mixed(*words: int) -> int:
    """A hash of integers, 0 to 2^63 - 1: splitmix64's finaliser (Steele, Lea, Flood, 2014), word after word."""
    state = 0
    for word in words:
        state = (state + word + 0x9E3779B97F4A7C15) & WORD
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
        state ^= state >> 31
    return state >> 1


def leaves_nothing_to_chance(seed: torch.Tensor) -> bool:
    return int(seed[0]) < 0


def _generator(seed: torch.Tensor, index: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(mixed(int(seed[0]), index))


def _filled(
    x: torch.Tensor, fill: Callable[..., object], constant: float, seed: torch.Tensor, index: int, samples: int,
    dim: int, inner: int,
) -> torch.Tensor:  # fmt: skip
    if leaves_nothing_to_chance(seed):
        return x.fill_(constant)
    generator = _generator(seed, index, x.device)
    if not samples:
        fill(x, generator=generator)
        return x
    _, of_step, first = seed.tolist()
    apart = x.unflatten(dim, (-1, samples, inner or x.shape[dim] // samples))
    for number, rows in enumerate(apart.unbind(dim + 1), start=first):
        own = rows.contiguous()  # numbers depend on how what is filled lies
        fill(own, generator=generator.manual_seed(mixed(of_step, index, number)))
        rows.copy_(own)
    return x


def kept(sizes: Sequence[int], p: float, seed: torch.Tensor, index: int, device: torch.device) -> torch.Tensor:
    """Which elements a dropout with probability p leaves."""
    keep = torch.empty(list(sizes), dtype=torch.bool, device=device)
    if leaves_nothing_to_chance(seed):
        return keep.fill_(1 - p > CONSTANT_UNIFORM)
    return keep.bernoulli_(1 - p, generator=_generator(seed, index, device))


@torch.library.custom_op("csc::dropout", mutates_args=())
def _dropout(
    x: torch.Tensor,
    p: float,
    seed: torch.Tensor,
    index: int,
    tokens: torch.Tensor | None = None,
    dim: int = 0,
    whole: int = 0,
    entries: torch.Tensor | None = None,
    along: int = 0,
    total: int = 0,
) -> torch.Tensor:
    sizes = list(x.shape)
    for place, size, indices in ((dim, whole, tokens), (along, total, entries)):
        if indices is not None:
            sizes[place] = size
    keep = kept(sizes, p, seed, index, x.device)
    for place, indices in ((dim, tokens), (along, entries)):
        if indices is not None:
            keep = keep.index_select(place, indices)
    return torch.mul(x, keep).mul_(1 / (1 - p) if p < 1 else 0.0)


@_dropout.register_fake
def _(x: Any, *rest: Any, **named: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.p, seed, ctx.index, tokens, ctx.dim, ctx.whole, entries, ctx.along, ctx.total = inputs
    ctx.save_for_backward(seed, tokens, entries)


def _gradient(ctx: Any, d_out: torch.Tensor) -> tuple[Any, ...]:
    seed, tokens, entries = ctx.saved_tensors
    rest = (
        (tokens, ctx.dim, ctx.whole) if entries is None else (tokens, ctx.dim, ctx.whole, entries, ctx.along, ctx.total)
    )
    d_x = torch.ops.csc.dropout.default(d_out, ctx.p, seed, ctx.index, *rest)
    return (d_x, *(None for _ in range(9)))


_dropout.register_autograd(_gradient, setup_context=_remember)


@torch.library.custom_op("csc::uniform", mutates_args=())
def _uniform(
    seed: torch.Tensor, index: int, size: Sequence[int], dtype: torch.dtype, device: torch.device, samples: int = 0,
    dim: int = 0, inner: int = 0,
) -> torch.Tensor:  # fmt: skip
    drawn = torch.empty(size, dtype=dtype, device=device)
    return _filled(drawn, torch.Tensor.uniform_, CONSTANT_UNIFORM, seed, index, samples, dim, inner)


@torch.library.custom_op("csc::normal", mutates_args=())
def _normal(
    seed: torch.Tensor, index: int, size: Sequence[int], dtype: torch.dtype, device: torch.device, samples: int = 0,
    dim: int = 0, inner: int = 0,
) -> torch.Tensor:  # fmt: skip
    drawn = torch.empty(size, dtype=dtype, device=device)
    return _filled(drawn, torch.Tensor.normal_, CONSTANT_NORMAL, seed, index, samples, dim, inner)


@_uniform.register_fake
@_normal.register_fake
def _(
    seed: Any, index: int, size: Any, dtype: torch.dtype, device: torch.device, samples: int = 0, dim: int = 0,
    inner: int = 0,
) -> torch.Tensor:  # fmt: skip
    return torch.empty(size, dtype=dtype, device=device)


DROPOUT = torch.ops.csc.dropout.default
UNIFORM = torch.ops.csc.uniform.default
NORMAL = torch.ops.csc.normal.default
