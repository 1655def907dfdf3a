"""What sizes, orders and stages a mesh may have, whatever its components.

check_mesh(mesh)                     InputError for what cannot be
plain_order(mesh) -> order           with axes of size 1 where they stand by default
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from csc.errors import InputError
from csc.ir.component_meshes import AXES, check_own_cp, check_own_tp, check_size


def check_mesh(mesh: Any) -> None:
    """See the module."""
    for axis in AXES:
        check_size(f"axis {axis}", getattr(mesh, axis))
    if mesh.ranks is not None:
        check_size("ranks", mesh.ranks)
        if any(getattr(mesh, axis) > 1 for axis in AXES):
            given = replace(mesh, ranks=None)
            raise InputError(
                f"the mesh has ranks={mesh.ranks}, for csc to choose the axes, and {given} too", "mesh",
                "Give either: csc.Mesh(ranks=...) alone, or the sizes of the axes",
            )  # fmt: skip
    if sorted(mesh.order) != sorted(AXES) or [a for a in mesh.order if a != "pp"] != ["dp", "cp", "tp"]:
        raise InputError(
            f"the order of ranks is {'-'.join(map(str, mesh.order))}", "mesh",
            "Name dp, cp and tp in this order, and pp where it should be: pp-dp-cp-tp",
        )  # fmt: skip
    for component, tp in mesh.components:
        check_size(f"axis tp of {component}", tp)
    check_own_tp(mesh)
    for component, cp in mesh.own_cp:
        check_own_cp(component, cp, mesh.cp)
    for component, pp in mesh.own_stages:
        check_size(f"axis pp of {component}", pp)
    told = sum(pp for _, pp in mesh.own_stages)
    if told > mesh.pp or (told == mesh.pp and len(mesh.own_stages) == 1):
        named = ", ".join(f"{component}.pp={pp}" for component, pp in mesh.own_stages)
        raise InputError(
            f"{named} leaves none of pp={mesh.pp} for the other components", "mesh",
            "pp counts all stages: name each component that has some, or leave at least one for the others",
        )  # fmt: skip


def plain_order(mesh: Any) -> tuple[str, ...]:
    """See the module. Where positions have different numbers of replicas, pp is in front of dp."""
    if mesh.own_replicas:
        return ("pp", "dp", "cp", "tp")
    ahead = [axis for axis in mesh.order[: mesh.order.index("pp")] if getattr(mesh, axis) > 1]
    if mesh.pp == 1 or ahead == ["dp"] or not (ahead or mesh.dp > 1):
        return AXES
    rest = ("dp", "cp", "tp")
    place = rest.index(ahead[-1]) + 1 if ahead else 0
    return (*rest[:place], "pp", *rest[place:])
