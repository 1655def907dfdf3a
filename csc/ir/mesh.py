"""The mesh: how many ranks there are along each axis.

Terms: *dp* replicas of the data, *pp* pipeline stages, *cp* shards of a sequence, *tp* shards of a layer.
Ranks count through the axes in the order dp, pp, cp, tp, the last one fastest: with cp = tp = 1, rank =
dp_index * pp + stage. Devices fill nodes in the order of ranks, so the last axes stand within a node. `order` puts pp
elsewhere: `dp=8,pp=4,order=pp-dp` has replicas of a stage beside each other, and stages on other nodes. A *narrow*
position has fewer tp ranks than the mesh's tp, a *wide* one more; all of these stand in front.

    Mesh(dp=1, pp=1, cp=1, tp=1, order=AXES)    .size    .rank_of(dp, pp, cp, tp)    .coordinates(rank)
    .group(Group.DATA, rank)  .groups(Group.DATA)      lists of ranks: see csc.ir.groups
    .orders()                                          the mesh in every order of ranks, this one first
    Mesh(ranks=64)                  one that csc chooses      .is_open
    .components                                        those that have another tp: (("vision_tower", 1),)
    .division  .copies                                 what tp is made of: see `Mesh.division`
    .own_stages                                        and those with pipeline stages of their own, out of pp
    .whole_sequences                                   those with a cp of 1 beside the mesh's: ("vision_tower",)
    .own_ranks                                         of these those on fewer ranks, or more: (("vision_tower", 2),)
    .width(position)  .receivers(rank, position)  .sender(rank, position)      what that makes of tp, and of messages
    Mesh.parse("pp=3,dp=2") -> Mesh
    Mesh.of(Mesh | dict | str | DeviceMesh) -> Mesh
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, ClassVar, NamedTuple

from csc.errors import InputError
from csc.ir.component_meshes import AXES, OWN, check_own_tp, check_size, own_of, own_words, sizes_by_axis
from csc.ir.groups import Group
from csc.ir.mesh_words import order_of, sizes_of_device_mesh, sizes_of_text
from csc.ir.own_ranks import check_own_ranks, in_front
from csc.ir.rank_numbers import RankNumbers


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
            They stand in this order, which matters only where these numbers differ.
        whole_sequences: Components with a cp of 1, and this: the ranks of cp share out its samples.
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
    whole_sequences: tuple[str, ...] = ()

    AXES: ClassVar[tuple[str, ...]] = AXES

    def __post_init__(self) -> None:
        for axis in self.AXES:
            check_size(f"axis {axis}", getattr(self, axis))
        if self.ranks is not None:
            check_size("ranks", self.ranks)
            if any(getattr(self, axis) > 1 for axis in self.AXES):
                given = replace(self, ranks=None)
                raise InputError(
                    f"the mesh has ranks={self.ranks}, for csc to choose the axes, and {given} too", "mesh",
                    "Give either: csc.Mesh(ranks=...) alone, or the sizes of the axes",
                )  # fmt: skip
        if sorted(self.order) != sorted(self.AXES) or [a for a in self.order if a != "pp"] != ["dp", "cp", "tp"]:
            raise InputError(
                f"the order of ranks is {'-'.join(map(str, self.order))}", "mesh",
                "Name dp, cp and tp in this order, and pp where it should be: pp-dp-cp-tp",
            )  # fmt: skip
        for component, tp in self.components:
            check_size(f"axis tp of {component}", tp)
        check_own_tp(self)
        for component, pp in self.own_stages:
            check_size(f"axis pp of {component}", pp)
        told = sum(pp for _, pp in self.own_stages)
        if told > self.pp or (told == self.pp and len(self.own_stages) == 1):
            named = ", ".join(f"{component}.pp={pp}" for component, pp in self.own_stages)
            raise InputError(
                f"{named} leaves none of pp={self.pp} for the other components", "mesh",
                "pp counts all stages: name each component that has some, or leave at least one for the others",
            )  # fmt: skip
        object.__setattr__(self, "order", self._plain_order())
        object.__setattr__(self, "components", tuple(sorted(self.components)))
        object.__setattr__(self, "own_stages", tuple(sorted(self.own_stages)))
        object.__setattr__(self, "own_ranks", in_front([one for one in self.own_ranks if one[1] != self.tp]))
        object.__setattr__(self, "whole_sequences", tuple(sorted(self.whole_sequences)) if self.cp > 1 else ())
        check_own_ranks(self)

    def _plain_order(self) -> tuple[str, ...]:
        """The order, with axes of size 1 where they stand by default."""
        ahead = [axis for axis in self.order[: self.order.index("pp")] if getattr(self, axis) > 1]
        if self.pp == 1 or ahead == ["dp"] or not (ahead or self.dp > 1):
            return self.AXES
        rest = ("dp", "cp", "tp")
        place = rest.index(ahead[-1]) + 1 if ahead else 0
        return (*rest[:place], "pp", *rest[place:])

    @property
    def is_open(self) -> bool:
        """Whether the axes are still to be chosen."""
        return self.ranks is not None

    @property
    def size(self) -> int:
        """Number of ranks."""
        of, stages = dict(self.own_ranks), dict(self.own_stages)
        more = sum((width - self.tp) * stages[name] for name, width in of.items())
        return self.ranks or self.dp * self.cp * (self.pp * self.tp + more)

    @cached_property
    def _widths(self) -> tuple[int, ...]:
        of, stages = dict(self.own_ranks), dict(self.own_stages)
        in_front = [width for name, width in of.items() for _ in range(stages[name])]
        return (*in_front, *[self.tp] * (self.pp - len(in_front)))

    @cached_property
    def _numbers(self) -> RankNumbers:
        return RankNumbers({axis: getattr(self, axis) for axis in self.AXES}, self.order, self._widths)

    def width(self, position: int) -> int:
        """How many tp ranks there are at an index on the pp axis.

        Raises:
            IndexError: There is no such position.
        """
        if not 0 <= position < self.pp:
            raise IndexError(f"pp index {position} is outside 0..{self.pp - 1} of {self}")
        return self._widths[position]

    def rank_of(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Rank at these coordinates.

        Raises:
            IndexError: They lie outside the mesh.
        """
        at = Coordinates(dp, pp, cp, tp)
        for axis in self.AXES:
            index, size = getattr(at, axis), self.width(pp) if axis == "tp" else getattr(self, axis)
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

    def receivers(self, rank: int, position: int) -> tuple[int, ...]:
        """The ranks at a position to which a rank sends what it has made for the stages there: its counterpart; to a
        position with more ranks all whose counterpart it is; to one with fewer nobody, where another has the same to
        send.
        """
        at, there = self.coordinates(rank), self.width(position)
        return tuple(self.rank_of(at.dp, position, at.cp, tp) for tp in range(at.tp, there, self.width(at.pp)))

    def sender(self, rank: int, position: int) -> int:
        """The rank at a position from which a rank receives."""
        at = self.coordinates(rank)
        return self.rank_of(at.dp, position, at.cp, at.tp % self.width(position))

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
        return self._group(what, self.coordinates(rank), positions)

    def _group(self, what: Group, at: Coordinates, positions: Sequence[int] | None) -> tuple[int, ...]:
        """at: of a rank, or of one that would be there if its position had as many as any."""
        dp, cp = (range(getattr(self, axis)) if axis in what.along else (getattr(at, axis),) for axis in ("dp", "cp"))
        everywhere, number = range(self.pp) if "pp" in what.along else (at.pp,), self._numbers.number
        found = tuple(
            number(d, p, c, t)
            for p in (everywhere if positions is None else positions)
            for d, c, t in product(dp, cp, self._parts_of_layers(what, at.tp, p))
        )  # fmt: skip
        return tuple(sorted(found)) if positions is None else found

    def groups(self, what: Group, positions: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, in the order of their coordinates on the other axes: every rank (with positions: every
        rank there) is in one of them.
        """
        inside = (*what.along, *(["pp"] if positions is not None else []))
        dp, pp, cp = (range(1 if axis in inside else getattr(self, axis)) for axis in self.AXES[:-1])
        firsts = []
        for p in pp:
            widest = max(positions or (range(self.pp) if "pp" in inside else [p]), key=self.width)
            parts = range(self.width(widest))
            firsts.append(sorted({self._parts_of_layers(what, part, widest)[0] for part in parts}))
        return tuple(
            self._group(what, Coordinates(d, p, c, part), positions)
            for d, p, c in product(dp, pp, cp)
            for part in firsts[p]
        )

    def _parts_of_layers(self, what: Group, part: int, position: int) -> Sequence[int]:
        """The indices on the tp axis of the ranks of a group at a position, that of a rank with this index."""
        width, along = self.width(position), what.along
        part %= width
        if "tp" in along:
            return range(width)
        first = part // self.division * self.division
        if "copies" in along:
            return range(part - first, width, self.division)
        return range(first, min(first + self.division, width)) if "division" in along else (part,)

    @cached_property
    def division(self) -> int:
        """How many neighbours divide the layers of components with a tp between 1 and the mesh's, or are a narrow
        position's; the mesh's tp without these.
        """
        return next((tp for _, tp in (*self.components, *self.own_ranks) if 1 < tp < self.tp), self.tp)

    @property
    def copies(self) -> int:
        """How many ranks hold the same of such components, at most."""
        return max(map(self.tp_ranks, self.held_in_copies), default=self.tp) // self.division

    @property
    def held_in_copies(self) -> tuple[str, ...]:
        """Those components."""
        own = {**dict.fromkeys(dict(self.own_ranks), self.tp), **dict(self.components)}
        return tuple(component for component, tp in own.items() if 1 < tp < self.tp_ranks(component))

    def tp_ranks(self, component: str) -> int:
        """How many tp ranks of a replica have a component."""
        return dict(self.own_ranks).get(component, self.tp)

    def place(self, axis: str, rank: int) -> int:
        """A rank's index on an axis, or on one of those that tp is made of.

        Raises:
            IndexError: The mesh has no such rank.
        """
        at = self.coordinates(rank)
        copy, part = divmod(at.tp, self.division)
        return {**at._asdict(), "copies": copy, "division": part}[axis]

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of the samples of a step each of these has its share."""
        return tuple(range(self.dp))

    def replica(self, rank: int) -> int:
        """Whose samples a rank is given.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self.coordinates(rank).dp

    def shard(self, rank: int) -> int:
        """Which of the tensor-parallel parts of its layers a rank has.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self.coordinates(rank).tp

    def sizes(self, what: Group) -> tuple[int, ...]:
        """Of the axes along which groups of this kind run; of tp the most that a position has."""
        return tuple(max(self._widths) if axis == "tp" else getattr(self, axis) for axis in what.along)

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
        return replace(found, order=order_of(str(sizes["order"]), larger))
