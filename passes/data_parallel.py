"""Pass `data_parallel`: components of which each tensor-parallel rank computes some of the samples."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from csc.kernels.collectives import ALL_GATHER, GATHER_SHARED, OWN_PART, SHARE, slots
from csc.passes.context import component_of, spread_encoder, summed_over
from csc.passes.tensor import group_number
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.analysis.gradient_flow import carrying_calls
from csc.analysis.operators.execution import draws
from csc.analysis.operators.table import ATTENTION, CONTEXT_ATTENTION, SIZES, relation, resized
from csc.analysis.tensor_axes import Dim, Trees, contains, flat, found, leaf, leaves
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Writer, unique
from csc.ir.groups import Group, group_over
from csc.ir.program import Options, Pass, Program
from csc.torch_private.traces import FakeTensorMode

# --- The calls of one component on a rank's own samples, in the graph of a whole model -------------------------------
#
# Terms
#   level    ranks along an axis that share samples out: first those of cp, then those of tp or within it
#   samples  what the first dimension counts of what the component reads first: images, clips. Followed through its
#            calls by csc.analysis.tensor_axes
#   shard    a value's entries of a rank's own samples, as many on each rank: the last slots may repeat the last sample,
#            and their gradients are zero. What has no samples is whole, and equal on all ranks
#   inside   the calls of the component; a call inside on shards reads nothing but shards and what is whole
#
# What ranks of tp compute is equal on all of them, gradients included; those of cp have each a part of every gradient,
# which REDUCE adds up whatever it is of.
#
# What cannot be is an InputError with the call: one that mixes samples, a random number for each of them, a mask of
# their own.


STAYS = (None, "regrouped", "grouped", "joined")  # how a dimension of samples may end in a call


class SampleShards:
    def __init__(
        self, graph: fx.Graph, inside: Collection[fx.Node], component: str, levels: Mapping[str, int],
        mode: FakeTensorMode, gathers: bool = False,
    ) -> None:  # fmt: skip
        """gathers: what leaves is made whole by the component itself: its readers are on fewer ranks."""
        self.old, self.inside, self.component, self.levels, self.gathers = graph, inside, component, levels, gathers
        self.groups: dict[str, fx.Node] = {}  # by level
        self.graph = fx.Graph()
        self.writer = Writer(self.graph, mode)
        self.trees = self._trees()
        self.axis = self._samples()
        several = self.axis.size > 1
        self.dims = {node: dim for node in self.trees.of if several and (dim := self._dim(node)) is not None}
        self.local = {node for node in inside if node in self.dims}
        self.carrying = carrying_calls(graph)
        self.wholes: dict[fx.Node, fx.Node] = {}  # values as calls outside see them
        self.within: dict[fx.Node, fx.Node] = {}  # as calls inside see those that have no samples
        self.shards: dict[fx.Node, fx.Node] = {}  # as calls on shards see the others
        self.parts: set[str] = set()

    def run(self, number: torch.Tensor) -> fx.Graph:
        """number: what the number of a group of ranks is like."""
        for node in g.placeholders(self.old):
            self.wholes[node] = g.add_placeholder(self.graph, node.name, node.meta["val"], node.meta["role"])
        taken = {node.name for node in self.old.nodes}
        for axis in self.levels:
            name, role = group_number(axis)
            self.groups[axis] = g.add_placeholder(self.graph, unique(name, taken), number, role)
        for node in g.calls(self.old):
            if node in self.local:
                self._on_shards(node)
            elif node in self.inside:
                if any(used in self.local for used in node.all_input_nodes):
                    self._refuse(node, "makes one result of several samples")
                seen = {used: self._enter(used, node) for used in node.all_input_nodes}
                self.within[node] = g.copy_node(self.graph, node, seen)
            else:
                for used in node.all_input_nodes:
                    if used not in self.wholes:  # by its first reader: shards are what travels between stages
                        self.wholes[used] = self._leave(used, node)
                g.copy_node(self.graph, node, self.wholes)
            if self.gathers and node in self.inside and any(user not in self.inside for user in node.users):
                self.wholes[node] = self._leave(node, node)
        for used in self.old.output_node().all_input_nodes:
            if used not in self.wholes:
                self.wholes[used] = self._leave(used, used)
        self.graph.output(fx.map_arg(self.old.output_node().args[0], self.wholes.__getitem__))
        return self.graph

    # what is known of values

    def _trees(self) -> Trees:
        """Of what the component reads and computes, whatever others do with it."""
        trees = Trees()
        for node in self.old.nodes:
            if node not in self.inside:
                continue
            for used in node.all_input_nodes:
                if used not in trees.of:
                    val = used.meta["val"]
                    values = val if isinstance(val, (tuple, list)) else [val]
                    trees.of[used] = [[leaf(size) for size in getattr(value, "shape", ())] for value in values]
            trees.call(node)
        return trees

    def _samples(self) -> Dim:
        """The axis that counts samples."""
        first = next((entering for entering in self.trees.of if self._enters(entering)), None)
        if first is None:
            raise InputError(
                f"{self.component} reads nothing of the batch, so that it has no samples to share out", "mesh",
                self._remedy(),
            )  # fmt: skip
        axis = found(flat(self.trees.of[first][0][0], "product")[0])
        if axis.size > 1 and axis.kind != "leaf":
            fault = f"{self.component} takes the first dimension of {first.name} apart"
            raise InputError(f"{fault}, so that csc cannot tell what counts its samples", "mesh", self._remedy())
        if axis.size > 1 and axis.whole:
            raise InputError(
                f"{self.component} cannot share out the first dimension of {first.name}: {axis.whole} needs it whole",
                "mesh", self._remedy(),
            )  # fmt: skip
        return axis

    def _enters(self, node: fx.Node) -> bool:
        """Whether a value is numbers that come from the batch, or from another component."""
        if node in self.inside or not g.is_inexact(node) or not node.meta["val"].dim():
            return False
        return any(node_above.meta.get("role", ("",))[0] == "input" for node_above in g.ancestors([node]))

    def _dim(self, node: fx.Node) -> int | None:
        """The dimension that counts samples, as its outermost factor; None: none does."""
        having = [(place, dim) for dims in self.trees.of[node] for place, dim in enumerate(dims)
                  if contains(dim, self.axis)]  # fmt: skip
        if not having:
            return None
        places = {place for place, _ in having}
        plain = all(found(flat(dim, "product")[0]) is self.axis and _once(dim, self.axis) for _, dim in having)
        if len(places) > 1 or not plain or len(having) < len(self.trees.of[node]):
            self._refuse(node, "joins samples to something else")
        return places.pop()

    # calls on shards

    def _on_shards(self, node: fx.Node) -> None:
        if draws(node):
            self._refuse(node, "draws a random number for each sample")
        if g.op_name(node) == ATTENTION and any(isinstance(argument, fx.Node) for argument in node.args[3:]):
            self._refuse(node, "has a mask that is data")
        if g.op_name(node) == CONTEXT_ATTENTION:
            self._refuse(node, "has its tokens on other cp ranks")
        known = relation(node)
        for use in known.uses if known is not None else ():
            dim = self.dims.get(use.node)
            how = None if dim is None or (end := use.end(dim)) is None else end.how
            if how not in STAYS:
                self._refuse(node, "mixes samples")
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self._given(used, node))
        if g.op_name(node) in SIZES:
            args, kwargs = resized(node, args, kwargs, self._sizes(node, 0))
        sharded = self._made(node.name, node, node.target, *args, **kwargs)
        val = sharded.meta["val"]
        for result, tensor in enumerate(val if isinstance(val, (tuple, list)) else [val]):
            if list(tensor.shape) != self._sizes(node, result):
                self._refuse(node, f"gives {list(tensor.shape)} where {self._sizes(node, result)} was expected")
        self.shards[node] = sharded

    def _given(self, used: fx.Node, reader: fx.Node) -> fx.Node:
        """An operand of a call on shards."""
        if used not in self.dims:
            return self._enter(used, reader)
        if used not in self.shards:
            part = self.wholes[used]
            if self._over_cp and used in self.carrying:
                self._refuse(reader, f"reads {used.name}, of whose gradient each cp rank would have another part")
            for axis, samples in self._entering():
                part = self._made(
                    f"own_{used.name}", reader, OWN_PART, part, self.dims[used], samples, self.levels[axis], True,
                    self.groups[axis],
                )  # fmt: skip
            part.meta["hint"] = f"own_{used.meta['role'][1] if used.op == 'placeholder' else used.name}"
            self.shards[used] = part
        return self.shards[used]

    # the component's edge

    def _enter(self, used: fx.Node, reader: fx.Node) -> fx.Node:
        """A value without samples for calls inside: their gradients of it are parts."""
        if not self._over_tp and used not in self.within:
            return self.wholes[used]
        if used not in self.within:
            is_own = used.op == "placeholder" and all(user in self.inside for user in used.users)
            if used in self.carrying and is_own:
                self.parts.add(used.meta["role"][1])  # summed once a step
            shared = used in self.carrying and not is_own
            self.within[used] = (
                self._made(f"{used.name}_shared", reader, SHARE, self.wholes[used], self.groups[self._over_tp])
                if shared else self.wholes[used]
            )  # fmt: skip
        return self.within[used]

    def _leave(self, used: fx.Node, reader: fx.Node) -> fx.Node:
        """A value of a call inside for those outside. One without samples is equal on all ranks; its gradient is one
        rank's, as if it were a single sample's.
        """
        if used in self.local:
            gathered, dim = self.shards[used], self.dims[used]
            for axis, samples in reversed(self._entering()):
                gather = GATHER_SHARED if axis == self._over_cp else ALL_GATHER
                gathered = self._made(
                    f"{used.name}_whole", reader, gather, gathered, dim, samples, self.levels[axis], self.groups[axis]
                )  # fmt: skip
            return gathered
        gathered, over = self.within[used], self._over_tp
        if not over or used not in self.carrying:
            return gathered
        if not isinstance(gathered.meta["val"], torch.Tensor) or not gathered.meta["val"].dim():
            self._refuse(used, "makes one result of all samples")
        return self._made(
            f"{used.name}_whole", reader, ALL_GATHER, gathered, 0, 1, self.levels[over], self.groups[over]
        )  # fmt: skip

    @property
    def _over_tp(self) -> str:
        """The level of tp, or within it; "": none."""
        return next((axis for axis in self.levels if axis != self._over_cp), "")

    @property
    def _over_cp(self) -> str:
        """The level of cp, or within it; "": none."""
        return next((axis for axis in self.levels if group_over(axis).kind in ("context", "sequences")), "")

    def _entering(self) -> list[tuple[str, int]]:
        """The samples among which each level shares out."""
        levels_entering, samples = [], self.axis.size
        for axis, ranks in self.levels.items():
            levels_entering.append((axis, samples))
            samples = slots(samples, ranks)
        return levels_entering

    def _sizes(self, node: fx.Node, result: int) -> list[int]:
        val = node.meta["val"]
        tensor = val[result] if isinstance(val, (tuple, list)) else val
        axis, samples = self._entering()[-1]
        most = slots(samples, self.levels[axis])
        return [
            size // self.axis.size * most if place == self.dims[node] else size
            for place, size in enumerate(tensor.shape)
        ]

    def _made(self, name: str, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        try:
            return self.writer.named(name, like, target, *args, **kwargs)
        except (RuntimeError, ValueError) as error:
            self._refuse(like, f"does not run on some of the samples ({str(error).strip().splitlines()[0]})")

    def _refuse(self, node: fx.Node, why: str) -> NoReturn:
        raise InputError(
            f"{g.op_name(node)} {why}, and the samples of {self.component} are on different ranks", g.place(node),
            self._remedy(),
        )  # fmt: skip

    def _remedy(self) -> str:
        if self._over_cp:
            return f"leave {self.component}.cp out of the mesh: every cp rank then computes it whole"
        return (
            f"leave {self.component} out of the mesh, so that its layers are divided as those of other components are"
        )


def _once(dim: Dim, axis: Dim) -> bool:
    return sum(leaf is axis for leaf in leaves(dim)) == 1


# --- Pass `data_parallel`: components of which each tensor-parallel rank computes some of the samples, or tokens -----


@dataclass(frozen=True)
class DataParallelPass(Pass):
    """Let the ranks of a tp group share out the samples of components that the mesh gives a tp of 1, or groups within
    it those of components with a tp between, and the ranks of a cp group those of components with a cp of 1. Or their
    tokens: where samples meet in one row (packed patches), or have masks or random numbers of their own.

    Ensures   without such a component nothing changes. Else its calls work on a rank's own images or clips: what they
              read is cut, what others read of them is gathered by its first reader; nothing on shards mixes samples.
              Its parameters are whole on every rank, and their gradients parts of a sum over tp. Of tokens the same;
              attention meets those of other ranks, and calls that see all tokens are computed by every rank. What
              leaves a component on more ranks than others have is gathered where it is made.
    Before    %x = conv2d(%images, %w) : f32[4, 48, 7, 7];  %y = linear(%x, %up)
    After     %x = conv2d(csc.own_part(%images, 0, 2), %w) : f32[2, 48, 7, 7];  %y = linear(csc.all_gather(%x), %up)
    """

    requires: ClassVar = ("captured", "unweighed", "attention", "context")
    establishes: ClassVar = ("data_parallel",)

    def __call__(self, program: Program, options: Options) -> Program:
        mesh, known = options.mesh, {info.component for info in program.modules.values()}
        own, own_cp = mesh.own("tp"), mesh.own("cp")
        for component in _readers_first(program, {*own, *own_cp, *mesh.in_front}):
            if component not in known:
                raise InputError(
                    f"the mesh names {component!r}, which is no component of the model", "mesh",
                    f"components: {', '.join(sorted(known))}",
                )  # fmt: skip
            if component in dict(options.context):
                axis = "tp" if component in own or component not in own_cp else "cp"
                raise InputError(
                    f"{component} has a {axis} of its own in the mesh, and a number of ranks in context", "mesh",
                    "spread either its samples or its tokens",
                )  # fmt: skip
            levels, cp = dict[str, int](), own_cp.get(component, 1)
            if component in own_cp:
                levels["cp" if cp == 1 else str(Group.sequences(cp))] = mesh.cp // cp
            tp, ranks = mesh.dividing(component), mesh.extent_of(component).width
            if tp < ranks:
                shares = Group.copies(tp) if tp > 1 else Group.division(ranks)
                levels["tp" if tp == 1 and ranks >= mesh.tp else str(shares)] = ranks // tp
            if levels:
                program = _spread(program, component, levels, cp, ranks > mesh.tp)
        return program


def _readers_first(program: Program, components: Collection[str]) -> list[str]:
    """In front of what it reads a component does not find yet how that is gathered, which is among its own calls."""
    if len(components) < 2:
        return list(components)
    found = dict.fromkeys(component_of(program, node) for node in g.calls(program.graph))
    order = {component: place for place, component in enumerate(found)}
    return sorted(components, key=lambda component: (-order.get(component, -1), component))


def _spread(program: Program, component: str, levels: Mapping[str, int], cp: int, gathers: bool) -> Program:
    """Over so many ranks of each axis. cp: how many neighbours share the tokens of the samples that groups of these
    share out. gathers: what leaves is gathered where it is made, and not by its first reader. InputError where neither
    samples nor tokens can be shared out.
    """
    tables = shared_nodes(program.graph)
    inside = {n for n in g.calls(program.graph) if n not in tables and component_of(program, n) == component}
    if not inside:
        return program  # of a batch without its samples
    try:
        spread = _samples(program, component, levels, inside, gathers)
    except InputError as of_samples:
        if len(levels) > 1:
            raise InputError(
                f"{of_samples.what}; its tokens can be shared out along one axis, and the mesh has {component} share "
                f"out along {' and '.join(levels)}", of_samples.where, f"leave {component}.cp out of the mesh",
            ) from of_samples  # fmt: skip
        ((axis, ranks),) = levels.items()
        axis, ranks = ("cp", ranks * cp) if group_over(axis).kind == "sequences" else (axis, ranks)
        try:
            return _tokens(program, component, axis, ranks, gathers)
        except InputError as of_tokens:
            raise InputError(
                f"{of_samples.what}; nor can its tokens be shared out: {of_tokens.what}", of_samples.where,
                of_samples.remedy,
            ) from of_tokens  # fmt: skip
    try:
        return _tokens(spread, component, "cp", cp, gathers) if cp > 1 else spread
    except InputError as of_tokens:
        raise InputError(
            f"{component} has cp={cp} in the mesh: {of_tokens.what}", of_tokens.where,
            f"give it cp=1, where cp ranks share out its samples alone, or leave {component}.cp out of the mesh",
        ) from of_tokens  # fmt: skip


def _tokens(program: Program, component: str, axis: str, ranks: int, gathers: bool) -> Program:
    spread = spread_encoder(program, component, ranks, axis, gathers)
    last = spread.contexts[-1]
    note = f"{component}: {_sharing({axis: ranks})} share out its {last.tokens} tokens{_held({axis: ranks})}"
    return replace(spread, contexts=(last, *spread.contexts[:-1]), notes=(*spread.notes, note))


SHARING = {
    "context": "cp ranks", "sequences": "groups of cp ranks", "copies": "groups of tp ranks",
    **dict.fromkeys(("tensor", "division"), "tp ranks"),
}  # fmt: skip
"""Who shares out, by the kind of group."""


def _sharing(levels: Mapping[str, int]) -> str:
    words = [f"{ranks} {SHARING[group_over(axis).kind]}" for axis, ranks in levels.items()]
    return " of ".join(reversed(words))


def _held(levels: Mapping[str, int]) -> str:
    divided = any(group_over(axis).kind == "copies" for axis in levels)
    return "; its layers are divided within each of these" if divided else "; its weights are whole"


def _samples(
    program: Program, component: str, levels: Mapping[str, int], inside: Collection[fx.Node], gathers: bool
) -> Program:
    with program.fake_mode:
        number = torch.empty((), dtype=torch.int64)
    shards = SampleShards(program.graph, inside, component, levels, program.fake_mode, gathers)
    graph = shards.run(number)
    note = f"{component}: {_sharing(levels)} share out {shards.axis.size} samples of a microbatch{_held(levels)}"
    within = next((axis for axis in levels if group_over(axis).kind not in ("context", "sequences")), "tp")
    parameters = summed_over(program.parameters, shards.parts, within)
    return replace(program, graph=graph, parameters=parameters, notes=(*program.notes, note))
