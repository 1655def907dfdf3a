"""Components whose layers fewer tensor-parallel ranks divide than those of the largest: what a mesh may say of them.

Terms: a component's *own tp* divides that of the mesh. So many neighbours divide its layers; the others hold the same,
and share out its samples or tokens with these.

    check_own_tp(mesh)                    InputError for an own tp that no groups of the mesh's ranks have
    check_size(what, size)                InputError for what is no size
    sizes_by_axis(meshes, make)           {"a": dict(tp=4), "b": dict(tp=1, dp=4)} -> {"tp": 4, "b.tp": 1, ...}
    own_words(mesh) -> {"b.tp": 1, ...}   what components have of their own, as texts name it
    own_of(sizes)                         the same as fields of a Mesh
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from csc.errors import InputError
from csc.ir.own_ranks import check_dp, tp_ranks
from csc.ir.own_replicas import fewer

AXES = ("dp", "pp", "cp", "tp")
OWN = (".tp", ".pp", ".dp", ".cp")  # behind the name of a component, its own


def check_own_tp(mesh: Any) -> None:
    """See the module."""
    for component, tp in mesh.components:
        if mesh.tp % tp:
            nearest = max(size for size in range(1, min(tp, mesh.tp) + 1) if mesh.tp % size == 0)
            raise InputError(
                f"{component} has tp={tp}, and the mesh has tp={mesh.tp}: {mesh.tp} ranks are no groups of {tp}",
                "mesh",
                f"The nearest that fits is {component}.tp={nearest}, where {nearest} ranks divide its layers and "
                f"{mesh.tp // nearest} share out its samples, or no {component}.tp, where all divide its layers",
            )  # fmt: skip


def sizes_by_axis(meshes: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Sizes of axes out of sizes by component: the mesh's are those of the component with the largest tp, of these the
    one that is named last, as its stages are the last; others may have more replicas and fewer parts. Where several
    name pp, each has so many stages of its own, which may have another number of ranks; else all are on the same ranks.
    make: a mesh of sizes.
    """
    for name, sizes in meshes.items():
        if not isinstance(sizes, Mapping) or set(sizes) - set(AXES):
            raise InputError(
                f"the mesh has {sizes!r} for {name}", "mesh",
                'Map components to sizes of axes, {"vision_tower": dict(tp=1, dp=4), "language_model": dict(tp=4)}',
            )  # fmt: skip
        for axis, size in sizes.items():
            check_size(f"axis {axis} of {name}", size)
    largest = max(reversed(list(meshes)), key=lambda name: [meshes[name].get("tp", 1), meshes[name].get("cp", 1)])
    staged = {name: sizes["pp"] for name, sizes in meshes.items() if "pp" in sizes}
    if largest not in staged and staged:  # the largest has what the others leave, which nobody has said
        name = next(iter(staged))
        raise InputError(
            f"{name} has pp={staged[name]} in a mesh where {largest} has no pp", "mesh",
            f"Give {largest} its pipeline stages too: those of all components are added up",
        )  # fmt: skip
    whole = make(**{**meshes[largest], "pp": sum(staged.values()) or 1})
    found: dict[str, Any] = whole.to_dict()
    found |= {f"{name}.pp": pp for name, pp in staged.items() if len(staged) > 1}
    for name, sizes in meshes.items():
        own = make(**sizes)
        if own.tp not in (1, whole.tp):
            replace(whole, components=((name, own.tp),))  # which says so
        cp = sizes.get("cp", whole.cp)
        check_own_cp(name, cp, whole.cp)
        ranks = whole.dp * whole.tp * whole.cp // cp
        found[f"{name}.tp"] = own.tp
        found |= {f"{name}.dp": own.dp} if own.dp * own.tp != ranks else {}
        found |= {f"{name}.cp": cp} if cp < whole.cp else {}
    return found


def check_own_cp(component: str, cp: Any, whole: int) -> None:
    """InputError but for that of the mesh, and divisors of it."""
    check_size(f"axis cp of {component}", cp)
    if whole % cp:
        nearest = max(size for size in range(1, min(cp, whole) + 1) if whole % size == 0)
        raise InputError(
            f"{component} has cp={cp} in a mesh of cp={whole}: {whole} ranks are no groups of {cp}", "mesh",
            f"The nearest that fits is {component}.cp={nearest}, where {nearest} ranks share the tokens of its samples "
            f"and {whole // nearest} groups of these share out its samples",
        )  # fmt: skip


def own_words(mesh: Any) -> dict[str, int]:
    """See the module."""
    tp = dict(mesh.components)
    found = {f"{name}.tp": size for name, size in mesh.components}
    found |= {f"{name}.pp": size for name, size in mesh.own_stages}
    found |= {f"{name}.cp": size for name, size in mesh.own_cp}
    for name, ranks in mesh.own_ranks:
        replicas = mesh.dp * mesh.cp // mesh.cp_ranks(name)
        found[f"{name}.dp"] = replicas * ranks // tp.get(name, mesh.tp)
    return found | {f"{name}.dp": dp for name, dp in mesh.own_replicas}


def own_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """See the module. sizes: those of the mesh are among them."""
    tp, pp, dp, cp = (
        {name.removesuffix(axis): size for name, size in sizes.items() if name.endswith(axis)} for axis in OWN
    )
    whole = {axis: sizes.get(axis, 1) for axis in AXES}
    for name, size in cp.items():
        check_own_cp(name, size, whole["cp"])
    apart = {name: size for name, size in cp.items() if size < whole["cp"]}
    replicas = {name: whole["dp"] * whole["cp"] // apart.get(name, whole["cp"]) for name in dp}
    ranks, shared = {}, {}
    for name, size in dp.items():
        own = tp.get(name, whole["tp"])
        check_dp(name, size, own, replicas[name], whole["tp"])
        if name not in apart and fewer(name, size, replicas[name]):
            shared[name], ranks[name] = size, own
        else:
            ranks[name] = tp_ranks(name, size, own, replicas[name], whole["tp"])
    return {
        "components": tuple(tp.items()), "own_stages": tuple(pp.items()), "own_ranks": tuple(ranks.items()),
        "own_replicas": tuple(shared.items()), "own_cp": tuple(apart.items()),
    }  # fmt: skip


def check_size(what: str, size: object) -> None:
    """InputError for what is no size of an axis."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise InputError(f"{what} has size {size!r}", "mesh", "Every axis needs a whole number of at least 1")
