"""The mesh: how many ranks there are along each axis.

Terms: *dp* replicas of the data, *pp* pipeline stages, *cp* pieces of a sequence, *tp* pieces of a layer.
Ranks count through the axes in the order dp, pp, cp, tp, the last one fastest: with cp = tp = 1, rank =
dp_index * pp + stage.

    Mesh(dp=1, pp=1, cp=1, tp=1)    .size    .rank_of(dp, pp, cp, tp)    .coordinates(rank)
    Mesh.parse("pp=3,dp=2") -> Mesh
    Mesh.of(Mesh | dict | str | DeviceMesh) -> Mesh
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

from csc.errors import InputError


class Coordinates(NamedTuple):
    """One rank's index on every axis."""

    dp: int
    pp: int
    cp: int
    tp: int


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes. All are at least 1 (InputError otherwise)."""

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
        """Rank at these coordinates. IndexError outside the mesh."""
        rank = 0
        for axis, index in zip(self.AXES, (dp, pp, cp, tp), strict=True):
            size = getattr(self, axis)
            if not 0 <= index < size:
                raise IndexError(f"{axis} index {index} is outside 0..{size - 1} of {self}")
            rank = rank * size + index
        return rank

    def coordinates(self, rank: int) -> Coordinates:
        """Inverse of `rank_of`. IndexError outside the mesh."""
        if not 0 <= rank < self.size:
            raise IndexError(f"rank {rank} is outside 0..{self.size - 1} of {self}")
        found: list[int] = []
        for axis in reversed(self.AXES):
            rank, index = divmod(rank, getattr(self, axis))
            found.append(index)
        return Coordinates(*reversed(found))

    def sharing(self, pp: int) -> tuple[int, ...]:
        """The ranks that hold the same parameters as any rank at index pp of the pipeline: all replicas and pieces."""
        return self.holders((pp,))

    def holders(self, positions: Iterable[int]) -> tuple[int, ...]:
        """The ranks that hold what all these indices of the pipeline hold, those of the first index first."""
        return tuple(self.rank_of(dp=d, pp=p, cp=c) for p in positions for d in range(self.dp) for c in range(self.cp))

    def to_dict(self) -> dict[str, int]:
        """The form that program.json holds."""
        return asdict(self)

    def __str__(self) -> str:
        """`pp=3,dp=2`: what `parse` reads; axes of size 1 are left out."""
        return ",".join(f"{a}={getattr(self, a)}" for a in self.AXES if getattr(self, a) > 1) or "dp=1"

    @classmethod
    def parse(cls, text: str) -> Mesh:
        """Read `pp=3,dp=2`. InputError for anything else."""
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
        """Read any form of a mesh; a torch DeviceMesh is known by its attributes, so that torch is not
        imported here.
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
