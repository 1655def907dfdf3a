"""Pass `context`: the tokens of a sequence spread over context-parallel ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, product

from csc.passes.attention import attention
from csc.passes.dropout import dropout
from csc.passes.encoder_context import component_of, named, sizes_for, spread_encoder
from csc.passes.loss import labels_of
from csc.passes.precision import precision
from csc.passes.shapes import lowered
from csc.passes.sharding import Spreading
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.analysis.tokens import token_dims
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.program import Options, Program


def context(program: Program, options: Options) -> Program:
    """Let each cp rank compute the layers of the language model for its own tokens; those of encoders too, where
    options.context says over how many ranks.

    Requires  pass `attention`.
    Ensures   with cp = 1 nothing changes. Else the layers whose attention runs along the labels' sequence, and all that
              follows them, work on a share of the tokens; what enters them is computed for the whole sequence and
              dispatched: embeddings where encoders and text have merged, position tables, labels after their shift.
              A spread encoder works on shares of its own tokens and is made whole again where its values leave.
              Attention sees the keys of all ranks; no other operation on shares mixes tokens.
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
    dims = _Dims(program, labels, options)
    spread = [node for node in g.calls(program.graph) if dims.is_spread(node)]
    lengths = {int(node.args[0].meta["val"].shape[2]) for node in spread}  # type: ignore[union-attr]
    if len(lengths) != 1:
        found = f"attentions along {sorted(lengths)} tokens" if lengths else "no attention along the labels' tokens"
        raise InputError(
            f"csc found {found}, so it cannot tell what cp={options.mesh.cp} spreads",
            "mesh",
            "leave cp at 1" + "".join(f"; {note}" for note in program.notes),
        )
    own = [component_of(program, node) for node in spread]
    encoders = named(program, options, own)
    sizes = sizes_for(lengths.pop(), options.mesh.cp, own[-1])
    local = _local(program, spread)
    spreading = Spreading(program, own[-1], dims, sizes, local, options.mesh.cp, labels, ignored, last=True)
    language = replace(program, graph=spreading.graph())
    context = spreading.context(spread[0])
    for component, ranks in encoders.items():
        language = spread_encoder(language, component, ranks)
    return replace(language, contexts=(*language.contexts, context))


class _Dims:
    """Which dimensions of a value count tokens: those that change with the length of the labels' sequence."""

    def __init__(self, program: Program, labels: fx.Node, options: Options) -> None:
        assert program.symbolic is not None
        given = {n.meta["role"][1]: n.meta["val"] for n in g.placeholders(program.symbolic)
                 if n.meta["role"][0] == "input"}  # fmt: skip
        sources = [n.meta["role"][1] for n in g.ancestors([labels]) if n.meta.get("role", ("",))[0] == "input"]
        own = {(str(given[item.name].shape[dim]), item.shape[dim]) for item in program.inputs for dim in item.dynamic
               if item.name in sources}  # fmt: skip
        if len(own) != 1:
            raise InputError(
                f"the labels have {len(own)} dimensions whose size may change, one is needed to spread tokens",
                "labels",
                "leave cp at 1",
            )
        ((symbol, size),) = own
        by_symbol, by_size = (
            {(item.name, dim) for item in program.inputs for dim in item.dynamic if same(item, dim)}
            for same in (
                lambda item, dim: str(given[item.name].shape[dim]) == symbol,
                lambda item, dim: item.shape[dim] == size,
            )
        )
        other = self._longer(program, [by_symbol, by_size], options)
        self._dims = {
            node.name: self._differing(node, other[node.name]) if node.name in other else ()
            for node in program.graph.nodes
        }

    @staticmethod
    def _longer(program: Program, lengths: list[set[tuple[str, int]]], options: Options) -> dict[str, fx.Node]:
        """The nodes by name, lowered for a sequence of another length: one token more, or twice as many for a model
        that wants its length to be a multiple of something.

        lengths: dimensions of inputs that may be that length; the first ones that the model can be lowered with.
        """
        assert program.symbolic is not None
        for changing, longer in product(lengths, (lambda size: size + 1, lambda size: 2 * size)):
            inputs = tuple(
                replace(item, shape=tuple(
                    longer(size) if (item.name, dim) in changing else size for dim, size in enumerate(item.shape)
                )) for item in program.inputs
            )  # fmt: skip
            try:
                again = lowered(replace(program, inputs=inputs, notes=()), program.symbolic, program.fake_mode)
            except InputError as error:
                refused = error
                continue
            again = attention(precision(dropout(again, options), options), options)
            return {node.name: node for node in again.graph.nodes}
        raise InputError(
            f"the model takes sequences of this length only, so csc cannot spread them ({refused.what})",
            refused.where,
            "leave cp at 1, or take lengths from the shapes of tensors",
        )

    @staticmethod
    def _differing(node: fx.Node, other: fx.Node) -> tuple[int, ...]:
        one, changed = g.tensor_value(node), g.tensor_value(other)
        return () if one is None or changed is None else token_dims(one.shape, changed.shape)

    def __call__(self, node: fx.Node) -> tuple[int, ...]:
        return self._dims.get(node.name, ())

    def is_spread(self, node: fx.Node) -> bool:
        """An attention whose queries and keys are tokens of the sequence."""
        return g.op_name(node) == "csc::attention" and all(
            isinstance(argument, fx.Node) and self(argument) == (2,) for argument in node.args[:2]
        )


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
