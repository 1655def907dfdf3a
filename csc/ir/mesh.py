"""The mesh: how many ranks there are along each axis.

Terms: *dp* replicas of the data, *pp* pipeline stages, *cp* shards of a sequence, *tp* shards of a layer.
Ranks count through the axes in the order dp, pp, cp, tp, the last one fastest: with cp = tp = 1, rank =
dp_index * pp + stage.

    Mesh(dp=1, pp=1, cp=1, tp=1)    .size    .rank_of(dp, pp, cp, tp)    .coordinates(rank)
    .group(Group.DATA, rank)  .groups(Group.DATA)      lists of ranks: see csc.ir.groups
    Mesh.parse("pp=3,dp=2") -> Mesh
    Mesh.of(Mesh | dict | str | DeviceMesh) -> Mesh
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product
from typing import Any, ClassVar, NamedTuple

from csc.errors import InputError
from csc.ir.groups import Group


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

    Raises:
        InputError: A size is less than 1.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1

    AXES: ClassVar[tuple[str, ...]] = ("dp", "pp", "cp", "tp")

    def __post_init__(self) -> None:
        for axis in self.AXES:
            size = getattr(self, axis)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise InputError(
                    f"axis {axis} has size {size!r}", "mesh", "Every axis needs a whole number of at least 1"
                )

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.dp * self.pp * self.cp * self.tp

    def rank_of(self, dp: int = 0, pp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """Rank at these coordinates.

        Raises:
            IndexError: They lie outside the mesh.
        """
        rank = 0
        for axis, index in zip(self.AXES, (dp, pp, cp, tp), strict=True):
            size = getattr(self, axis)
            if not 0 <= index < size:
                raise IndexError(f"{axis} index {index} is outside 0..{size - 1} of {self}")
            rank = rank * size + index
        return rank

    def coordinates(self, rank: int) -> Coordinates:
        """Inverse of `rank_of`.

        Raises:
            IndexError: The mesh has no such rank.
        """
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside 0..{self.size - 1} of {self}")
        found: list[int] = []
        for axis in reversed(self.AXES):
            rank, index = divmod(rank, getattr(self, axis))
            found.append(index)
        return Coordinates(*reversed(found))

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
        at = self.coordinates(rank)
        dp, pp, cp, tp = (
            range(size) if axis in what.along else (index,)
            for axis, size, index in zip(self.AXES, astuple(self), at, strict=True)
        )
        if positions is None:
            return tuple(self.rank_of(*one) for one in product(dp, pp, cp, tp))
        return tuple(self.rank_of(d, p, c, t) for p, d, c, t in product(positions, dp, cp, tp))

    def groups(self, what: Group, positions: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
        """All groups of a kind, in the order of their coordinates on the other axes: every rank (with positions: every
        rank there) is in one of them.
        """
        inside = (*what.along, *(["pp"] if positions is not None else []))
        others = product(*(range(1 if axis in inside else getattr(self, axis)) for axis in self.AXES))
        return tuple(self.group(what, self.rank_of(*one), positions) for one in others)

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
        """Of the axes along which groups of this kind run."""
        return tuple(getattr(self, axis) for axis in what.along)

    def to_dict(self) -> dict[str, int]:
        """The form that program.json holds."""
        return asdict(self)

    def __str__(self) -> str:
        """`pp=3,dp=2`: what `parse` reads; axes of size 1 are left out."""
        return ",".join(f"{a}={getattr(self, a)}" for a in self.AXES if getattr(self, a) > 1) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `pp=3,dp=2`.

        Raises:
            InputError: It is anything else.
        """
        form = f"Write NAME=SIZE with commas between, for example pp=3,dp=2; names: {', '.join(cls.AXES)}"
        sizes: dict[str, int] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, equals, size = (p.strip() for p in part.partition("="))
            if not equals or not size.isdecimal():
                raise InputError(f"{part!r} is not NAME=SIZE", f"mesh {text!r}", form)
            if axis not in cls.AXES:
                raise InputError(f"there is no axis {axis!r}", f"mesh {text!r}", form)
            if axis in sizes:
                raise InputError(f"axis {axis} is given twice", f"mesh {text!r}", form)
            sizes[axis] = int(size)
        if not sizes:
            raise InputError("no axis is given", f"mesh {text!r}", form)
        return cls(**sizes)

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, int] | str | Any) -> Mesh:
        """Read any form of a mesh.

        Args:
            mesh: A Mesh, a dict of sizes, text such as `pp=3,dp=2`, or a torch DeviceMesh whose axes have these names
                (it is known by its attributes, so that torch is not imported here).

        Raises:
            InputError: It is none of these, or its axes stand in another order.
        """
        if isinstance(mesh, cls):
            return mesh
        if isinstance(mesh, str):
            return cls.parse(mesh)
        if isinstance(mesh, Mapping):
            return cls._named(dict(mesh))
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
                f"Pass mesh_dim_names out of {', '.join(cls.AXES)}",
            )
        found = cls._named(dict(zip(names, (int(n) for n in shape), strict=True)))
        order = [a for a in cls.AXES if a in names]
        if [n for n in names if n in order and getattr(found, n) > 1] != [a for a in order if getattr(found, a) > 1]:
            raise InputError(
                f"the DeviceMesh has its axes in the order {', '.join(names)}",
                "mesh",
                f"Ranks count through the axes in the order {', '.join(order)}: create the DeviceMesh so",
            )
        return found

    @classmethod
    def _named(cls, sizes: dict[str, int]) -> Mesh:
        unknown = [name for name in sizes if name not in cls.AXES]
        if unknown:
            raise InputError(f"there is no axis {unknown[0]!r}", "mesh", f"The axes are {', '.join(cls.AXES)}")
        return cls(**sizes)
