"""Pass `data_parallel`: components of which each tensor-parallel rank computes some of the samples, or tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch
from csc.passes.encoder_context import component_of, spread_encoder, summed_over
from csc.passes.sample_shards import SampleShards
from torch import fx

from csc.analysis.cutting import shared_nodes
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.groups import Group, group_over
from csc.ir.program import Options, Program


def data_parallel(program: Program, options: Options) -> Program:
    """Let the ranks of a tp group share out the samples of components that the mesh gives a tp of 1, or groups within
    it those of components with a tp between, and the ranks of a cp group those of components with a cp of 1. Or their
    tokens: where samples meet in one row (packed patches), or have masks or random numbers of their own.

    Requires  passes `attention` and `context`.
    Ensures   without such a component nothing changes. Else its calls work on a rank's own images or clips: what they
              read is cut, what others read of them is gathered by its first reader; nothing on shards mixes samples.
              Its parameters are whole on every rank, and their gradients parts of a sum over tp. Of tokens the same;
              attention meets those of other ranks, and calls that see all tokens are computed by every rank. What
              leaves a component on more ranks than others have is gathered where it is made.
    Before    %x = conv2d(%images, %w) : f32[4, 48, 7, 7];  %y = linear(%x, %up)
    After     %x = conv2d(csc.own_part(%images, 0, 2), %w) : f32[2, 48, 7, 7];  %y = linear(csc.all_gather(%x), %up)
    """
    mesh, known = options.mesh, {info.component for info in program.modules.values()}
    own = dict(mesh.components)
    own_cp = dict(mesh.own_cp)
    for component in _readers_first(program, {*own, *own_cp, *dict(mesh.own_ranks)}):
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
        tp, ranks = own.get(component, mesh.tp), mesh.tp_ranks(component)
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
        found = _samples(program, component, levels, inside, gathers)
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
        return _tokens(found, component, "cp", cp, gathers) if cp > 1 else found
    except InputError as of_tokens:
        raise InputError(
            f"{component} has cp={cp} in the mesh: {of_tokens.what}", of_tokens.where,
            f"give it cp=1, where cp ranks share out its samples alone, or leave {component}.cp out of the mesh",
        ) from of_tokens  # fmt: skip


def _tokens(program: Program, component: str, axis: str, ranks: int, gathers: bool) -> Program:
    found = spread_encoder(program, component, ranks, axis, gathers)
    last = found.contexts[-1]
    note = f"{component}: {_sharing({axis: ranks})} share out its {last.tokens} tokens{_held({axis: ranks})}"
    return replace(found, contexts=(last, *found.contexts[:-1]), notes=(*found.notes, note))


SHARING = {
    "context": "cp ranks", "sequences": "groups of cp ranks", "copies": "groups of tp ranks",
    **dict.fromkeys(("tensor", "division"), "tp ranks"),
}  # fmt: skip
"""Who shares out, by the kind of group."""


def _sharing(levels: Mapping[str, int]) -> str:
    found = [f"{ranks} {SHARING[group_over(axis).kind]}" for axis, ranks in levels.items()]
    return " of ".join(reversed(found))


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
