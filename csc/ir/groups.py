"""Groups of ranks, and how a tensor lies on them.

Terms: the ranks of a *group* have the same index on every axis but those *along* which the group runs. What kinds of
groups there are is listed here and nowhere else; `Mesh.group` makes the lists of ranks. A tensor is, over the ranks of
a group, *equal* (each has all of it), a *shard* (each has its own elements), or *parts* (each has a term of the sum
that it stands for). Of several positions of the pipeline that hold one parameter a group does not tell: its stages do.

    Group.DATA, ...                              the kinds
    SHARING                                      groups among which the tokens of a sequence can be
    Placement(parts=Group.DATA, equal=Group.TENSOR)      over which group a tensor is what
    WHOLE, SUMMED                                of a parameter that no axis divides, and of its gradient
    SHARD, SHARD_SUMMED                          of one that tensor-parallel ranks divide
    HELD, HELD_SUMMED                            of one that fewer of them divide, so that several hold the same of it
    HELD_EQUAL                                   of its gradient where those compute the same
    COPIES_SUMMED                                of the gradient of a whole one beside it
    ALL_SUMMED                                   of the gradient of a whole one that these read in different calls
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum

from csc.errors import InputError


class Group(StrEnum):
    """What ranks have in common. Each rank is in exactly one group of each kind, but for `PIPELINE`."""

    WORLD = "world"
    """Everyone: meetings, the seed of a step, the loss that all return."""
    POSITION = "position"
    """Those that run the same stages, whatever of the batch they have: one file, one set of parameters."""
    DATA = "data"
    """Those of a position that do the same work on other samples and tokens: they add gradients and count labels."""
    SAMPLES = "samples"
    """Those of `DATA` with other samples, and the same place in each sequence."""
    CONTEXT = "context"
    """Those that share the tokens of the same samples: context-parallel attention."""
    TENSOR = "tensor"
    """Those that compute the same tokens in the same stages, each with its part of every layer."""
    COPIES = "copies"
    """Those of `TENSOR` that hold the same of a component which fewer ranks divide: they share out its samples."""
    DIVISION = "division"
    """Those of `TENSOR` that divide the layers of such a component: neighbours. Without one these are all of them;
    where some positions have fewer ranks than others, so many of them; where some have more, as many as the rest has.
    """
    HOLDERS = "holders"
    """`DATA` and `COPIES` together: those of a position that hold the same of such a component."""
    LAYER = "layer"
    """Those that meet within a stage: `CONTEXT` and `TENSOR` together."""
    PIPELINE = "pipeline"
    """One of each position, in its order: they hand activations and their gradients to each other. A rank of a position
    with fewer ranks than others is in several.
    """
    REPLICA = "replica"
    """Those that are given the same samples, at all positions."""

    @property
    def along(self) -> tuple[str, ...]:
        """The axes of the mesh along which its ranks differ; of tp that may be one of the two that it is made of."""
        return _ALONG[self]


_ALONG: Mapping[Group, tuple[str, ...]] = {
    Group.WORLD: ("dp", "pp", "cp", "tp"),
    Group.POSITION: ("dp", "cp", "tp"),
    Group.DATA: ("dp", "cp"),
    Group.SAMPLES: ("dp",),
    Group.CONTEXT: ("cp",),
    Group.TENSOR: ("tp",),
    Group.COPIES: ("copies",),
    Group.DIVISION: ("division",),
    Group.HOLDERS: ("dp", "cp", "copies"),
    Group.LAYER: ("cp", "tp"),
    Group.PIPELINE: ("pp",),
    Group.REPLICA: ("pp", "cp", "tp"),
}


WITHIN_TP = ("copies", "division")
"""What tp is made of, the last one fastest: ranks that hold the same, and those that divide what they hold."""
SHARING: Mapping[str, Group] = {
    "cp": Group.CONTEXT, "tp": Group.TENSOR, "copies": Group.COPIES, "division": Group.DIVISION,
}  # fmt: skip
"""By axis, the groups whose ranks can share the tokens of one sequence."""


def places(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes, with what tp is made of in its place."""
    return tuple(place for axis in axes for place in (WITHIN_TP if axis == "tp" else (axis,)))


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the ranks of a position: over which group it is what; None: over none.

    InputError if two of them share an axis, or one runs along the pipeline.
    """

    equal: Group | None = None
    shard: Group | None = None
    parts: Group | None = None

    def __post_init__(self) -> None:
        taken = [axis for kind in fields(self) for axis in self._along(kind.name)]
        twice = next((axis for axis in taken if taken.count(axis) > 1 or axis == "pp"), None)
        if twice is not None:
            axis = "tp" if twice in WITHIN_TP else twice
            what = "places tensors over the pipeline" if twice == "pp" else f"says two things of axis {axis}"
            raise InputError(f"{self.to_dict()} {what}", "placement", "Give each of dp, cp and tp to one group at most")

    def _along(self, kind: str) -> tuple[str, ...]:
        group: Group | None = getattr(self, kind)
        return places(group.along) if group is not None else ()

    def over(self, axis: str) -> str:
        """What the tensor is over an axis: "equal", "shard" or "parts"; "" if the placement does not say, or not one
        thing.
        """
        return next((kind.name for kind in fields(self) if set(places([axis])) <= set(self._along(kind.name))), "")

    def to_dict(self) -> dict[str, str]:
        """The form that program.json holds."""
        return {kind: str(group) for kind, group in asdict(self).items() if group is not None}

    @classmethod
    def of(cls, table: Mapping[str, str]) -> Placement:
        """Read what `to_dict` gives. InputError for another word or group."""
        kinds = [kind.name for kind in fields(cls)]
        for kind, name in table.items():
            if kind not in kinds or name not in list(Group):
                raise InputError(
                    f"a tensor cannot be {kind!r} over {name!r}", "placement",
                    f"Say {', '.join(kinds)}, over one of {', '.join(Group)}",
                )  # fmt: skip
        return cls(**{kind: Group(name) for kind, name in table.items()})


WHOLE = Placement(equal=Group.POSITION)
SUMMED = Placement(parts=Group.DATA, equal=Group.TENSOR)
SHARD = Placement(equal=Group.DATA, shard=Group.TENSOR)
SHARD_SUMMED = Placement(parts=Group.DATA, shard=Group.TENSOR)
ALL_SUMMED = Placement(parts=Group.POSITION)
HELD = Placement(equal=Group.HOLDERS, shard=Group.DIVISION)
HELD_SUMMED = Placement(parts=Group.HOLDERS, shard=Group.DIVISION)
HELD_EQUAL = Placement(parts=Group.DATA, equal=Group.COPIES, shard=Group.DIVISION)
COPIES_SUMMED = Placement(parts=Group.HOLDERS, equal=Group.DIVISION)
