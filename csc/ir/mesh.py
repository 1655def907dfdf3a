"""The mesh: how many ranks there are along each axis, for the whole model and for components of their own size.

Terms
  axes        *dp* replicas of the data, *pp* pipeline stages, *cp* shards of a sequence, *tp* shards of a layer
  position    an index on the pp axis
  order       ranks count through the axes in the order dp, pp, cp, tp, the last one fastest: with cp = tp = 1,
              rank = dp_index * pp + stage. Devices fill nodes in the order of ranks, so the last axes stand within a
              node. Another order puts pp elsewhere: `dp=8,pp=4,order=pp-dp` has replicas of a stage beside each other,
              and stages on other nodes
  in front    positions of components on another number of ranks than the rest. They are *narrow*, with fewer tp ranks
              for each replica than the mesh's tp, or *wide*, with more, or *shared*, if each rank works for several
              replicas, one after the other
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, NoReturn

from csc.errors import InputError
from csc.ir.groups import Group


def refuse(what: str, remedy: str) -> NoReturn:
    """Raises InputError for a mesh that cannot be."""
    raise InputError(what, "mesh", remedy)


# --- The axes of a component -----------------------------------------------------------------------------------------


AXES = ("dp", "pp", "cp", "tp")
OWN = tuple(f".{axis}" for axis in AXES)  # behind the name of a component, its own


def check_size(what: str, size: object) -> None:
    """InputError for what is no size of an axis."""
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        refuse(f"{what} has size {size!r}", "Every axis needs a whole number of at least 1")


@dataclass(frozen=True)
class Axes:
    """The sizes that a component has of its own; None: as the mesh has.

    Attributes:
        dp: Replicas of its weights. dp * tp is the number of its ranks at a position, which differs from the mesh's
            only if it has a pp of its own. A dp below the mesh's lets each of its ranks work for several replicas.
        pp: Pipeline stages that hold this component alone, among those that the mesh counts.
        cp: Neighbours that share the tokens of its samples, a divisor of the mesh's; groups of these share out samples.
        tp: Neighbours that divide its layers, a divisor of the mesh's; the others hold the same, and share out its
            samples or tokens with these.
    """

    dp: int | None = None
    pp: int | None = None
    cp: int | None = None
    tp: int | None = None

    @classmethod
    def of(cls, component: str, sizes: Axes | Mapping[str, int] | Any) -> Axes:
        """Read the axes of a component, or a dict of their sizes. InputError for anything else, and for a name that no
        text of a mesh can have.
        """
        if not isinstance(component, str) or not component or component.strip() != component or {*component} & {*",="}:
            refuse(f"the mesh names {component!r} as a component", "Name it as the model does, without , and =")
        table = sizes.to_dict() if isinstance(sizes, cls) else sizes
        if not isinstance(table, Mapping) or set(table) - set(AXES):
            refuse(
                f"the mesh has {sizes!r} for {component}",
                'Map components to sizes of axes, {"vision_tower": dict(tp=1, dp=4), "language_model": dict(tp=4)}',
            )
        for axis, size in table.items():
            check_size(f"axis {axis} of {component}", size)
        return cls(**table)

    def to_dict(self) -> dict[str, int]:
        """The sizes that it has."""
        return {axis: size for axis in AXES if (size := getattr(self, axis)) is not None}


WHOLE = Axes()


class Components(Mapping[str, Axes]):
    """Axes by component, in an order of their own: immutable, so that a mesh can be a key."""

    def __init__(self, axes: Mapping[str, Axes] | None = None) -> None:
        self._axes = dict(axes or {})

    def __getitem__(self, component: str) -> Axes:
        return self._axes[component]

    def __iter__(self) -> Iterator[str]:
        return iter(self._axes)

    def __len__(self) -> int:
        return len(self._axes)

    def __eq__(self, other: object) -> bool:
        """With the order: that of components in front is the order of their ranks."""
        return isinstance(other, Mapping) and list(self.items()) == list(other.items())

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(self._axes)


# --- The mesh --------------------------------------------------------------------------------------------------------


class Coordinates(NamedTuple):
    """One rank's index on every axis."""

    dp: int
    pp: int
    cp: int
    tp: int


class Extent(NamedTuple):
    """The ranks of a position, for each index on the cp axis."""

    replicas: int
    """Indices on the dp axis."""
    width: int
    """Tensor-parallel ranks of each."""


class _Stretch(NamedTuple):
    """Positions beside each other that have the same extent."""

    first: int
    extent: Extent
    start: int
    """The first of its ranks, at index 0 of the axes slower than pp."""
    strides: Coordinates
    """How far neighbours along an axis are from each other."""

    def rank(self, dp: int, pp: int, cp: int, tp: int) -> int:
        """The one at these coordinates, which are at one of the positions."""
        of_dp, of_pp, of_cp, of_tp = self.strides
        return self.start + dp * of_dp + (pp - self.first) * of_pp + cp * of_cp + tp * of_tp


_first, _start = attrgetter("first"), attrgetter("start")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes, and of components that have others.

    Attributes:
        dp: Replicas of the data.
        pp: Pipeline stages.
        cp: Shares of a sequence.
        tp: Parts of a layer.
        order: The axes as ranks count through them, the last one fastest: dp, cp and tp in this order, pp anywhere. Of
            axes of size 1 the place says nothing; meshes that differ in that alone are equal.
        ranks: How many ranks a mesh has whose axes are still to be chosen, by csc.compile; None for any other.
        components: By name the `Axes` of components that differ from the mesh's, or a dict of sizes for each. Those on
            another number of ranks come first: so do their stages, in this order, which matters only where their
            numbers of ranks differ. If components have all of pp, those without a pp share the stages of the last one.

    Raises:
        InputError: A size is less than 1, the order is none, axes are given beside `ranks`, or those of a component do
            not fit the mesh's.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    order: tuple[str, ...] = AXES
    ranks: int | None = None
    components: Mapping[str, Axes] = field(default_factory=Components)

    AXES: ClassVar[tuple[str, ...]] = AXES

    def __post_init__(self) -> None:
        """Check the sizes, and leave out what says nothing, so that equal meshes are equal."""
        if not isinstance(self.components, Mapping):
            remedy = 'Map components to sizes of axes: components={"vision_tower": dict(tp=1)}'
            refuse(f"the mesh has components={self.components!r}", remedy)
        axes = {name: Axes.of(name, sizes) for name, sizes in self.components.items()}
        check_sizes(self, axes)
        axes = {
            name: replace(axes_of_component, cp=None if axes_of_component.cp == self.cp else axes_of_component.cp)
            for name, axes_of_component in axes.items()
        }
        check_components(self, axes)
        extents = {name: extent_of(self, axes_of_component) for name, axes_of_component in axes.items()}
        front = [name for name, extent in extents.items() if extent != (self.dp, self.tp)]
        if len({extents[name] for name in front}) == 1:
            front.sort()
        others = {name: replace(axes[name], dp=None) for name in sorted(axes) if name not in front}
        axes = {name: axes[name] for name in front} | {
            name: axes_of_component for name, axes_of_component in others.items() if axes_of_component != WHOLE
        }
        object.__setattr__(self, "components", Components(axes))
        object.__setattr__(self, "order", plain_order(self))
        check_in_front(self)

    # Sizes

    @property
    def is_open(self) -> bool:
        """Whether the axes are still to be chosen."""
        return self.ranks is not None

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return self.ranks or self.cp * sum(positions * math.prod(extent) for positions, extent in self._runs)

    def sizes(self, what: Group) -> tuple[int, ...]:
        """Of the axes along which groups of this kind run; of tp the most that a position has."""
        widest = max(extent.width for _, extent in self._runs)
        within = {"tp": widest, "copies": widest // (what.size or 1), "division": what.size}
        within["sequences"] = self.cp // (what.size or 1)
        return tuple(within[axis] if axis in within else getattr(self, axis) for axis in what.along)

    # Components

    def own(self, axis: str) -> dict[str, int]:
        """The components with a size of their own along an axis, and this, in the order of their names."""
        sizes = ((name, getattr(axes, axis)) for name, axes in sorted(self.components.items()))
        return {name: size for name, size in sizes if size is not None}

    def with_own(self, **sizes: Mapping[str, int]) -> Mesh:
        """This mesh, with these sizes of components along these axes, and of no others along them."""
        names = dict.fromkeys([*self.components, *(name for along in sizes.values() for name in along)])
        axes = {
            name: replace(
                self.components.get(name, WHOLE), **{axis: sizes_here.get(name) for axis, sizes_here in sizes.items()}
            )
            for name in names
        }
        return replace(self, components=axes)

    @cached_property
    def in_front(self) -> dict[str, Extent]:
        """The components on another number of ranks than the rest, in the order of their stages, with their extents."""
        return {name: extent_of(self, axes) for name, axes in self.components.items() if axes.dp is not None}

    @property
    def narrow(self) -> dict[str, int]:
        """The components with fewer tp ranks than the mesh, with these."""
        return {name: extent.width for name, extent in self.in_front.items() if extent.width < self.tp}

    @property
    def wide(self) -> dict[str, int]:
        """The components with more tp ranks than the mesh, with these."""
        return {name: extent.width for name, extent in self.in_front.items() if extent.width > self.tp}

    @property
    def replicas_share_ranks(self) -> bool:
        """Whether ranks of a component work for several replicas."""
        return any(extent.replicas < self.dp for extent in self.in_front.values())

    def extent_of(self, component: str) -> Extent:
        """The extent of the positions that a component is at."""
        return extent_of(self, self.components.get(component, WHOLE))

    def dividing(self, component: str) -> int:
        """How many neighbours divide the layers of a component."""
        return self.components.get(component, WHOLE).tp or self.tp

    @property
    def held_in_copies(self) -> tuple[str, ...]:
        """The components of which several groups of ranks hold the same, and divide it."""
        return tuple(name for name in self.components if 1 < self.dividing(name) < self.extent_of(name).width)

    @cached_property
    def divisions(self) -> tuple[int, ...]:
        """The sizes of the groups within tp: how many neighbours divide the layers of the components that several of
        these hold, or are a narrow position's.
        """
        narrow = {width for width in self.narrow.values() if width > 1}
        return tuple(sorted(narrow | {self.dividing(component) for component in self.held_in_copies}))

    @property
    def graph_key(self) -> tuple[Any, ...]:
        """What the graphs of layers depend on: meshes that differ in replicas and stages alone have the same."""
        widths = tuple((name, extent.width) for name, extent in self.in_front.items())
        return (self.cp, self.tp), tuple(self.own("tp").items()), widths, tuple(self.own("cp").items())

    def one_replica(self) -> Mesh:
        """One replica of this mesh, whose components have as many ranks as those that work for it here."""
        axes = {
            name: replace(axes_here, dp=axes_here.dp and max(1, axes_here.dp // self.dp))
            for name, axes_here in self.components.items()
        }
        return replace(self, dp=1, components=axes)

    def fewest_stages(self) -> Mesh:
        """This mesh with a stage for each component in front, and one for all others."""
        stages = dict.fromkeys(self.in_front, 1)
        axes = {name: replace(axes_here, pp=stages.get(name)) for name, axes_here in self.components.items()}
        return replace(self, pp=1 + len(stages), components=axes)

    # Positions and ranks

    @cached_property
    def _runs(self) -> list[tuple[int, Extent]]:
        """How many positions beside each other have the same extent, in their order."""
        front = [(self.components[name].pp or 0, extent) for name, extent in self.in_front.items()]
        rest = self.pp - sum(positions for positions, _ in front)
        return [*front, (rest, Extent(self.dp, self.tp))] if rest else front

    @cached_property
    def _slower(self) -> tuple[str, ...]:
        """The axes slower than pp: all positions have as many indices on them."""
        return self.order[: self.order.index("pp")]

    @cached_property
    def _ranks_of_one_index(self) -> int:
        """How many ranks there are for one index of the slower axes."""
        return self.size // math.prod(getattr(self, axis) for axis in self._slower)

    @cached_property
    def _stretches(self) -> tuple[_Stretch, ...]:
        """In the order of positions."""
        stretches, first, start = list[_Stretch](), 0, 0
        for positions, extent in self._runs:
            sizes, strides, stride = self._sizes_at(extent), dict[str, int](), 1
            for axis in reversed(self.order):
                strides[axis], stride = stride, self._ranks_of_one_index if axis == "pp" else stride * sizes[axis]
            stretches.append(_Stretch(first, extent, start, Coordinates(**strides)))
            first, start = first + positions, start + positions * strides["pp"]
        return tuple(stretches)

    def _sizes_at(self, extent: Extent) -> dict[str, int]:
        return {"dp": extent.replicas, "cp": self.cp, "tp": extent.width}

    def _stretch(self, position: int) -> _Stretch:
        """The one with a position. IndexError: there is none."""
        if not 0 <= position < self.pp:
            raise IndexError(f"pp index {position} is outside 0..{self.pp - 1} of {self}")
        return self._stretches[bisect(self._stretches, position, key=_first) - 1]

    def extent(self, position: int) -> Extent:
        """How many replicas there are at an index on the pp axis, and tp ranks of each.

        Raises:
            IndexError: There is no such position.
        """
        return self._stretch(position).extent

    def width(self, position: int) -> int:
        """How many tp ranks of a replica there are at an index on the pp axis. IndexError: there is none."""
        return self.extent(position).width

    def sharers(self, position: int) -> int:
        """How many replicas each rank at an index on the pp axis works for. IndexError: there is none."""
        return self.dp // self.extent(position).replicas

    def rank_of(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Rank at these coordinates.

        Raises:
            IndexError: They lie outside the mesh.
        """
        coordinates, sizes = Coordinates(dp, pp, cp, tp), {**self._sizes_at(self.extent(pp)), "pp": self.pp}
        for axis in self.AXES:
            if not 0 <= getattr(coordinates, axis) < sizes[axis]:
                raise IndexError(f"{axis} index {getattr(coordinates, axis)} is outside 0..{sizes[axis] - 1} of {self}")
        return self._stretch(pp).rank(*coordinates)

    def coordinates(self, rank: int) -> Coordinates:
        """Inverse of `rank_of`.

        Raises:
            IndexError: The mesh has no such rank.
            InputError: Its axes are still to be chosen.
        """
        if self.is_open:
            remedy = "csc.compile(model, mesh=csc.Mesh(ranks=...), example=batch) chooses them: compiled.options.mesh"
            refuse(f"the axes of {self} are not chosen yet", remedy)
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside 0..{self.size - 1} of {self}")
        offset = rank % self._ranks_of_one_index  # at index 0 of the slower axes
        stretch = self._stretches[bisect(self._stretches, offset, key=_start) - 1]
        position, inside = divmod(offset - stretch.start, stretch.strides.pp)
        indices = {
            axis: (rank if axis in self._slower else inside) // getattr(stretch.strides, axis) % size
            for axis, size in self._sizes_at(stretch.extent).items()
        }
        return Coordinates(pp=stretch.first + position, **indices)

    def shard(self, rank: int) -> int:
        """Which of the tensor-parallel parts of its layers a rank has.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self.coordinates(rank).tp

    def part(self, component: str, rank: int) -> tuple[int, int]:
        """Which part of a component's layers a rank has, and of how many copies which.

        Raises:
            IndexError: The mesh has no such rank.
        """
        copy, part = divmod(self.coordinates(rank).tp, self.dividing(component))
        return part, copy

    def orders(self) -> list[Mesh]:
        """This mesh, and those of its sizes whose ranks count in another order; tp stays the fastest."""
        places = [("dp", "cp", "tp")[:i] for i in range(3)]
        meshes = [replace(self, order=(*ahead, "pp", *("dp", "cp", "tp")[len(ahead) :])) for ahead in places]
        return list(dict.fromkeys([self, *meshes]))

    # Replicas, and what ranks send each other for them

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of the samples of a step each of these has its share."""
        return tuple(range(self.dp))

    def replicas_of(self, rank: int) -> range:
        """Whose samples a rank works on.

        Raises:
            IndexError: The mesh has no such rank.
        """
        coordinates = self.coordinates(rank)
        several = self.sharers(coordinates.pp)
        return range(coordinates.dp * several, (coordinates.dp + 1) * several)

    def served(self, rank: int, number: int) -> tuple[int, int]:
        """The replica, and its microbatch, of a microbatch of a rank's step: those of the replicas that it works for
        are numbered in turns.
        """
        replicas = self.replicas_of(rank)
        microbatch, place = divmod(number, len(replicas))
        return replicas[place], microbatch

    def receivers(self, rank: int, position: int, replica: int | None = None) -> tuple[int, ...]:
        """The ranks of a replica at a position to which a rank sends what it has made for the stages there: its
        counterpart; to a position with more ranks all whose counterpart it is; to one with fewer nobody, where another
        has the same to send. replica: None: the first that it works for.
        """
        coordinates, width, dp = self.coordinates(rank), self.width(position), self._at(rank, position, replica)
        return tuple(
            self.rank_of(dp, position, coordinates.cp, tp)
            for tp in range(coordinates.tp, width, self.width(coordinates.pp))
        )

    def sender(self, rank: int, position: int, replica: int | None = None) -> int:
        """The rank at a position from which a rank receives what is of a replica; None: the first."""
        coordinates = self.coordinates(rank)
        return self.rank_of(
            self._at(rank, position, replica), position, coordinates.cp, coordinates.tp % self.width(position)
        )

    def _at(self, rank: int, position: int, replica: int | None) -> int:
        """The index on the dp axis of the ranks at a position that work for a replica."""
        return (self.replicas_of(rank)[0] if replica is None else replica) // self.sharers(position)

    # Groups

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
        everywhere, ranks = range(self.pp) if "pp" in what.along else (at.pp,), list[int]()
        for p in everywhere if positions is None else positions:
            stretch = self._stretch(p)
            replicas, width = stretch.extent
            dp = range(replicas) if "dp" in what.along else (at.dp * replicas // self.dp,)
            ranks += [stretch.rank(d, p, c, t) for d, c, t in product(dp, cp, _parts_of_layers(what, at.tp, width))]
        return tuple(sorted(ranks) if positions is None else ranks)

    def groups(self, what: Group, positions: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, in the order of their coordinates on the other axes: every rank (with positions: every
        rank there) is in one of them.
        """
        inside = (*what.along, *(["pp"] if positions is not None else []))
        pp, cp = (range(1 if axis in inside else getattr(self, axis)) for axis in ("pp", "cp"))
        cp = range(what.size) if "sequences" in what.along else cp
        sharers = [1 if "pp" in inside else self.sharers(p) for p in pp]  # replicas that have a group in common
        replicas = self.dp if "dp" not in inside else 1
        firsts = []
        for p in pp:
            widest = max(positions or (range(self.pp) if "pp" in inside else [p]), key=self.width)
            width = self.width(widest)
            firsts.append(sorted({_parts_of_layers(what, part, width)[0] for part in range(width)}))
        return tuple(
            self._group(what, Coordinates(d, p, c, part), positions)
            for d, p, c in product(range(replicas), pp, cp)
            if d % sharers[p] == 0
            for part in firsts[p]
        )

    def place(self, what: Group, rank: int) -> int:
        """A rank's index among those of a group that runs along one axis.

        Raises:
            IndexError: The mesh has no such rank.
        """
        return self.group(what, rank).index(rank)

    # Forms that are written and read

    def to_dict(self) -> dict[str, Any]:
        """The form that program.json holds; the order only where it is not the usual one."""
        if self.is_open:
            return {"ranks": self.ranks}
        sizes: dict[str, Any] = {axis: getattr(self, axis) for axis in self.AXES}
        sizes |= self._own_sizes()
        return sizes if self.order == self.AXES else sizes | {"order": "-".join(self.order)}

    def __str__(self) -> str:
        """`pp=3,dp=2`: what `parse` reads; axes of size 1 are left out."""
        if self.is_open:
            return f"ranks={self.ranks}"
        named = [f"{a}={getattr(self, a)}" for a in self.AXES if getattr(self, a) > 1] or ["dp=1"]
        named += [f"{name}={size}" for name, size in self._own_sizes().items()]
        order = "-".join(axis for axis in self.order if getattr(self, axis) > 1)
        return ",".join(named if self.order == self.AXES else [*named, f"order={order}"])

    def _own_sizes(self) -> dict[str, int]:
        """The sizes of components as texts name them, {"vision.tp": 1, ...}; dp in the order of their positions."""
        own_sizes = {f"{name}.{axis}": size for axis in ("tp", "pp", "cp") for name, size in self.own(axis).items()}
        return own_sizes | {f"{name}.dp": axes.dp for name, axes in self.components.items() if axes.dp is not None}

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
            by_component = any(isinstance(sizes, (Mapping, Axes)) for sizes in mesh.values())
            return cls._by_component(mesh) if by_component else cls._named(mesh)
        return cls._named(sizes_of_device_mesh(mesh))

    @classmethod
    def _named(cls, sizes: Mapping[str, Any]) -> Mesh:
        """From sizes by axis and, as text, the order of some or all axes: the others stand as by default."""
        sizes_of: dict[str, dict[str, Any]] = {}
        for axis in ("dp", "pp", "cp", "tp"):  # dp first, whose order is that of the positions
            for name in [name for name in sizes if str(name).endswith(f".{axis}")]:
                sizes_of.setdefault(name.removesuffix(f".{axis}"), {})[axis] = sizes[name]
        sizes = {name: size for name, size in sizes.items() if not str(name).endswith(OWN)}
        unknown = [name for name in sizes if name not in (*cls.AXES, "order", "ranks")]
        if unknown:
            refuse(f"there is no axis {unknown[0]!r}", f"The axes are {', '.join(cls.AXES)}")
        axes = {name: size for name, size in sizes.items() if name != "order"}
        mesh = cls(**axes, components=sizes_of)  # type: ignore[arg-type]
        if "order" not in sizes:
            return mesh
        larger = [axis for axis in cls.AXES if getattr(mesh, axis) > 1]
        return replace(mesh, order=fitting_order(mesh, order_of(str(sizes["order"]), larger)))

    @classmethod
    def _by_component(cls, meshes: Mapping[str, Any]) -> Mesh:
        """From the sizes of each component: the mesh's are those of the one with the largest tp, of these the one that
        is named last, as its stages are the last; others may have more replicas and fewer parts. Where several name pp,
        each has so many stages of its own, which may have another number of ranks; else all are on the same ranks.
        """
        named = {name: Axes.of(name, sizes) for name, sizes in meshes.items()}
        largest = max(reversed(named), key=lambda name: (named[name].tp or 1, named[name].cp or 1))
        staged = {name: axes.pp for name, axes in named.items() if axes.pp is not None}
        if largest not in staged and staged:  # the largest has what the others leave, which nobody has said
            name = next(iter(staged))
            remedy = f"Give {largest} its pipeline stages too: those of all components are added up"
            refuse(f"{name} has pp={staged[name]} in a mesh where {largest} has no pp", remedy)
        whole = named[largest]
        axes = {
            name: Axes(axes_here.dp or 1, axes_here.pp if len(staged) > 1 else None, axes_here.cp, axes_here.tp or 1)
            for name, axes_here in named.items()
        }
        return cls(whole.dp or 1, sum(staged.values()) or 1, whole.cp or 1, whole.tp or 1, components=axes)


def _parts_of_layers(what: Group, part: int, width: int) -> Sequence[int]:
    """The indices on the tp axis of the ranks of a group at a position of so many, that of a rank with this index."""
    part, along = part % width, what.along
    if "tp" in along:
        return range(width)
    first = part // what.size * what.size if what.size else part
    if "copies" in along:
        return range(part - first, width, what.size)
    return range(first, min(first + what.size, width)) if "division" in along else (part,)


# --- What sizes, orders and components a mesh may have ---------------------------------------------------------------


def extent_of(mesh: Mesh, axes: Axes) -> Extent:
    """The extent of the positions of a component with these axes, if they fit the mesh."""
    tp = axes.tp or mesh.tp
    if axes.dp is None:
        return Extent(mesh.dp, mesh.tp)
    if _fewer_replicas(mesh, axes):
        return Extent(axes.dp, tp)
    return Extent(mesh.dp, axes.dp * tp // _shares(mesh, axes))


def _fewer_replicas(mesh: Mesh, axes: Axes) -> bool:
    """Whether ranks of a component with these axes work for several replicas."""
    return axes.dp is not None and axes.dp < mesh.dp and axes.cp is None


def _shares(mesh: Mesh, axes: Axes) -> int:
    """Among how many groups of ranks the samples of such a component are shared out but for its tp."""
    return mesh.dp * mesh.cp // (axes.cp or mesh.cp)


def check_sizes(mesh: Mesh, components: Mapping[str, Axes]) -> None:
    """Raises InputError for a mesh whose sizes or order of ranks cannot be, and for a tp or cp of a component that does
    not divide the mesh's.
    """
    for axis in AXES:
        check_size(f"axis {axis}", getattr(mesh, axis))
    if mesh.ranks is not None:
        check_size("ranks", mesh.ranks)
        if components or any(getattr(mesh, axis) > 1 for axis in AXES):
            sizes = replace(mesh, ranks=None)
            fault = f"the mesh has ranks={mesh.ranks}, for csc to choose the axes, and {sizes} too"
            refuse(fault, "Give either: csc.Mesh(ranks=...) alone, or the sizes of the axes")
    if sorted(mesh.order) != sorted(AXES) or [a for a in mesh.order if a != "pp"] != ["dp", "cp", "tp"]:
        remedy = "Name dp, cp and tp in this order, and pp where it should be: pp-dp-cp-tp"
        refuse(f"the order of ranks is {'-'.join(map(str, mesh.order))}", remedy)
    for component, axes in components.items():
        if axes.tp is not None and mesh.tp % axes.tp:
            nearest = next(size for size in _divisors(mesh.tp, axes.tp) if size <= axes.tp)
            refuse(
                f"{component} has tp={axes.tp}, and the mesh has tp={mesh.tp}: {mesh.tp} ranks are no groups of "
                f"{axes.tp}",
                f"The nearest that fits is {component}.tp={nearest}, where {nearest} ranks divide its layers and "
                f"{mesh.tp // nearest} share out its samples, or no {component}.tp, where all divide its layers",
            )
        if axes.cp is not None and mesh.cp % axes.cp:
            nearest = next(size for size in _divisors(mesh.cp, axes.cp) if size <= axes.cp)
            refuse(
                f"{component} has cp={axes.cp} in a mesh of cp={mesh.cp}: {mesh.cp} ranks are no groups of {axes.cp}",
                f"The nearest that fits is {component}.cp={nearest}, where {nearest} ranks share the tokens of its "
                f"samples and {mesh.cp // nearest} groups of these share out its samples",
            )


def _divisors(whole: int, near: int) -> list[int]:
    """The divisors of a whole, those nearest to a size first."""
    small = [size for size in range(1, math.isqrt(whole) + 1) if whole % size == 0]
    return sorted({*small, *(whole // size for size in small)}, key=lambda size: (abs(size - near), size))


def check_components(mesh: Mesh, components: Mapping[str, Axes]) -> None:
    """Raises InputError for stages of components that the mesh does not have, and for a dp whose ranks replicas cannot
    have as many of each.
    """
    stages = {component: axes.pp for component, axes in components.items() if axes.pp is not None}
    stages_named = sum(stages.values())
    if stages_named > mesh.pp or (stages_named == mesh.pp and len(stages) == 1):
        named = ", ".join(f"{component}.pp={pp}" for component, pp in stages.items())
        remedy = "pp counts all stages: name each component that has some, or leave at least one for the others"
        refuse(f"{named} leaves none of pp={mesh.pp} for the other components", remedy)
    for component, axes in components.items():
        if axes.dp is None:
            continue
        tp, shares = axes.tp or mesh.tp, _shares(mesh, axes)
        if _fewer_replicas(mesh, axes) and mesh.dp % axes.dp:
            nearest = _divisors(mesh.dp, near=axes.dp)[0]
            fault = f"{component} has dp={axes.dp} in a mesh of {mesh.dp} replicas, which do not share {axes.dp} ranks "
            refuse(f"{fault}evenly", f"The nearest that fits is {component} with dp={nearest}")
        if not _fewer_replicas(mesh, axes) and axes.dp * tp % shares:
            fitting = _fitting(component, axes.dp * tp, tp, shares, mesh.tp)
            fault = f"{component} has dp * tp = {axes.dp * tp} ranks in a mesh of {shares} replicas"
            refuse(fault, f"Each replica has as many: {fitting}")


def check_in_front(mesh: Mesh) -> None:
    """Raises InputError for a component on another number of ranks that no stage can have."""
    for component, (replicas, width) in mesh.in_front.items():
        axes = mesh.components[component]
        tp, shares = axes.tp or mesh.tp, _shares(mesh, axes)
        whole = shares * mesh.tp
        says = f"{component} has dp * tp = {shares * width} in a mesh where dp * tp = {whole}"
        nearest = _fitting(component, shares * width, tp, shares, mesh.tp)
        if axes.pp is None and replicas < mesh.dp:
            refuse(
                f"{component} has dp={replicas} in a mesh of {mesh.dp} replicas, and no pipeline stages of its own: "
                "all ranks of a stage have its components",
                f"For ranks of its own give {component} a pp, and the components on the other ranks one; or leave its "
                "dp out",
            )
        if axes.pp is None:
            refuse(
                f"{says}, and no pipeline stages of its own: all ranks of a stage have its components",
                f"The nearest on the same ranks: {component} with tp={tp} and dp={max(1, whole // tp)}. For ranks of "
                f"its own give {component} a pp, and the components on the other ranks one",
            )
        if width > mesh.tp and width % mesh.tp:
            refuse(
                says,
                f"A stage on more ranks has a multiple of tp={mesh.tp} for each replica, which share out its samples, "
                f"each with whole weights (tp=1) or groups that divide them: {nearest}",
            )
        if width < mesh.tp and (mesh.tp % width or tp not in (1, width)):
            refuse(
                says,
                f"A stage on fewer ranks has a divisor of tp={mesh.tp} for each replica, which all divide its layers "
                f"or (tp=1) share out its samples: {nearest}",
            )
        if mesh.order.index("tp") < mesh.order.index("pp"):
            refuse(
                f"{component} is on another number of ranks than others, whose order is {'-'.join(mesh.order)}",
                "Let tp ranks stand beside each other: put pp in front of tp, or leave the order out",
            )


def _fitting(component: str, ranks_asked: int, own: int, replicas: int, tp: int) -> str:
    """The nearest number of ranks that a component can be on, in words."""
    known = [(n, own if own in (1, n) else n) for n in sorted(_divisors(tp, tp)) if own in (1, n) or n == tp]
    known += [(n, own) for times in (0, 1) if (n := (ranks_asked // (replicas * tp) + times) * tp) > tp]
    near, with_tp = min(known, key=lambda ranks: abs(ranks[0] * replicas - ranks_asked))
    return f"the nearest that fits is {component} with tp={with_tp} and dp={near * replicas // with_tp}"


def plain_order(mesh: Mesh) -> tuple[str, ...]:
    """Returns the order of the axes, with axes of size 1 where they stand by default. Where positions have different
    numbers of replicas, pp is in front of dp.
    """
    if mesh.replicas_share_ranks:
        return ("pp", "dp", "cp", "tp")
    ahead = [axis for axis in mesh.order[: mesh.order.index("pp")] if getattr(mesh, axis) > 1]
    if mesh.pp == 1 or ahead == ["dp"] or not (ahead or mesh.dp > 1):
        return AXES
    return _pp_behind(ahead)


def fitting_order(mesh: Mesh, order: tuple[str, ...]) -> tuple[str, ...]:
    """The order that is asked for. InputError where the mesh has another."""
    if mesh.replicas_share_ranks and order[0] != "pp":
        component = next(name for name, extent in sorted(mesh.in_front.items()) if extent.replicas < mesh.dp)
        refuse(
            f"the order of ranks is {'-'.join(order)}, and {component} has fewer replicas than the mesh",
            "Let the ranks of a position stand beside each other: put pp in front, or leave the order out",
        )
    return order


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
        fault = f"{type(mesh).__name__} is not a mesh"
        refuse(fault, "Give a Mesh, a dict, text like pp=3,dp=2 or a torch DeviceMesh")
    if not names:
        refuse("the DeviceMesh has no axis names", f"Pass mesh_dim_names out of {', '.join(AXES)}")
    sizes: dict[str, Any] = dict(zip(names, (int(n) for n in shape), strict=True))
    order = [name for name in names if sizes[name] > 1]
    if set(names) <= set(AXES) and [n for n in order if n != "pp"] != [a for a in ("dp", "cp", "tp") if a in order]:
        usual = ", ".join(a for a in AXES if a in names)
        remedy = f"Ranks count through the axes in the order {usual}, pp anywhere: create the DeviceMesh so"
        refuse(f"the DeviceMesh has its axes in the order {', '.join(names)}", remedy)
    return {**sizes, "order": "-".join(order)} if order else sizes


def order_of(text: str, larger: Sequence[str]) -> tuple[str, ...]:
    """In which ranks count through the axes. larger: the axes of more than one rank, which have to be named."""
    named = text.split("-")
    ahead = named[: named.index("pp")] if "pp" in named else []
    rest = [a for a in ("dp", "cp", "tp") if a in named] == [a for a in named if a != "pp"]
    left = [axis for axis in larger if axis not in named]
    if not rest or len(set(named)) < len(named) or left:
        remedy = "Name the axes larger than 1: dp, cp and tp in this order, and pp where it should be, as in pp-dp-tp"
        refuse(f"the order of ranks is {text!r}", remedy)
    return _pp_behind(ahead)


def _pp_behind(ahead: Sequence[str]) -> tuple[str, ...]:
    """The order of all axes in which pp stands behind the last of these."""
    rest = ("dp", "cp", "tp")
    place = rest.index(ahead[-1]) + 1 if ahead else 0
    return (*rest[:place], "pp", *rest[place:])
