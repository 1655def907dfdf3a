"""What a program says of tokens that are spread: their sizes, and what the masks of their attention are made of.

Terms: *shard*: the slots of one rank, as many on every rank. *block*: tokens that stay together.

    masks = SpreadMasks(axis)
    masks.number(packed)                                 of an attention's mask, which is read by another layer now
    masks.context(program, component, ...) -> Context
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Context, ContextMask, Program


@dataclass(frozen=True)
class TokenSizes:
    """tokens of the whole sequence; block: tokens that stay together; shard: slots of one rank."""

    tokens: int
    block: int
    shard: int


@dataclass(frozen=True)
class _MaskParts:
    """The nodes that a packed mask was made of; all None if every query sees every key."""

    ranges: fx.Node | None
    admits: fx.Node | None
    kinds: fx.Node | None
    layers: int


class SpreadMasks:
    """Of one component. axis: of the ranks that share its tokens."""

    def __init__(self, axis: str) -> None:
        self._axis = axis
        self._parts: dict[fx.Node | None, _MaskParts] = {}

    def number(self, packed: fx.Node | None) -> int:
        """Which mask a layer has: it counts as one more that reads it."""
        if packed not in self._parts:
            made: Any = packed.args[:3] if packed is not None else (None, None, None)
            self._parts[packed] = _MaskParts(made[0], made[1], made[2], 0)
        self._parts[packed] = replace(self._parts[packed], layers=self._parts[packed].layers + 1)
        return list(self._parts).index(packed)

    def context(
        self, program: Program, component: str, ranks: int, sizes: TokenSizes, attention: fx.Node,
        mixed: Callable[[fx.Node, str], InputError],
    ) -> Context:  # fmt: skip
        """How the component's tokens are spread; its layers' attention is like the given one of the program's graph.
        mixed: the error for a call that combines tokens.
        """
        q, k = (argument.meta["val"] for argument in attention.args[:2])  # type: ignore[union-attr]
        samples, heads, _, width = q.shape
        parts = self._parts.values()
        return Context(
            component=component,
            ranks=ranks,
            tokens=sizes.tokens,
            block=sizes.block,
            shard=sizes.shard,
            graph=self._graph(program, mixed),
            masks=tuple(ContextMask(p.ranges is not None, p.kinds is not None, p.layers) for p in parts),
            tile_flops=4 * samples * heads * width * sizes.block**2,
            block_bytes=2 * samples * k.shape[1] * width * sizes.block * k.element_size(),
            axis=self._axis,
        )

    def _graph(self, program: Program, mixed: Callable[[fx.Node, str], InputError]) -> fx.Graph:
        """From the batch to ranges, admits and kinds of each mask, for the whole sequence."""
        parts = [node for p in self._parts.values() for node in (p.ranges, p.admits, p.kinds) if node is not None]
        needed = g.ancestors(parts)
        graph = fx.Graph()
        mapping: dict[fx.Node, Any] = {}
        for node in g.subgraph_nodes(program.graph, needed):
            if node.op == "placeholder" and node.meta["role"][0] == "parameter":
                reader = next(user for user in node.users if user in needed)
                raise mixed(reader, f"decides with {node.meta['role'][1]} what attention sees")
            if node.op == "placeholder":
                mapping[node] = g.add_placeholder(graph, node.name, node.meta["val"], node.meta["role"])
            else:
                g.copy_node(graph, node, mapping)
        graph.output(tuple(mapping[node] for node in parts))
        return graph
