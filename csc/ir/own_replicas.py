"""Components with fewer replicas than the mesh: what a mesh may say of them.

Terms: a rank of such a component works for several replicas, one after the other: it is given the samples of all of
them, and sends each what it has made of its own. Where its stages stand is a *shared* position.

    fewer(component, dp, replicas) -> bool               whether an own dp is fewer; InputError: no divisor
    in_front(mesh) -> {component: (replicas, tp ranks)}  those whose stages stand in front, in their order
    check_own_replicas(mesh)                             InputError for replicas that cannot be
    check_order(mesh, order) -> order                    InputError: dp, whose sizes differ by position, in front of pp
"""

from __future__ import annotations

from typing import Any

from csc.errors import InputError


def fewer(component: str, dp: int, replicas: int) -> bool:
    """See the module."""
    if dp < replicas and replicas % dp:
        divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
        nearest = min(divisors, key=lambda size: (abs(size - dp), size))
        raise InputError(
            f"{component} has dp={dp} in a mesh of {replicas} replicas, which do not share {dp} ranks evenly", "mesh",
            f"The nearest that fits is {component} with dp={nearest}",
        )  # fmt: skip
    return dp < replicas


def in_front(mesh: Any) -> dict[str, tuple[int, int]]:
    """See the module."""
    dp = dict(mesh.own_replicas)
    return {name: (dp.get(name, mesh.dp), ranks) for name, ranks in mesh.own_ranks}


def check_own_replicas(mesh: Any) -> None:
    """See the module."""
    own, ranks = dict(mesh.components), dict(mesh.own_ranks)
    for component, dp in mesh.own_replicas:
        if not isinstance(dp, int) or not 0 < dp < mesh.dp or not fewer(component, dp, mesh.dp):
            raise InputError(
                f"{component} has dp={dp!r} in a mesh of {mesh.dp} replicas", "mesh",
                f"Give it a divisor of {mesh.dp}, or a multiple, whose ranks share out a replica's samples",
            )  # fmt: skip
        if component not in dict(mesh.own_stages):
            raise InputError(
                f"{component} has dp={dp} in a mesh of {mesh.dp} replicas, and no pipeline stages of its own: all "
                "ranks of a stage have its components", "mesh",
                f"For ranks of its own give {component} a pp, and the components on the other ranks one; or leave its "
                "dp out",
            )  # fmt: skip
        if ranks.get(component, mesh.tp) != own.get(component, mesh.tp) or component in dict(mesh.own_cp):
            raise InputError(
                f"{component} has fewer replicas than the mesh, and shares out the samples of each among ranks", "mesh",
                f"Where dp={dp} of {mesh.dp} replicas share its ranks, let tp of these divide its layers, and leave "
                "its cp out",
            )  # fmt: skip


def check_order(mesh: Any, order: tuple[str, ...]) -> tuple[str, ...]:
    """The order that is asked for. InputError where the mesh has another."""
    if mesh.own_replicas and order[0] != "pp":
        raise InputError(
            f"the order of ranks is {'-'.join(order)}, and {mesh.own_replicas[0][0]} has fewer replicas than the mesh",
            "mesh", "Let the ranks of a position stand beside each other: put pp in front, or leave the order out",
        )  # fmt: skip
    return order
