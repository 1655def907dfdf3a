"""Pass `dropout`: random numbers that do not depend on how the work is divided.

Terms
  seed    comes with every microbatch; each region gets one of its own, by its name (csc.kernels.dropout)
  index   which draw of its layer, part or container a call makes, in order of execution
  rows    what a call draws has some for each sample: the same numbers in whichever microbatch the sample is
  once    what it draws is for all samples (noise on a weight): the same numbers in every microbatch of a step
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from csc.kernels.dropout import DROPOUT, NORMAL, UNIFORM
from csc.passes.differentiate import in_layout
from torch import fx

from csc.analysis.cutting import label
from csc.analysis.operators.execution import DROPOUTS, FILLED_AT_RANDOM, WHOLE_AT_RANDOM, is_random
from csc.analysis.operators.table import RECURRENT, SDPA
from csc.analysis.samples.combining import counting, fixed, followed
from csc.analysis.samples.propagation import SampleRows, State, Whole
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Writer, replace_call
from csc.ir.program import Options, Pass, Program
from csc.torch_private.exported import OpOverload

aten = torch.ops.aten
WRITTEN_OUT = "attention written out, for the dropout of its weights"
SEED = ("random", "seed")


@dataclass(frozen=True)
class DropoutPass(Pass):
    """Let every random call draw from the seed of its microbatch and its own place in the model.

    Ensures   dropout, bernoulli, rand, randn, randint and their relatives with `like` take a seed and an index, which
              equal layers have alike; what has rows for each sample is drawn sample by sample, and what is for all of
              them once a step, so that the number of microbatches changes nothing; `notes` says of which calls csc
              cannot tell; attention with dropout of its weights is
              written out, as softmax(QK^T) dropped out and multiplied by V; other random calls stay as they are, and
              `notes` says which. InputError for dropout between the layers of a recurrent module, which stands in the
              middle of one operation.
    Before    %d, %mask = native_dropout(%x, 0.1, True)
    After     %d = csc.dropout(%x, 0.1, %seed, 0)
    """

    requires: ClassVar = ("captured", "sized")
    establishes: ClassVar = ("seeded",)

    def __call__(self, program: Program, options: Options) -> Program:
        for node in g.calls(program.graph):
            if g.op_name(node) in RECURRENT:
                _refuse_dropout_within(node)
        if not any(is_random(node) for node in g.calls(program.graph)):
            return program
        graph, _ = g.copy_graph(program.graph)
        draws = _Draws(program, graph)
        for node in g.calls(graph):
            if is_random(node):
                draws.rewrite(node)
        g.erase_dead(graph)
        return replace(program, graph=graph, notes=(*program.notes, *dict.fromkeys(draws.notes)))


def _refuse_dropout_within(node: fx.Node) -> None:
    bound = g.bind(node)
    if bound["dropout"] and bound["train"] and bound["num_layers"] > 1:
        raise InputError(
            f"{g.short_op(node)} drops out between its layers, with numbers that csc cannot draw",
            g.place(node),
            "set its dropout to 0, and put nn.Dropout between recurrent modules of one layer each",
        )


class _Draws:
    """Rewrites the random calls of a graph in place."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self.program = program
        self.graph = graph
        self._call = Writer(graph, program.fake_mode).call
        self.notes: list[str] = []
        self.drawn: dict[str, int] = {}  # by layer, part or container: how many draws so far
        self.rows = {entry.name: int(entry.shape[entry.samples]) for entry in program.inputs if entry.shape}
        first = next(iter(graph.nodes))
        with program.fake_mode, graph.inserting_before(first):
            self.seed = g.add_placeholder(graph, "random", torch.empty(3, dtype=torch.int64), SEED)

    def rewrite(self, node: fx.Node) -> None:
        """Replace one random call, or note that it stays."""
        name, bound = g.op_name(node), g.bind(node)
        with self.graph.inserting_before(node):
            if name in DROPOUTS:
                new = self._dropout(node, bound)
            elif name == SDPA:
                new = self._attention(node, bound)
            elif name in FILLED_AT_RANDOM:
                new = self._drawn(node, NORMAL if "randn" in name else UNIFORM, node.meta["val"].dtype)
            elif name in WHOLE_AT_RANDOM:
                new = self._whole(node, bound)
            elif name == "aten::bernoulli" and bound.get("generator") is None:
                new = self._bernoulli(node, bound)
            else:
                where = g.place(node)
                self.notes.append(f"{where}: {g.short_op(node)} draws from torch's generator, in the order of work")
                return
        if name == "aten::native_dropout":  # its first item is the result, the second one the mask for its backward
            for item in list(node.users):
                assert item.args[1] == 0, "a mask of dropout is read by its backward only"
                replace_call(item, new)
        replace_call(node, new)

    def _index(self, node: fx.Node) -> int:
        path, _ = label(node.meta.get("module", ""), self.program.modules)
        self.drawn[path] = self.drawn.get(path, -1) + 1
        return self.drawn[path]

    def _dropout(self, node: fx.Node, bound: dict[str, Any]) -> fx.Node:
        if bound.get("train") is False or not bound["p"]:
            return bound["input"]
        once = node.name not in self._of_batch and self._is_once(node)
        seed = self._seed_of_step(node) if once else self.seed
        return self._call(node, DROPOUT, bound["input"], float(bound["p"]), seed, self._index(node))

    def _drawn(self, node: fx.Node, target: OpOverload, dtype: torch.dtype) -> fx.Node:
        """Numbers as the call's result has entries: for each sample by itself, or once for all of a step."""
        val, of_samples = node.meta["val"], self._rows(node)
        once = of_samples is None and self._is_once(node)
        if of_samples is None and not once:
            self.notes.append(f"{g.place(node)}: {g.short_op(node)} draws anew for each microbatch, as csc cannot tell "
                              "what of it is for which sample: with another number it draws others")  # fmt: skip
        seed = self._seed_of_step(node) if once else self.seed
        return self._call(
            node, target, seed, self._index(node), list(val.shape), dtype, val.device, *(of_samples or ())
        )  # fmt: skip

    @cached_property
    def _states(self) -> dict[str, State]:
        """What the samples are to each value, by its name; nothing where the graph is for one number of them."""
        assert self.program.symbolic is not None
        at_size = followed(self.program, self.program.symbolic)
        return {} if at_size is None else {node.name: state for node, state in at_size[1].items()}

    @cached_property
    def _of_batch(self) -> set[str]:
        """The names of values that are made of the batch, or have a size of it."""
        assert self.program.symbolic is not None
        of_batch = set[str]()
        for node in self.program.symbolic.nodes:
            entry = node.op == "placeholder" and node.meta["role"][0] == "input"
            if entry or any(operand.name in of_batch for operand in node.all_input_nodes):
                of_batch.add(node.name)
        return of_batch

    def _is_once(self, node: fx.Node) -> bool:
        """Whether what a call draws is for all samples alike."""
        return self._states.get(node.name) == Whole() and not fixed(self.program)

    def _rows(self, node: fx.Node) -> list[int] | None:
        """How many samples what a call draws has rows for, along which dimension, and how many of each stand together,
        as csc.kernels.dropout takes them; None: it has none, or none for the samples that the step counts.
        """
        state, shape = self._states.get(node.name), node.meta["val"].shape
        if not isinstance(state, SampleRows) or state.entry != counting(self.program):
            return None
        (dim, inner), samples = state.axis, self.rows[state.entry]
        if not samples or not shape[dim] or shape[dim] % (samples * inner):
            return None
        if shape[dim] > samples * inner:
            return [samples, dim, inner]
        return [samples, dim] if dim else [samples]

    def _seed_of_step(self, node: fx.Node) -> fx.Node:
        return self._call(node, aten.slice.Tensor, self.seed, 0, 1)

    def _whole(self, node: fx.Node, bound: dict[str, Any]) -> fx.Node:
        """Whole numbers from `low` up to `high`, which is not one of them: 2^53 steps, cut into as many."""
        val, low = node.meta["val"], bound.get("low", 0)
        steps = self._call(node, aten.mul.Scalar, self._drawn(node, UNIFORM, torch.float64), bound["high"] - low)
        return self._call(
            node, aten._to_copy.default,
            self._call(node, aten.add.Scalar, self._call(node, aten.floor.default, steps), low), dtype=val.dtype,
        )  # fmt: skip

    def _bernoulli(self, node: fx.Node, bound: dict[str, Any]) -> fx.Node:
        """1 where a uniform number is below the probability: `p`, a number or one of each, or else the value itself."""
        val = node.meta["val"]
        drawn = self._drawn(node, UNIFORM, torch.float32)
        chance = bound.get("p", bound["self"])
        of_each = isinstance(chance, fx.Node) and isinstance(chance.meta["val"], torch.Tensor)
        below = self._call(node, aten.lt.Tensor if of_each else aten.lt.Scalar, drawn, chance)
        drawn = self._call(node, aten._to_copy.default, below, dtype=val.dtype)
        if not of_each or not g.reads_parameters([chance]):
            return drawn
        nothing = self._call(node, aten.mul.Scalar, chance, 0)  # its gradient is 0 everywhere, which is not none
        return self._call(node, aten.add.Tensor, drawn, nothing)

    def _attention(self, node: fx.Node, bound: dict[str, Any]) -> fx.Node:
        """softmax(Q K^T scale + mask), dropped out, times V: the weights are there whole, [B, H, Tq, Tk]."""
        query, key, value, mask = (bound[name] for name in ("query", "key", "value", "attn_mask"))
        q = query.meta["val"]
        times = q.shape[-3] // key.meta["val"].shape[-3] if bound["enable_gqa"] else 1
        if times > 1:
            key, value = (self._call(node, aten.repeat_interleave.self_int, t, times, -3) for t in (key, value))
        across = self._call(node, aten.transpose.int, key, -2, -1)
        scores = self._call(node, aten.matmul.default, query, across)
        scores = self._call(node, aten.mul.Tensor, scores, bound["scale"] or q.shape[-1] ** -0.5)
        if bound["is_causal"]:
            rows = [q.shape[-2], key.meta["val"].shape[-2]]
            every = self._call(node, aten.ones.default, rows, dtype=torch.bool, device=q.device)
            mask = self._call(node, aten.tril.default, every)
        if mask is not None and mask.meta["val"].dtype is torch.bool:
            hidden = self._call(node, aten.logical_not.default, mask)
            scores = self._call(node, aten.masked_fill.Scalar, scores, hidden, -float("inf"))
        elif mask is not None:
            scores = self._call(node, aten.add.Tensor, scores, mask)
        weights = self._call(node, aten._safe_softmax.default, scores, -1)
        dropped = self._call(node, DROPOUT, weights, float(bound["dropout_p"]), self.seed, self._index(node))
        result = self._call(node, aten.matmul.default, dropped, value)
        laid_out = in_layout(self.graph, result, node.meta["val"])
        assert laid_out is not None
        where = g.place(node)
        self.notes.append(f"{where}: {WRITTEN_OUT}")
        return laid_out
