"""Random spreads of sequences with random masks, and ranks that run in one process without a compiled program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import ceil
from types import SimpleNamespace
from typing import Any, cast

import torch
from csc.kernels.mask import Mask
from hypothesis import strategies as st

from csc.ir.mesh import Mesh
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.made_once import Constants
from csc.runtime.rank import Rank
from csc.runtime.specs import ContextMaskSpec, ContextSpec
from csc.runtime.transport import InProcess, Work
from tests.kernels.masks import masks


def spec_of(
    tokens: int, ranks: int, block: int, count: int = 1, block_seconds: float = 1e-6, tile_seconds: float = 1e-6
) -> ContextSpec:
    """Sizes as pass `context` makes them, for `count` masks."""
    shard = ceil(ceil(tokens / block) / ranks) * block
    return ContextSpec(
        "language_model", ranks, tokens, block, shard, tile_seconds, block_seconds, (ContextMaskSpec(2),) * count
    )


def square(mask: Mask, tokens: int) -> Mask:
    """The first `tokens` queries and keys."""
    admits = None if mask.admits is None else mask.admits[:, :, :tokens].contiguous()
    kinds = None if mask.kinds is None else mask.kinds[:, :tokens].contiguous()
    return Mask(mask.ranges[:, :, :tokens].clamp(max=tokens).contiguous(), admits, kinds, tokens)


@st.composite
def spreads(draw: st.DrawFn, most: int = 48) -> tuple[ContextSpec, list[Mask]]:
    """One or two masks over one sequence, for two to five ranks; communication may be dear or cheap."""
    drawn = [draw(masks(most=most)) for _ in range(draw(st.integers(1, 2)))]
    tokens = min(min(mask.queries, mask.keys) for mask in drawn)
    tokens = max(tokens, draw(st.integers(2, most)))
    drawn = [_longer(mask, tokens) for mask in drawn]
    ranks = draw(st.integers(2, min(5, tokens)))
    block = draw(st.integers(1, max(1, tokens // ranks)).filter(lambda size: -(-tokens // size) >= ranks))
    seconds = draw(st.sampled_from([(1e-9, 1e-6), (1e-4, 1e-6), (1.0, 1.0)]))  # with the last, backwards are split
    return spec_of(tokens, ranks, block, len(drawn), *seconds), drawn


def _longer(mask: Mask, tokens: int) -> Mask:
    """Repeat queries and keys up to `tokens`, then cut."""
    queries, keys = (torch.arange(tokens) % count for count in (mask.queries, mask.keys))
    admits = None if mask.admits is None else mask.admits[:, :, queries]
    kinds = None if mask.kinds is None else mask.kinds[:, keys]
    ranges = (mask.ranges[:, :, queries].long() * tokens // mask.keys).to(torch.int32)
    return square(Mask(ranges, admits, kinds, tokens), tokens)


def ranks_of(spec: ContextSpec, groups: int = 1) -> tuple[list[Rank], InProcess]:
    """The ranks of context-parallel groups in this process, as far as attention needs them."""
    stage = SimpleNamespace(contexts=(spec.component,))
    manifest = SimpleNamespace(mesh=Mesh(cp=groups * spec.ranks), contexts=(spec,), stages_of=lambda position: (stage,))
    program = cast(LoadedProgram, SimpleNamespace(manifest=manifest))
    transport = InProcess(program)

    def visibility(batch: Mapping[str, torch.Tensor], constants: object) -> list[tuple[torch.Tensor | None, ...]]:
        return [(batch.get("ranges"), None, None)]

    cpu = torch.device("cpu")
    made = {spec.component: visibility}
    ranks = [Rank(program, r, {}, transport.endpoint(r), Constants({}), cpu, made) for r in transport.ranks]
    return ranks, transport


def on_ranks(transport: InProcess, work: Callable[[int], Any]) -> list[Any]:
    """work(rank) of all ranks, which take turns as in a step; what they return, by rank."""

    def run(rank: int) -> Work[Any]:
        yield from ()
        return work(rank)

    transport.begin_step()
    with torch.no_grad():
        found = transport.run({rank: run(rank) for rank in transport.ranks})
    return [found[rank] for rank in transport.ranks]
