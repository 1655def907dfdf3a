"""Pass `context`: the tokens of a sequence spread over context-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from csc.passes.encoder_context import component_of, named, sizes_for, spread_encoder
from csc.passes.loss import labels_of
from csc.passes.shard_edges import PartsEdge
from csc.passes.sharding import Spreading
from torch import fx

from csc.analysis.axes import counting
from csc.analysis.cutting import shared_nodes
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
              Attention sees the keys of all ranks; no other operation on shards mixes tokens.
    Before    %x : f32[2, 1000, 48];  %o = csc.attention(%q, %k, %v, %mask);  cross_entropy_loss(%logits, %labels)
    After     %mine = aten.index_select(%x, 1, %tokens) : f32[2, 512, 48];  %o = csc.context_attention(.., %plan, 0)
    """
    if options.mesh.cp == 1:
        named(program, options, ())
        return program
    (loss,) = g.outputs(program.graph)
    averaged = labels_of(loss)
    if averaged is None:
        raise InputError(
            "with cp > 1 the loss must be a mean over labels (cross entropy): the ranks' shares of it are added up",
            loss.meta.get("source") or "model output",
            "leave cp at 1",
        )
    labels, ignored = g.bind(averaged)["target"], int(g.bind(averaged)["ignore_index"])
    dims = _Dims(program, labels)
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
    spreading = Spreading(program, own[-1], dims, sizes, local, options.mesh.cp, edge, labels, ignored, last=True)
    language = replace(program, graph=spreading.graph())
    context = spreading.context(spread[0])
    for component, ranks in encoders.items():
        language = spread_encoder(language, component, ranks, "cp")
    return replace(language, contexts=(*language.contexts, context))


class _Dims:
    """Which dimensions of a value count tokens: those that lead to the labels' sequence."""

    def __init__(self, program: Program, labels: fx.Node) -> None:
        entries = {item.name: item for item in program.inputs}
        sources = [node for node in g.ancestors([labels]) if node.meta.get("role", ("",))[0] == "input"]
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
