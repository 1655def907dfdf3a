"""Pass `context`: the tokens of a sequence spread over context-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from csc.passes.encoder_context import component_of, named, sizes_for, spread_encoder
from csc.passes.loss import labels_of
from csc.passes.shard_edges import PartsEdge
from csc.passes.sharding import Spreading
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.analysis.operators.table import LABELS
from csc.analysis.tokens import counting
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Options, Program


def context(program: Program, options: Options) -> Program:
    """Let each cp rank compute the layers of the language model for its own tokens; those of encoders too, where
    options.context says over how many ranks.

    Requires  pass `attention`.
    Ensures   with cp = 1 nothing changes. Else the layers whose attention runs along the labels' sequence, and all that
              follows them, work on a shard of the tokens; what enters them is computed for the whole sequence and
              dispatched: embeddings where encoders and text have merged, position tables, labels after their shift.
              A spread encoder works on shards of its own tokens and is made whole again where its values leave.
              Attention sees the keys of all ranks; no other operation on shards mixes tokens. A loss that is more
              than a mean over labels is summed over a rank's own tokens, and divided by what the microbatch has.
    Before    %x : f32[2, 1000, 48];  %o = csc.attention(%q, %k, %v, %mask);  cross_entropy_loss(%logits, %labels)
    After     %mine = aten.index_select(%x, 1, %tokens) : f32[2, 512, 48];  %o = csc.context_attention(.., %plan, 0)
    """
    if options.mesh.cp == 1:
        named(program, options, ())
        return program
    (loss,) = g.outputs(program.graph)
    averaged = labels_of(loss)
    labels = _labels(program) if averaged is None else _labels_of([averaged])
    sequence = labels[0][0] if labels else _token_ids(program)
    if sequence is None:
        raise InputError(
            "with cp > 1 the batch must have token ids or labels: they say which tokens are spread",
            loss.meta.get("source") or "model output",
            "leave cp at 1",
        )
    dims = _Dims(program, sequence)
    spread = dims.spread(program)
    if not spread:
        raise InputError(
            f"csc found no attention along the labels' tokens, so it cannot tell what cp={options.mesh.cp} spreads",
            "mesh",
            "leave cp at 1" + "".join(f"; {note}" for note in program.notes),
        )
    own = [component_of(program, node) for node in spread]
    encoders = named(program, options, own)
    sizes = sizes_for(_tokens(spread[0]), options.mesh.cp, own[-1], "cp")
    local = _local(program, spread)
    edge = PartsEdge()
    spreading = Spreading(
        program, own[-1], dims, sizes, local, options.mesh.cp, edge, labels, last=True, sums=averaged is None
    )
    language = replace(program, graph=spreading.graph())
    context = spreading.context(spread[0])
    for component, ranks in encoders.items():
        language = spread_encoder(language, component, ranks, "cp")
    return replace(language, contexts=(*language.contexts, context))


def _labels(program: Program) -> list[tuple[fx.Node, int]]:
    """What the losses of the graph are over."""
    return _labels_of([node for node in g.calls(program.graph) if g.op_name(node) in LABELS])


def _labels_of(losses: Sequence[fx.Node]) -> list[tuple[fx.Node, int]]:
    """Each with the number that stands for none."""
    found = [(g.bind(node)["target"], int(g.bind(node)["ignore_index"])) for node in losses]
    return [(target, none) for target, none in found if target.meta["val"].dtype is torch.int64]


def _token_ids(program: Program) -> fx.Node | None:
    """The first entry with a whole number for each token."""
    for node in g.placeholders(program.graph):
        val = node.meta["val"]
        if node.meta["role"][0] == "input" and val.dtype is torch.int64 and val.dim() > 1:
            return node
    return None


class _Dims:
    """Which dimensions of a value count tokens: those that lead to the sequence of labels, or of token ids."""

    def __init__(self, program: Program, sequence: fx.Node) -> None:
        entries = {item.name: item for item in program.inputs}
        sources = [node for node in g.ancestors([sequence]) if node.meta.get("role", ("",))[0] == "input"]
        seeds = [(node, dim) for node in sources for dim in entries[node.meta["role"][1]].dynamic]
        if len({node.meta["val"].shape[dim] for node, dim in seeds}) != 1:
            raise InputError(
                f"the labels have {len(seeds)} dimensions whose size may change, one is needed to spread tokens",
                "labels",
                "leave cp at 1",
            )
        self._dims = counting(g.calls(program.graph), seeds)

    def __call__(self, node: fx.Node) -> tuple[int, ...]:
        return self._dims.get(node, ()) if g.tensor_value(node) is not None else ()

    def spread(self, program: Program) -> list[fx.Node]:
        """The attentions whose queries and keys are tokens of the sequence: as many as the last of them has. Others
        along some of the tokens are what an encoder makes a part of the sequence with.
        """
        found = [
            node for node in g.calls(program.graph)
            if g.op_name(node) == "csc::attention"
            and all(isinstance(one, fx.Node) and self(one) == (2,) for one in node.args[:2])
        ]  # fmt: skip
        return [node for node in found if _tokens(node) == _tokens(found[-1])]


def _tokens(attention: fx.Node) -> int:
    return int(attention.args[0].meta["val"].shape[2])  # type: ignore[union-attr]


def _local(program: Program, spread: list[fx.Node]) -> set[fx.Node]:
    """The calls that run on a rank's own tokens: the layers around the attentions, and all that follows them; not what
    every stage makes from the batch by itself.
    """
    layers = {_layer(node.meta.get("module", ""), program) for node in spread}
    tables = shared_nodes(program.graph)
    found: set[fx.Node] = set()
    for node in g.calls(program.graph):
        inside = any(path in layers for path in _around(node.meta.get("module", "")))
        if node not in tables and (inside or any(used in found for used in node.all_input_nodes)):
            found.add(node)
    return found


def _around(module: str) -> list[str]:
    """All modules around a module and itself, the outermost first."""
    return list(accumulate(module.split("."), lambda outer, name: f"{outer}.{name}"))


def _layer(module: str, program: Program) -> str:
    """The outermost layer around a module; the module itself if it is in none."""
    for path in _around(module):
        if path in program.modules and program.modules[path].role == "layer":
            return path
    return module
