"""Forms of a mesh that are read: text, and torch's DeviceMesh.

    sizes_of_text("pp=3,dp=2") -> {"pp": 3, "dp": 2}
    sizes_of_device_mesh(mesh) -> {"dp": 2, "pp": 3, "order": "dp-pp"}
    order_of("pp-dp", larger) -> ("pp", "dp", "cp", "tp")

InputError for what is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from csc.errors import InputError
from csc.ir.component_meshes import AXES, OWN


def sizes_of_text(text: str) -> dict[str, Any]:
    """By the names that stand there; those of axes, and what ends in one behind a component."""
    form = f"Write NAME=SIZE with commas between, for example pp=3,dp=2; names: {', '.join(AXES)}; or ranks=6"
    sizes: dict[str, Any] = {}
    for part in filter(None, (p.strip() for p in text.split(","))):
        axis, equals, size = (p.strip() for p in part.partition("="))
        if axis == "order" and equals and axis not in sizes:
            sizes[axis] = size
            continue
        if not equals or not size.isdecimal():
            raise InputError(f"{part!r} is not NAME=SIZE", f"mesh {text!r}", form)
        if axis not in (*AXES, "ranks") and not axis.endswith(OWN):
            raise InputError(f"there is no axis {axis!r}", f"mesh {text!r}", form)
        if axis in sizes:
            raise InputError(f"axis {axis} is given twice", f"mesh {text!r}", form)
        sizes[axis] = int(size)
    if not sizes.keys() - {"order"}:
        raise InputError("no axis is given", f"mesh {text!r}", form)
    return sizes


def sizes_of_device_mesh(mesh: Any) -> dict[str, Any]:
    """It is known by its attributes, so that torch is not imported. Sizes, and the order of its axes where they stand
    in one that a mesh can have.
    """
    names, shape = getattr(mesh, "mesh_dim_names", None), getattr(mesh, "shape", None)
    if shape is None:
        raise InputError(
            f"{type(mesh).__name__} is not a mesh",
            "mesh",
            "Give a Mesh, a dict, text like pp=3,dp=2 or a torch DeviceMesh",
        )
    if not names:
        raise InputError(
            "the DeviceMesh has no axis names",
            "mesh",
            f"Pass mesh_dim_names out of {', '.join(AXES)}",
        )
    sizes: dict[str, Any] = dict(zip(names, (int(n) for n in shape), strict=True))
    order = [name for name in names if sizes[name] > 1]
    if set(names) <= set(AXES) and [n for n in order if n != "pp"] != [a for a in ("dp", "cp", "tp") if a in order]:
        usual = ", ".join(a for a in AXES if a in names)
        raise InputError(
            f"the DeviceMesh has its axes in the order {', '.join(names)}",
            "mesh",
            f"Ranks count through the axes in the order {usual}, pp anywhere: create the DeviceMesh so",
        )
    return {**sizes, "order": "-".join(order)} if order else sizes


def order_of(text: str, larger: Sequence[str]) -> tuple[str, ...]:
    """In which ranks count through the axes. larger: the axes of more than one rank, which have to be named."""
    named = text.split("-")
    ahead = named[: named.index("pp")] if "pp" in named else []
    rest = [a for a in ("dp", "cp", "tp") if a in named] == [a for a in named if a != "pp"]
    left = [axis for axis in larger if axis not in named]
    if not rest or len(set(named)) < len(named) or left:
        raise InputError(
            f"the order of ranks is {text!r}", "mesh",
            "Name the axes larger than 1: dp, cp and tp in this order, and pp where it should be, as in pp-dp-tp",
        )  # fmt: skip
    place = ("dp", "cp", "tp").index(ahead[-1]) + 1 if ahead else 0
    return (*("dp", "cp", "tp")[:place], "pp", *("dp", "cp", "tp")[place:])
