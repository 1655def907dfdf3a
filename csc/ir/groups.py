"""Groups of ranks, how a tensor lies on them, and what the runtime adds to a microbatch for a rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from csc.errors import InputError

# --- Groups of ranks, and how a tensor lies on them ------------------------------------------------------------------
#
# Terms: the ranks of a *group* have the same index on every axis but those *along* which the group runs. What kinds of
# groups there are is listed here and nowhere else; `Mesh.group` makes the lists of ranks. A tensor is, over the ranks
# of a group, *equal* (each has all of it), a *shard* (each has its own elements), or *parts* (each has a term of the
# sum that it stands for). Of several positions of the pipeline that hold one parameter a group does not tell: its
# stages do.


@dataclass(frozen=True, order=True)
class Group:
    """What ranks have in common. Each rank is in exactly one group of each kind, but for `PIPELINE`.

    size: how many neighbours of a tensor-parallel group divide the layers of a component, or of a context-parallel one
    share its tokens, where these are fewer than all; of the kinds that differ by it (`sequences`; `copies`, `division`,
    `holders`), 0 of the others.
    """

    kind: str
    size: int = 0

    WORLD: ClassVar[Group]
    """Everyone: meetings, the seed of a step, the loss that all return."""
    POSITION: ClassVar[Group]
    """Those that run the same stages, whatever of the batch they have: one file, one set of parameters."""
    DATA: ClassVar[Group]
    """Those of a position that do the same work on other samples and tokens: they add gradients and count labels."""
    SAMPLES: ClassVar[Group]
    """Those of `DATA` with other samples, and the same place in each sequence."""
    CONTEXT: ClassVar[Group]
    """Those that share the tokens of the same samples: context-parallel attention."""
    TENSOR: ClassVar[Group]
    """Those that compute the same tokens in the same stages, each with its part of every layer."""
    LAYER: ClassVar[Group]
    """Those that meet within a stage: `CONTEXT` and `TENSOR` together."""
    PIPELINE: ClassVar[Group]
    """One of each position, in its order: they hand activations and their gradients to each other. A rank of a position
    with fewer ranks than others is in several.
    """
    REPLICA: ClassVar[Group]
    """Those that are given the same samples, at all positions."""

    @classmethod
    def sequences(cls, size: int) -> Group:
        """Those of `CONTEXT` that have other samples of a component whose tokens so many neighbours share."""
        return cls("sequences", size)

    @classmethod
    def copies(cls, size: int) -> Group:
        """Those of `TENSOR` that hold the same of a component which fewer ranks divide: they share out its samples."""
        return cls("copies", size)

    @classmethod
    def division(cls, size: int) -> Group:
        """Those of `TENSOR` that divide the layers of such a component: neighbours. Where a position has fewer ranks,
        these.
        """
        return cls("division", size)

    @classmethod
    def holders(cls, size: int) -> Group:
        """`DATA` and `copies` together: those of a position that hold the same of such a component."""
        return cls("holders", size)

    @classmethod
    def of(cls, text: str) -> Group:
        """Read what str gives. ValueError: it is none of these."""
        kind, apart, size = text.partition(" ")
        sized = size.isdecimal() and int(size) > 1
        if kind in _SIZED and sized:
            return cls(kind, int(size))
        if kind not in _ALONG or kind in _SIZED or apart:
            raise ValueError(f"{text!r} is no group of ranks: {', '.join(_ALONG)}, of {', '.join(_SIZED)} with a size")
        return cls(kind)

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.size else self.kind

    @property
    def along(self) -> tuple[str, ...]:
        """The axes of the mesh along which its ranks differ; of tp that may be one of the two that it is made of."""
        return _ALONG[self.kind]


_ALONG: Mapping[str, tuple[str, ...]] = {
    "world": ("dp", "pp", "cp", "tp"),
    "position": ("dp", "cp", "tp"),
    "data": ("dp", "cp"),
    "samples": ("dp",),
    "context": ("cp",),
    "tensor": ("tp",),
    "sequences": ("sequences",),
    "copies": ("copies",),
    "division": ("division",),
    "holders": ("dp", "cp", "copies"),
    "layer": ("cp", "tp"),
    "pipeline": ("pp",),
    "replica": ("pp", "cp", "tp"),
}
_SIZED = ("sequences", "copies", "division", "holders")
Group.WORLD, Group.POSITION, Group.DATA, Group.SAMPLES = map(Group, ("world", "position", "data", "samples"))
Group.CONTEXT, Group.TENSOR, Group.LAYER = map(Group, ("context", "tensor", "layer"))
Group.PIPELINE, Group.REPLICA = map(Group, ("pipeline", "replica"))

WITHIN_TP = ("copies", "division")
"""What tp is made of, the last one fastest: ranks that hold the same, and those that divide what they hold."""


def group_over(axis: str) -> Group:
    """The groups whose ranks share out samples or tokens. axis: cp, tp, or the text of a group within these.
    ValueError: another.
    """
    group = {"cp": Group.CONTEXT, "tp": Group.TENSOR}.get(axis) or Group.of(axis)
    if group.along[0] not in ("cp", "tp", "sequences", *WITHIN_TP):
        raise ValueError(f"tokens cannot be spread over {axis!r}")
    return group


def places(axes: Iterable[str]) -> tuple[str, ...]:
    """The axes, with what tp is made of in its place."""
    return tuple(place for axis in axes for place in (WITHIN_TP if axis == "tp" else (axis,)))


@dataclass(frozen=True)
class Placement:
    """How a tensor lies on the ranks of a position: over which group it is what; None: over none.

    InputError if two of them share an axis, or are within tp and of different sizes, or one runs along the pipeline.
    """

    equal: Group | None = None
    shard: Group | None = None
    parts: Group | None = None

    def __post_init__(self) -> None:
        taken = [axis for kind in fields(self) for axis in self._along(kind.name)]
        twice = next((axis for axis in taken if taken.count(axis) > 1 or axis == "pp"), None)
        if twice is not None:
            axis = "tp" if twice in WITHIN_TP else twice
            fault = "places tensors over the pipeline" if twice == "pp" else f"says two things of axis {axis}"
            raise InputError(
                f"{self.to_dict()} {fault}", "placement", "Give each of dp, cp and tp to one group at most"
            )
        sizes = {group.size for kind in fields(self) if (group := getattr(self, kind.name)) is not None and group.size}
        if len(sizes) > 1:
            fault = f"{self.to_dict()} has groups of {' and of '.join(map(str, sorted(sizes)))} within tp"
            raise InputError(fault, "placement", "A tensor is divided by groups of one size")

    @property
    def size(self) -> int:
        """Of its groups within tp; 0: it has none."""
        return max(
            getattr(self, kind.name).size if getattr(self, kind.name) is not None else 0 for kind in fields(self)
        )

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
        groups = {kind.name: getattr(self, kind.name) for kind in fields(self)}
        return {kind: str(group) for kind, group in groups.items() if group is not None}

    @classmethod
    def of(cls, table: Mapping[str, str]) -> Placement:
        """Read what `to_dict` gives. InputError for another word or group."""
        kinds, groups = [kind.name for kind in fields(cls)], dict[str, Group]()
        for kind, name in table.items():
            try:
                groups[kind] = Group.of(str(name))
                known = kind in kinds
            except ValueError:
                known = False
            if not known:
                raise InputError(
                    f"a tensor cannot be {kind!r} over {name!r}", "placement",
                    f"Say {', '.join(kinds)}, over one of {', '.join(_ALONG)}",
                )  # fmt: skip
        return cls(**groups)


WHOLE = Placement(equal=Group.POSITION)
SUMMED = Placement(parts=Group.DATA, equal=Group.TENSOR)
SHARD = Placement(equal=Group.DATA, shard=Group.TENSOR)
SHARD_SUMMED = Placement(parts=Group.DATA, shard=Group.TENSOR)
ALL_SUMMED = Placement(parts=Group.POSITION)


def held(size: int) -> Placement:
    """size: of the division."""
    return Placement(equal=Group.holders(size), shard=Group.division(size))


def held_summed(size: int) -> Placement:
    """Returns the placement of the gradient of a parameter that `size` ranks divide, where several ranks hold the same
    shard and their parts are summed.
    """
    return Placement(parts=Group.holders(size), shard=Group.division(size))


def held_equal(size: int) -> Placement:
    """Returns the placement of the gradient of such a parameter, where the ranks that hold the same shard compute the
    same.
    """
    return Placement(parts=Group.DATA, equal=Group.copies(size), shard=Group.division(size))


def copies_summed(size: int) -> Placement:
    """Returns the placement of the gradient of a whole parameter beside such a one."""
    return Placement(parts=Group.holders(size), equal=Group.division(size))


# --- What the runtime adds to a microbatch for a rank ----------------------------------------------------------------
#
# It has roles of placeholders, which stand for it in graphs, and names among the entries. No entry of a batch begins as
# they do: a model may well have an argument `context` or `tp`.


OF_RANKS = ("context", "context group", "tensor")
CONTEXT_GROUP = ("context group", "number")
LOSS_WEIGHTS = ("loss", "loss_weights")
BATCH_LOSS = ("loss", "batch_loss")
OWN = "csc."
RANDOM, CONTEXT, WEIGHTS, PLACE = "csc.random", "csc.context", "csc.loss_weights", "csc.batch_loss"


def meeting(group: Group) -> str:
    """Returns the name under which a layer of an emitted program meets the ranks of a group: csc.tp, csc.cp, or one
    with the kind and the size. group: of tensor or context parallelism, or one within these.
    """
    known = {Group.TENSOR: "csc.tp", Group.CONTEXT: "csc.cp"}
    within = "cp" if group.kind == "sequences" else "tp"
    return known.get(group, f"csc.{within}_{group.kind}_{group.size}")
