"""The mesh: how many ranks there are along each axis."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product
from typing import Any, ClassVar, NamedTuple

from csc.errors import InputError
from csc.ir.groups import Group

# --- How ranks are numbered on a mesh, some positions of which may have fewer ranks than others ----------------------


class RankNumbers:
    """Ranks count through the axes in their order, the last one fastest. An axis whose sizes differ comes behind pp."""

    def __init__(self, order: Sequence[str], sizes: Sequence[Mapping[str, int]]) -> None:
        place = order.index("pp")
        self._slower, self._faster = order[:place], order[place + 1 :]  # than pp
        self._sizes = sizes
        each = (math.prod(of[axis] for axis in self._faster) for of in self._sizes)
        self._starts = (0, *accumulate(each))  # of positions, for one index of the slower axes
        self._strides = [self._apart(of) for of in self._sizes]

    def _apart(self, sizes: Mapping[str, int]) -> tuple[int, int, int]:
        """How far neighbours along dp, cp and tp are."""
        found: dict[str, int] = {}
        for axes, each in ((self._faster, 1), (self._slower, self._starts[-1])):
            for axis in reversed(axes):
                found[axis], each = each, each * sizes[axis]
        return found["dp"], found["cp"], found["tp"]

    def number(self, dp: int, pp: int, cp: int, tp: int) -> int:
        """The rank there."""
        of_dp, of_cp, of_tp = self._strides[pp]
        return self._starts[pp] + dp * of_dp + cp * of_cp + tp * of_tp

    def place(self, rank: int) -> dict[str, int]:
        """Inverse of `number`."""
        ahead, rank = divmod(rank, self._starts[-1])
        position = bisect_right(self._starts, rank) - 1
        found, sizes = {"pp": position}, self._sizes[position]
        for axes, index in ((self._slower, ahead), (self._faster, rank - self._starts[position])):
            for axis in reversed(axes):
                index, found[axis] = divmod(index, sizes[axis])
        return found


# --- Components on another number of ranks than others: what a mesh may say of them ----------------------------------
#
# Terms: of a component with pipeline stages of its own `dp * tp` may be less than that of the mesh, or more; the
# positions of its stages are *narrow*, or *wide*. There each replica of the mesh has so many tp ranks as divide those
# that it has elsewhere, or are a multiple of them.


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
    """Returns the components with tp ranks of their own, as (component, tp ranks), in the order of their stages: as
    given where their ranks or replicas differ, else by name. Those with fewer replicas are among them, though they have
    as many tp ranks as the mesh.
    """
    dp, given = dict(mesh.own_replicas), dict(mesh.own_ranks)
    given |= {name: mesh.tp for name in dp if name not in given}
    found = [(name, ranks) for name, ranks in given.items() if ranks != mesh.tp or name in dp]
    alike = len({(ranks, dp.get(name, mesh.dp)) for name, ranks in found}) < 2
    return tuple(sorted(found) if alike else found)


def on_fewer(mesh: Any) -> dict[str, int]:
    """Returns the components with fewer tp ranks than the mesh, with these."""
    return {component: ranks for component, ranks in mesh.own_ranks if ranks < mesh.tp}


def on_more(mesh: Any) -> dict[str, int]:
    """Returns the components with more tp ranks than the mesh, with these."""
    return {component: ranks for component, ranks in mesh.own_ranks if ranks > mesh.tp}


def check_own_ranks(mesh: Any) -> None:
    """Raises InputError for a component whose own number of ranks no stage can have."""
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


# --- Components with fewer replicas than the mesh: what a mesh may say of them ---------------------------------------
#
# Terms: a rank of such a component works for several replicas, one after the other: it is given the samples of all of
# them, and sends each what it has made of its own. Where its stages stand is a *shared* position.


def fewer(component: str, dp: int, replicas: int) -> bool:
    """Returns whether a component's own dp is fewer than the replicas of the mesh. Raises InputError where it is, and
    is no divisor of them.
    """
    if dp < replicas and replicas % dp:
        divisors = [size for size in range(1, replicas + 1) if replicas % size == 0]
        nearest = min(divisors, key=lambda size: (abs(size - dp), size))
        raise InputError(
            f"{component} has dp={dp} in a mesh of {replicas} replicas, which do not share {dp} ranks evenly", "mesh",
            f"The nearest that fits is {component} with dp={nearest}",
        )  # fmt: skip
    return dp < replicas


def in_front(mesh: Any) -> dict[str, tuple[int, int]]:
    """Returns the components whose stages stand in front, in their order, each with its (replicas, tp ranks)."""
    dp = dict(mesh.own_replicas)
    return {name: (dp.get(name, mesh.dp), ranks) for name, ranks in mesh.own_ranks}


def check_own_replicas(mesh: Any) -> None:
    """Raises InputError for a component whose own number of replicas cannot be."""
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


# --- Components whose layers fewer tensor-parallel ranks divide than those of the largest ----------------------------
#
# Here is what a mesh may say of them.
#
# Terms: a component's *own tp* divides that of the mesh. So many neighbours divide its layers; the others hold the
# same, and share out its samples or tokens with these.


AXES = ("dp", "pp", "cp", "tp")
OWN = (".tp", ".pp", ".dp", ".cp")  # behind the name of a component, its own


def check_own_tp(mesh: Any) -> None:
    """Raises InputError for a component whose own tp does not divide the mesh's tp."""
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
    """Returns the sizes that components have of their own, as texts name them: {"vision.tp": 1, ...}."""
    tp = dict(mesh.components)
    found = {f"{name}.tp": size for name, size in mesh.components}
    found |= {f"{name}.pp": size for name, size in mesh.own_stages}
    found |= {f"{name}.cp": size for name, size in mesh.own_cp}
    for name, ranks in mesh.own_ranks:
        replicas = mesh.dp * mesh.cp // mesh.cp_ranks(name)
        found[f"{name}.dp"] = replicas * ranks // tp.get(name, mesh.tp)
    return found | {f"{name}.dp": dp for name, dp in mesh.own_replicas}


def own_of(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sizes such as {"vision.tp": 1} as the fields of a Mesh: the inverse of `own_words`. sizes: those of the
    mesh are among them. Raises InputError for a cp or a dp that does not fit.
    """
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


# --- What sizes, orders and stages a mesh may have, whatever its components ------------------------------------------


def check_mesh(mesh: Any) -> None:
    """Raises InputError for a mesh whose sizes, order of ranks or stages of components cannot be."""
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
    """Returns the order of the axes, with axes of size 1 where they stand by default. Where positions have different
    numbers of replicas, pp is in front of dp.
    """
    if mesh.own_replicas:
        return ("pp", "dp", "cp", "tp")
    ahead = [axis for axis in mesh.order[: mesh.order.index("pp")] if getattr(mesh, axis) > 1]
    if mesh.pp == 1 or ahead == ["dp"] or not (ahead or mesh.dp > 1):
        return AXES
    rest = ("dp", "cp", "tp")
    place = rest.index(ahead[-1]) + 1 if ahead else 0
    return (*rest[:place], "pp", *rest[place:])


# --- Forms of a mesh that are read: text, and torch's DeviceMesh -----------------------------------------------------
#
# InputError for what is neither.


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


# --- The mesh: how many ranks there are along each axis --------------------------------------------------------------
#
# Terms: *dp* replicas of the data, *pp* pipeline stages, *cp* shards of a sequence, *tp* shards of a layer. Ranks
# count through the axes in the order dp, pp, cp, tp, the last one fastest: with cp = tp = 1, rank = dp_index * pp +
# stage. Devices fill nodes in the order of ranks, so the last axes stand within a node. `order` puts pp elsewhere:
# `dp=8,pp=4,order=pp-dp` has replicas of a stage beside each other, and stages on other nodes. A *narrow* position has
# fewer tp ranks than the mesh's tp, a *wide* one more, the ranks of a *shared* one work for several replicas each; all
# of these stand in front.


class Coordinates(NamedTuple):
    """One rank's index on every axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes.

    Attributes:
        dp: Replicas of the data.
        pp: Pipeline stages.
        cp: Shares of a sequence.
        tp: Parts of a layer.
        order: The axes as ranks count through them, the last one fastest: dp, cp and tp in this order, pp anywhere. Of
            axes of size 1 the place says nothing; meshes that differ in that alone are equal.
        components: Components with a tp of their own, and this; on the same ranks, which share out its samples instead.
        own_stages: Components with pipeline stages of their own, and how many of the pp; the others share the rest, or
            if nothing is left those of the last one.
        own_ranks: Of these, components on fewer ranks or more, and how many tp ranks each replica has at their stages.
            They stand in this order, which matters only where their ranks differ.
        own_replicas: Of these, components with fewer replicas than the mesh, and how many: each of their ranks works
            for as many of the mesh's, one after the other.
        own_cp: Components with a cp of their own, and this: neighbours that share the tokens of its samples, which
            groups of these share out.
        ranks: How many ranks a mesh has whose axes are still to be chosen, by csc.compile; None for any other.

    Raises:
        InputError: A size is less than 1, the order is none, or axes are given beside `ranks`.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    order: tuple[str, ...] = ("dp", "pp", "cp", "tp")
    ranks: int | None = None
    components: tuple[tuple[str, int], ...] = ()
    own_stages: tuple[tuple[str, int], ...] = ()
    own_ranks: tuple[tuple[str, int], ...] = ()
    own_replicas: tuple[tuple[str, int], ...] = ()
    own_cp: tuple[tuple[str, int], ...] = ()

    AXES: ClassVar[tuple[str, ...]] = AXES

    def __post_init__(self) -> None:
        check_mesh(self)
        object.__setattr__(self, "own_replicas", tuple(sorted(one for one in self.own_replicas if one[1] != self.dp)))
        object.__setattr__(self, "order", plain_order(self))
        object.__setattr__(self, "components", tuple(sorted(self.components)))
        object.__setattr__(self, "own_stages", tuple(sorted(self.own_stages)))
        object.__setattr__(self, "own_ranks", in_order(self))
        object.__setattr__(self, "own_cp", tuple(sorted(one for one in self.own_cp if one[1] != self.cp)))
        check_own_replicas(self)
        check_own_ranks(self)

    @property
    def is_open(self) -> bool:
        """Whether the axes are still to be chosen."""
        return self.ranks is not None

    @property
    def size(self) -> int:
        """Number of ranks."""
        ahead = self._ahead
        others = (self.pp - len(ahead)) * self.dp * self.tp
        return self.ranks or self.cp * (sum(replicas * width for replicas, width in ahead) + others)

    @cached_property
    def _ahead(self) -> list[tuple[int, int]]:
        """As `_extents`, of the positions in front that have sizes of their own."""
        stages = dict(self.own_stages)
        return [extent for name, extent in in_front(self).items() for _ in range(stages[name])]

    @cached_property
    def _extents(self) -> tuple[tuple[int, int], ...]:
        """By position: replicas, and tp ranks of each."""
        return (*self._ahead, *[(self.dp, self.tp)] * (self.pp - len(self._ahead)))

    @cached_property
    def _numbers(self) -> RankNumbers:
        return RankNumbers(self.order, [{"dp": dp, "cp": self.cp, "tp": tp} for dp, tp in self._extents])

    def width(self, position: int) -> int:
        """How many tp ranks of a replica there are at an index on the pp axis. IndexError: there is none."""
        return self.extent(position)[1]

    def sharers(self, position: int) -> int:
        """How many replicas each rank at an index on the pp axis works for. IndexError: there is none."""
        return self.dp // self.extent(position)[0]

    def extent(self, position: int) -> tuple[int, int]:
        """How many replicas there are at an index on the pp axis, and tp ranks of each.

        Raises:
            IndexError: There is no such position.
        """
        if not 0 <= position < self.pp:
            raise IndexError(f"pp index {position} is outside 0..{self.pp - 1} of {self}")
        return self._extents[position]

    def rank_of(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Rank at these coordinates.

        Raises:
            IndexError: They lie outside the mesh.
        """
        at = Coordinates(dp, pp, cp, tp)
        replicas, width = self.extent(pp)
        for axis, size in zip(self.AXES, (replicas, self.pp, self.cp, width), strict=True):
            index = getattr(at, axis)
            if not 0 <= index < size:
                raise IndexError(f"{axis} index {index} is outside 0..{size - 1} of {self}")
        return self._numbers.number(dp, pp, cp, tp)

    def coordinates(self, rank: int) -> Coordinates:
        """Inverse of `rank_of`.

        Raises:
            IndexError: The mesh has no such rank.
            InputError: Its axes are still to be chosen.
        """
        if self.is_open:
            raise InputError(
                f"the axes of {self} are not chosen yet", "mesh",
                "csc.compile(model, mesh=csc.Mesh(ranks=...), example=batch) chooses them: compiled.options.mesh",
            )  # fmt: skip
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside 0..{self.size - 1} of {self}")
        return Coordinates(**self._numbers.place(rank))

    def served(self, rank: int, number: int) -> tuple[int, int]:
        """The replica, and its microbatch, of a microbatch of a rank's step: those of the replicas that it works for
        are numbered in turns.
        """
        at = self.coordinates(rank)
        microbatch, place = divmod(number, self.sharers(at.pp))
        return at.dp * self.sharers(at.pp) + place, microbatch

    def receivers(self, rank: int, position: int, replica: int | None = None) -> tuple[int, ...]:
        """The ranks of a replica at a position to which a rank sends what it has made for the stages there: its
        counterpart; to a position with more ranks all whose counterpart it is; to one with fewer nobody, where another
        has the same to send. replica: None: the first that it works for.
        """
        at, there, dp = self.coordinates(rank), self.width(position), self._at(rank, position, replica)
        return tuple(self.rank_of(dp, position, at.cp, tp) for tp in range(at.tp, there, self.width(at.pp)))

    def sender(self, rank: int, position: int, replica: int | None = None) -> int:
        """The rank at a position from which a rank receives what is of a replica; None: the first."""
        at = self.coordinates(rank)
        return self.rank_of(self._at(rank, position, replica), position, at.cp, at.tp % self.width(position))

    def _at(self, rank: int, position: int, replica: int | None) -> int:
        """The index on the dp axis of the ranks at a position that work for a replica."""
        return (self.replicas_of(rank)[0] if replica is None else replica) // self.sharers(position)

    def group(self, what: Group, rank: int, positions: Sequence[int] | None = None) -> tuple[int, ...]:
        """The ranks of the group of this kind that `rank` is in, ascending.

        Args:
            what: The kind of group; see csc.ir.groups.
            rank: One of its ranks.
            positions: Indices on the pp axis. Then the group's ranks at each of these, in this order, wherever `rank`
                is itself: of the holders of a tied parameter those of its first position come first.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self._group(what, self.coordinates(rank)._replace(dp=self.replicas_of(rank)[0]), positions)

    def _group(self, what: Group, at: Coordinates, positions: Sequence[int] | None) -> tuple[int, ...]:
        """at: of a rank, or of one that would be there if its position had as many as any; its dp is a replica."""
        cp = range(self.cp) if "cp" in what.along else (at.cp,)
        cp = range(at.cp % what.size, self.cp, what.size) if "sequences" in what.along else cp
        everywhere, number = range(self.pp) if "pp" in what.along else (at.pp,), self._numbers.number
        found = tuple(
            number(d, p, c, t)
            for p in (everywhere if positions is None else positions)
            for d in (range(self.extent(p)[0]) if "dp" in what.along else (at.dp // self.sharers(p),))
            for c, t in product(cp, self._parts_of_layers(what, at.tp, p))
        )  # fmt: skip
        return tuple(sorted(found)) if positions is None else found

    def groups(self, what: Group, positions: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, in the order of their coordinates on the other axes: every rank (with positions: every
        rank there) is in one of them.
        """
        inside = (*what.along, *(["pp"] if positions is not None else []))
        pp, cp = (range(1 if axis in inside else getattr(self, axis)) for axis in ("pp", "cp"))
        cp = range(what.size) if "sequences" in what.along else cp
        each = [1 if "pp" in inside else self.sharers(p) for p in pp]  # replicas that have a group in common
        replicas = self.dp if "dp" not in inside else 1
        firsts = []
        for p in pp:
            widest = max(positions or (range(self.pp) if "pp" in inside else [p]), key=self.width)
            parts = range(self.width(widest))
            firsts.append(sorted({self._parts_of_layers(what, part, widest)[0] for part in parts}))
        return tuple(
            self._group(what, Coordinates(d, p, c, part), positions)
            for d, p, c in product(range(replicas), pp, cp)
            if d % each[p] == 0
            for part in firsts[p]
        )

    def _parts_of_layers(self, what: Group, part: int, position: int) -> Sequence[int]:
        """The indices on the tp axis of the ranks of a group at a position, that of a rank with this index."""
        width, along = self.width(position), what.along
        part %= width
        if "tp" in along:
            return range(width)
        first = part // what.size * what.size if what.size else part
        if "copies" in along:
            return range(part - first, width, what.size)
        return range(first, min(first + what.size, width)) if "division" in along else (part,)

    @cached_property
    def divisions(self) -> tuple[int, ...]:
        """The sizes of the groups within tp: how many neighbours divide the layers of the components that several of
        these hold, or are a narrow position's.
        """
        narrow = {ranks for _, ranks in self.own_ranks if 1 < ranks < self.tp}
        return tuple(sorted(narrow | {self.dividing(component) for component in self.held_in_copies}))

    def dividing(self, component: str) -> int:
        """How many neighbours divide the layers of a component."""
        return dict(self.components).get(component, min(self.tp, self.tp_ranks(component)))

    @property
    def held_in_copies(self) -> tuple[str, ...]:
        """The components of which several groups of ranks hold the same, and divide it."""
        own = {**dict.fromkeys(dict(self.own_ranks), self.tp), **dict(self.components)}
        return tuple(component for component, tp in own.items() if 1 < tp < self.tp_ranks(component))

    def cp_ranks(self, component: str) -> int:
        """How many cp ranks share the tokens of a component's samples."""
        return dict(self.own_cp).get(component, self.cp)

    def tp_ranks(self, component: str) -> int:
        """How many tp ranks of a replica have a component."""
        return dict(self.own_ranks).get(component, self.tp)

    def place(self, what: Group, rank: int) -> int:
        """A rank's index among those of a group that runs along one axis.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self.group(what, rank).index(rank)

    def part(self, component: str, rank: int) -> tuple[int, int]:
        """Which part of a component's layers a rank has, and of how many copies which.

        Raises:
            IndexError: The mesh has no such rank.
        """
        copy, part = divmod(self.coordinates(rank).tp, self.dividing(component))
        return part, copy

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of the samples of a step each of these has its share."""
        return tuple(range(self.dp))

    def replicas_of(self, rank: int) -> range:
        """Whose samples a rank works on.

        Raises:
            IndexError: The mesh has no such rank.
        """
        at = self.coordinates(rank)
        several = self.sharers(at.pp)
        return range(at.dp * several, (at.dp + 1) * several)

    def shard(self, rank: int) -> int:
        """Which of the tensor-parallel parts of its layers a rank has.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self.coordinates(rank).tp

    def sizes(self, what: Group) -> tuple[int, ...]:
        """Of the axes along which groups of this kind run; of tp the most that a position has."""
        widest = max(width for _, width in self._extents)
        within = {"tp": widest, "copies": widest // (what.size or 1), "division": what.size}
        within["sequences"] = self.cp // (what.size or 1)
        return tuple(within[axis] if axis in within else getattr(self, axis) for axis in what.along)

    def orders(self) -> list[Mesh]:
        """This mesh, and those of its sizes whose ranks count in another order; tp stays the fastest."""
        places = [("dp", "cp", "tp")[:i] for i in range(3)]
        found = [replace(self, order=(*ahead, "pp", *("dp", "cp", "tp")[len(ahead) :])) for ahead in places]
        return list(dict.fromkeys([self, *found]))

    def to_dict(self) -> dict[str, Any]:
        """The form that program.json holds; the order only where it is not the usual one."""
        if self.is_open:
            return {"ranks": self.ranks}
        sizes: dict[str, Any] = {axis: getattr(self, axis) for axis in self.AXES}
        sizes |= own_words(self)
        return sizes if self.order == self.AXES else sizes | {"order": "-".join(self.order)}

    def __str__(self) -> str:
        """`pp=3,dp=2`: what `parse` reads; axes of size 1 are left out."""
        if self.is_open:
            return f"ranks={self.ranks}"
        named = [f"{a}={getattr(self, a)}" for a in self.AXES if getattr(self, a) > 1] or ["dp=1"]
        named += [f"{name}={size}" for name, size in own_words(self).items()]
        order = "-".join(axis for axis in self.order if getattr(self, axis) > 1)
        return ",".join(named if self.order == self.AXES else [*named, f"order={order}"])

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `pp=3,dp=2`.

        Raises:
            InputError: It is anything else.
        """
        return cls._named(sizes_of_text(text))

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, int] | str | Any) -> Mesh:
        """Read any form of a mesh.

        Args:
            mesh: A Mesh, a dict of sizes, one of such dicts by component, text such as `pp=3,dp=2`, or a torch
                DeviceMesh whose axes have these names (it is known by its attributes, so that torch is not imported).

        Raises:
            InputError: It is none of these, or its axes stand in an order that no `order` names.
        """
        if isinstance(mesh, cls):
            return mesh
        if isinstance(mesh, str):
            return cls.parse(mesh)
        if isinstance(mesh, Mapping):
            return cls._named(
                sizes_by_axis(mesh, cls) if any(isinstance(one, Mapping) for one in mesh.values()) else dict(mesh)
            )
        return cls._named(sizes_of_device_mesh(mesh))

    @classmethod
    def _named(cls, sizes: Mapping[str, Any]) -> Mesh:
        """From sizes by axis and, as text, the order of some or all axes: the others stand as by default."""
        own = own_of(sizes)
        sizes = {name: size for name, size in sizes.items() if not name.endswith(OWN)}
        unknown = [name for name in sizes if name not in (*cls.AXES, "order", "ranks")]
        if unknown:
            raise InputError(f"there is no axis {unknown[0]!r}", "mesh", f"The axes are {', '.join(cls.AXES)}")
        axes = {name: size for name, size in sizes.items() if name != "order"}
        found = cls(**axes, **own)
        if "order" not in sizes:
            return found
        larger = [axis for axis in cls.AXES if getattr(found, axis) > 1]
        return replace(found, order=check_order(found, order_of(str(sizes["order"]), larger)))
