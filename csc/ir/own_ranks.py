"""Components on another number of ranks than others: what a mesh may say of them.

Terms: of a component with pipeline stages of its own `dp * tp` may be less than that of the mesh, or more; the
positions of its stages are *narrow*, or *wide*. There each replica of the mesh has so many tp ranks as divide those
that it has elsewhere, or are a multiple of them.

    check_dp(component, dp, own)                         InputError for what is no size
    tp_ranks(component, dp, own, replicas, tp) -> int    of each replica, for a component's own dp and tp
    check_own_ranks(mesh)                                InputError for ranks that cannot be
    in_order(mesh) -> own_ranks                          in the order of their stages: as given, where these differ
    on_fewer(mesh), on_more(mesh) -> {component: ranks}       those with fewer tp ranks than the mesh, with more
"""

from __future__ import annotations

from typing import Any

from csc.errors import InputError


def check_dp(component: str, dp: Any, own: Any, *whole: Any) -> None:
    """InputError for what is no size."""
    if not all(isinstance(size, int) and size > 0 for size in (dp, own, *whole)):
        raise InputError(
            f"{component} has dp={dp!r} and tp={own!r}", "mesh", "Every axis needs a whole number of at least 1"
        )


def tp_ranks(component: str, dp: int, own: int, replicas: int, tp: int) -> int:
    """InputError if the replicas do not have as many each."""
    if dp * own % replicas:
        raise InputError(
            f"{component} has dp * tp = {dp * own} ranks in a mesh of {replicas} replicas", "mesh",
            f"Each replica has as many: {_fitting(component, dp * own, own, replicas, tp)}",
        )  # fmt: skip
    return dp * own // replicas


def in_order(mesh: Any) -> tuple[tuple[str, int], ...]:
    """See the module. Those with fewer replicas are among them, though they have as many tp ranks as the mesh."""
    dp, given = dict(mesh.own_replicas), dict(mesh.own_ranks)
    given |= {name: mesh.tp for name in dp if name not in given}
    found = [(name, ranks) for name, ranks in given.items() if ranks != mesh.tp or name in dp]
    alike = len({(ranks, dp.get(name, mesh.dp)) for name, ranks in found}) < 2
    return tuple(sorted(found) if alike else found)


def on_fewer(mesh: Any) -> dict[str, int]:
    """See the module."""
    return {component: ranks for component, ranks in mesh.own_ranks if ranks < mesh.tp}


def on_more(mesh: Any) -> dict[str, int]:
    """See the module."""
    return {component: ranks for component, ranks in mesh.own_ranks if ranks > mesh.tp}


def check_own_ranks(mesh: Any) -> None:
    """See the module."""
    tp = dict(mesh.components)
    for component, ranks in mesh.own_ranks:
        own, replicas = tp.get(component, mesh.tp), mesh.dp * mesh.cp // mesh.cp_ranks(component)
        whole = replicas * mesh.tp
        says = f"{component} has dp * tp = {replicas * ranks} in a mesh where dp * tp = {whole}"
        if component not in dict(mesh.own_stages):
            raise InputError(
                f"{says}, and no pipeline stages of its own: all ranks of a stage have its components", "mesh",
                f"The nearest on the same ranks: {component} with tp={own} and dp={max(1, whole // own)}. For ranks of "
                f"its own give {component} a pp, and the components on the other ranks one",
            )  # fmt: skip
        nearest = _fitting(component, replicas * ranks, own, replicas, mesh.tp)
        if ranks > mesh.tp and ranks % mesh.tp:
            raise InputError(
                says, "mesh",
                f"A stage on more ranks has a multiple of tp={mesh.tp} for each replica, which share out its samples, "
                f"each with whole weights (tp=1) or groups that divide them: {nearest}",
            )  # fmt: skip
        if ranks < mesh.tp and (mesh.tp % ranks or own not in (1, ranks)):
            raise InputError(
                says, "mesh",
                f"A stage on fewer ranks has a divisor of tp={mesh.tp} for each replica, which all divide its layers "
                f"or (tp=1) share out its samples: {nearest}",
            )  # fmt: skip
    if mesh.own_ranks and mesh.order.index("tp") < mesh.order.index("pp"):
        raise InputError(
            f"{mesh.own_ranks[0][0]} is on another number of ranks than others, whose order is {'-'.join(mesh.order)}",
            "mesh", "Let tp ranks stand beside each other: put pp in front of tp, or leave the order out",
        )  # fmt: skip


def _fitting(component: str, asked: int, own: int, replicas: int, tp: int) -> str:
    """The nearest number of ranks that a component can be on, in words."""
    known = [(n, own if own in (1, n) else n) for n in range(1, tp + 1) if tp % n == 0 and (own in (1, n) or n == tp)]
    known += [(n, own) for times in (0, 1) if (n := (asked // (replicas * tp) + times) * tp) > tp]
    near, with_tp = min(known, key=lambda one: abs(one[0] * replicas - asked))
    return f"the nearest that fits is {component} with tp={with_tp} and dp={near * replicas // with_tp}"
