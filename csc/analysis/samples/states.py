"""What the samples of a batch can be to a value of a graph. The terms are those of csc.analysis.samples.propagation.

times(powers, others, sign) -> Powers        of a product, or a quotient
Lost                                         ends the rules of a call that mixes samples
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from csc.analysis.operators.table import Axis
from csc.analysis.routing import SortedRows


@dataclass(frozen=True)
class Count:
    """A number that adds up over microbatches.

    kind: "rows", those of the batch entry `name`; "value", of the call `name`, made of the batch alone; "labels", those
    that the loss `name` is a mean over. added, least: what is divided by is count + added, or
    least if that is more; no limit with 0.
    """

    kind: str
    name: str
    added: float = 0.0
    least: float = 0.0

    @property
    def plain(self) -> bool:
        return self.added == 0 and self.least == 0


Powers = frozenset[tuple[Count, int]]
NONE: Powers = frozenset()


@dataclass(frozen=True)
class Whole:
    powers: Powers = NONE


@dataclass(frozen=True)
class SampleRows:
    """count: of the samples; entry: the batch entry whose rows they are. spare: the mask of which a microbatch
    without any keeps one, which the batch does not (csc.analysis.samples.spare_rows); None: there is none.
    """

    axis: Axis
    count: int
    entry: str
    powers: Powers = NONE
    spare: fx.Node | None = None


@dataclass(frozen=True)
class PartsOfSum:
    powers: Powers = NONE


@dataclass(frozen=True)
class TermOfSum:
    """An operand of a call that adds or stacks, and the number that it is divided by."""

    call: str
    operand: int
    count: Count


@dataclass(frozen=True)
class Terms:
    terms: frozenset[TermOfSum]


@dataclass(frozen=True)
class RowNumbers:
    """step: by how much the numbers of one sample are larger than those of the sample before. within: the least and the
    largest that a number may lie behind the first of its sample; None: that is not known.
    """

    axis: Axis
    count: int
    entry: str
    step: int
    within: tuple[int, int] | None

    @property
    def is_own(self) -> bool:
        """Whether no number is another sample's."""
        return self.within is not None and self.within[0] >= 0 and self.within[1] < self.step


@dataclass(frozen=True)
class SortedSamples:
    """rows: as they were before."""

    found: SortedRows
    rows: SampleRows


@dataclass(frozen=True)
class NewTensor:
    powers: Powers = field(default=NONE, init=False)


@dataclass(frozen=True)
class Mixed:
    """why: a phrase with the operation as its subject. unless: it is nothing mixed again once it has been "looked up"
    by numbers made for the microbatch (rows of samples among others); has put rows in "order", those that a mask
    selects first; or these were "scattered" to places that are as many.
    """

    node: fx.Node
    why: str
    unless: str = ""


State = Whole | SampleRows | PartsOfSum | Terms | RowNumbers | SortedSamples | NewTensor | Mixed


class Lost(Exception):
    """Ends the rules of a call that mixes samples. The argument says what it does, as a phrase."""


UNKNOWN = "is an operation of which csc does not know that it keeps samples apart"
ALONG_SAMPLES = "works along the samples"
EVERY_OTHER = "combines every sample with every other"
BY_NUMBER = "takes as much of a value as there are samples"
NOT_LINEAR = "does more than scale what was summed over samples, or divided by their number"
SPARE = "adds up a row that a microbatch without any keeps, and the whole batch does not"
OF_OTHERS = (
    "reads rows by number, which may be another sample's (a length of 0, less 1); x[torch.arange(n), place] reads each "
    "sample's own"
)
FIXED = "meets samples with a value that is the same for every batch, entry by entry"


def rows_of(entry: str) -> Count:
    """The number of a batch entry's rows. Lost if it is that of no entry."""
    if not entry:
        raise Lost("counts rows that were picked by numbers made for the microbatch")
    return Count("rows", entry)


def times(one: Powers, other: Powers, sign: int = 1) -> Powers:
    """The powers of a product; of a quotient with sign = -1."""
    total = dict(one)
    for count, power in other:
        total[count] = total.get(count, 0) + sign * power
    return frozenset((count, power) for count, power in total.items() if power)
