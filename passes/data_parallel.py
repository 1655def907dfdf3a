"""Pass `data_parallel`: components of which each tensor-parallel rank computes some of the samples, or tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from csc.passes.encoder_context import component_of, spread_encoder, summed_over
from csc.passes.sample_shards import SampleShards
from csc.passes.tensor import GROUPS
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.naming import unique
from csc.ir.program import Options, Program


def data_parallel(program: Program, options: Options) -> Program:
    """Let the ranks of a tp group share out the samples of components that the mesh gives a tp of 1, or groups within
    it those of components with a tp between; or their tokens: where samples meet in one row (packed patches), or have
    masks or random numbers of their own.

    Requires  passes `attention` and `context`.
    Ensures   without such a component nothing changes. Else its calls work on a rank's own images or clips: what they
              read is cut, what others read of them is gathered by its first reader; nothing on shards mixes samples.
              Its parameters are whole on every rank, and their gradients parts of a sum over tp. Of tokens the same;
              attention meets those of other ranks, and calls that see all tokens are computed by every rank.
    Before    %x = conv2d(%images, %w) : f32[4, 48, 7, 7];  %y = linear(%x, %up)
    After     %x = conv2d(csc.own_part(%images, 0, 2), %w) : f32[2, 48, 7, 7];  %y = linear(csc.all_gather(%x), %up)
    """
    known = {info.component for info in program.modules.values()}
    for component, _ in options.mesh.components:
        if component not in known:
            raise InputError(
                f"the mesh names {component!r}, which is no component of the model", "mesh",
                f"components: {', '.join(sorted(known))}",
            )  # fmt: skip
        if component in dict(options.context):
            raise InputError(
                f"{component} has a tp of its own in the mesh, and a number of ranks in context", "mesh",
                "spread either its samples or its tokens",
            )  # fmt: skip
    for component, tp in options.mesh.components:
        ranks = options.mesh.tp_ranks(component)
        if tp < ranks:
            axis = "copies" if tp > 1 else "tp" if ranks == options.mesh.tp else "division"
            program = _spread(program, component, axis, ranks // tp)
    return program


def _spread(program: Program, component: str, axis: str, ranks: int) -> Program:
    """Over so many ranks of an axis. InputError where neither samples nor tokens can be shared out: why not samples."""
    tables = shared_nodes(program.graph)
    inside = {n for n in g.calls(program.graph) if n not in tables and component_of(program, n) == component}
    if not inside:
        return program  # of a batch without its samples
    try:
        return _samples(program, component, axis, ranks, inside)
    except InputError as of_samples:
        try:
            found = spread_encoder(program, component, ranks, axis)
        except InputError as of_tokens:
            raise InputError(
                f"{of_samples.what}; nor can its tokens be shared out: {of_tokens.what}", of_samples.where,
                of_samples.remedy,
            ) from of_tokens  # fmt: skip
    note = f"{component}: {_sharing(axis, ranks)} share out its {found.contexts[-1].tokens} tokens; {_HELD[axis]}"
    last = found.contexts[-1]
    return replace(found, contexts=(last, *found.contexts[:-1]), notes=(*found.notes, note))


_WHOLE = "its weights are whole"
_HELD = {"tp": _WHOLE, "division": _WHOLE, "copies": "its layers are divided within each of these"}


def _sharing(axis: str, ranks: int) -> str:
    return f"{ranks} groups of tp ranks" if axis == "copies" else f"{ranks} tp ranks"


def _samples(program: Program, component: str, axis: str, ranks: int, inside: Collection[fx.Node]) -> Program:
    with program.fake_mode:
        number = torch.empty((), dtype=torch.int64)
    shards = SampleShards(program.graph, inside, component, ranks, program.fake_mode)
    name, role = GROUPS[axis]
    graph = shards.run(unique(name, {node.name for node in program.graph.nodes}), number, role)
    note = f"{component}: {_sharing(axis, ranks)} share out {shards.axis.size} samples of a microbatch; {_HELD[axis]}"
    parameters = summed_over(program.parameters, shards.parts, axis)
    return replace(program, graph=graph, parameters=parameters, notes=(*program.notes, note))
