"""The mesh: how many ranks there are along each axis.

Terms: *dp* replicas of the data, *pp* pipeline stages, *cp* shards of a sequence, *tp* shards of a layer.
Ranks count through the axes in the order dp, pp, cp, tp, the last one fastest: with cp = tp = 1, rank =
dp_index * pp + stage. Devices fill nodes in the order of ranks, so the last axes stand within a node. `order` puts pp
elsewhere: `dp=8,pp=4,order=pp-dp` has replicas of a stage beside each other, and stages on other nodes. A *narrow*
position has fewer tp ranks than the mesh's tp, a *wide* one more, the ranks of a *shared* one work for several replicas
each; all of these stand in front.

    Mesh(dp=1, pp=1, cp=1, tp=1, order=AXES)    .size    .rank_of(dp, pp, cp, tp)    .coordinates(rank)
    .group(Group.DATA, rank)  .groups(Group.DATA)      lists of ranks: see csc.ir.groups
    .orders()                                          the mesh in every order of ranks, this one first
    Mesh(ranks=64)                  one that csc chooses      .is_open
    .components                                        those that have another tp: (("vision_tower", 1),)
    .divisions  .dividing(component)                   groups within tp: see `Mesh.divisions`
    .own_stages                                        and those with pipeline stages of their own, out of pp
    .own_cp                                            those with another cp: (("vision_tower", 1),)
    .own_ranks                                         of these those on fewer ranks, or more: (("vision_tower", 2),)
    .own_replicas                                      and how many replicas, if fewer: (("vision_tower", 2),)
    .width(position)  .sharers(position)  .receivers(rank, position)  .sender(rank, position)     what that makes of it
    .served(rank, number) -> (replica, microbatch)     whose, of the microbatches of a rank's step
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
from csc.ir.component_meshes import AXES, OWN, own_of, own_words, sizes_by_axis
from csc.ir.groups import Group
from csc.ir.mesh_checks import check_mesh, plain_order
from csc.ir.mesh_words import order_of, sizes_of_device_mesh, sizes_of_text
from csc.ir.own_ranks import check_own_ranks, in_order
from csc.ir.own_replicas import check_order, check_own_replicas, in_front
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
        return self.ranks or self.cp * sum(replicas * width for replicas, width in self._extents)

    @cached_property
    def _extents(self) -> tuple[tuple[int, int], ...]:
        """By position: replicas, and tp ranks of each."""
        stages = dict(self.own_stages)
        ahead = [extent for name, extent in in_front(self).items() for _ in range(stages[name])]
        return (*ahead, *[(self.dp, self.tp)] * (self.pp - len(ahead)))

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
