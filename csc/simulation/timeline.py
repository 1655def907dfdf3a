"""The timeline: what every rank did and when. Predicted and measured runs have this one format.

Terms: an *event* occupies its rank from start to end; a *transfer* is a message on its way and occupies no rank;
the *makespan* runs from the first event's start to the last one's end; a rank's *bubble* is the part of the makespan
in which it is idle. Times are seconds since the run began (time 0), sizes are bytes. A *rank* is a position on the
pp axis.

In JSON an event is the row [action as in a schedule's text, start, end], a transfer the row of its fields, a
point of a memory curve the row [time, bytes from then on].
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

from csc.errors import InputError, ScheduleError
from csc.ir.schedule import Action, parse

FORMAT = "csc timeline"
VERSION = 1
LARGEST = 1e300  # of any time or size in a file; sums of such numbers stay finite

Curve = tuple[tuple[float, float], ...]  # (time, bytes from then on), in order of time
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class Event:
    """What occupies a rank: F, B, W, BW or REDUCE; in a measured run also a SEND or RECV that the rank waits in."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Transfer:
    """A message of `size` bytes from stage `source` to stage `destination`, on the link from `start` to its arrival."""

    kind: str
    source: int
    destination: int
    microbatch: int
    source_rank: int
    destination_rank: int
    start: float
    end: float
    size: float


@dataclass(frozen=True)
class Timeline:
    """One run. `ranks[r]` are the events of rank r in order of time, `memory[r]` its curve of bytes alive (state and
    activations; of points at one time the last one holds), `state[r]` the bytes that are alive throughout. begin: when
    the step began, if that is known: ranks may wait for parameters before their first event.
    """

    name: str
    ranks: tuple[tuple[Event, ...], ...]
    transfers: tuple[Transfer, ...]
    memory: tuple[Curve, ...]
    state: tuple[float, ...]
    begin: float | None = field(default=None, compare=False)

    @property
    def start(self) -> float:
        """When the step began, else the first start of an event; 0 if there is none."""
        if self.begin is not None:
            return self.begin
        return min((events[0].start for events in self.ranks if events), default=0.0)

    @cached_property
    def end(self) -> float:
        """The last end of an event, 0 if there is none."""
        return max((event.end for events in self.ranks for event in events), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Per rank, the seconds in which it computes. Waiting in a SEND or RECV is idle time."""
        return tuple(
            math.fsum(event.seconds for event in events if event.action.kind not in ("SEND", "RECV"))
            for events in self.ranks
        )

    @property
    def bubble(self) -> tuple[float, ...]:
        """Per rank, the idle seconds of the makespan, ramps included."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_share(self) -> tuple[float, ...]:
        """Per rank, the bubble as a share of the makespan; 0 where the makespan is 0."""
        return tuple(idle / self.makespan if self.makespan > 0 else 0.0 for idle in self.bubble)

    @cached_property
    def peak_memory(self) -> tuple[float, ...]:
        """Per rank, the most bytes that are alive at once."""
        return tuple(max((size for _, size in curve), default=state) for curve, state in zip(self.memory, self.state))

    @property
    def records_memory(self) -> bool:
        """Whether it is known what ranks held; of a measured run it may not be."""
        return any(self.memory) or any(self.state)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Per rank, the most bytes of activations that are alive at once: peak memory without the state."""
        return tuple(peak - state for peak, state in zip(self.peak_memory, self.state))


def to_json(timeline: Timeline) -> dict[str, Any]:
    """The timeline as a dict of lists, strings and numbers, ready for `json.dump`."""
    first = replace(timeline, begin=None).start
    return {
        **({} if timeline.begin is None or timeline.begin == first else {"begin": timeline.begin}),
        "format": FORMAT,
        "version": VERSION,
        "name": timeline.name,
        "state": list(timeline.state),
        "ranks": [[[str(event.action), event.start, event.end] for event in events] for events in timeline.ranks],
        "transfers": [list(astuple(transfer)) for transfer in timeline.transfers],
        "memory": [[list(point) for point in curve] for curve in timeline.memory],
    }


def from_json(data: object, where: str = "timeline") -> Timeline:
    """Read what `to_json` wrote. InputError, with the place, for anything else; `where` names the file in it."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise InputError("this is not a timeline", where, f'A timeline is a JSON object with "format": "{FORMAT}"')
    if data.get("version") != VERSION:
        raise InputError(
            f"its version is {data.get('version')!r}, this csc reads {VERSION}", where, "Write it again with this csc"
        )
    name = data.get("name")
    if not isinstance(name, str):
        raise InputError("'name' is not a string", where, "Give the timeline a name")
    state = tuple(
        _number(size, f"{where}, state {i}") for i, size in enumerate(_list(data.get("state"), where, "state"))
    )
    lists = _list(data.get("ranks"), where, "ranks")
    curves = _list(data.get("memory"), where, "memory")
    if not len(lists) == len(curves) == len(state):
        raise InputError(
            f"there are {len(lists)} ranks, {len(curves)} memory curves and {len(state)} states",
            where,
            "Each rank has one of each",
        )
    transfers = _rows(
        _list(data.get("transfers"), where, "transfers"),
        f"{where}, transfer",
        lambda row, place: _transfer(row, place, len(lists)),
    )
    return Timeline(
        name,
        tuple(_events(rows, rank, f"{where}, rank {rank}") for rank, rows in enumerate(lists)),
        transfers,
        tuple(_curve(rows, f"{where}, memory of rank {rank}") for rank, rows in enumerate(curves)),
        state,
        None if (begin := data.get("begin")) is None else _number(begin, f"{where}, begin"),
    )


def _list(data: object, where: str, what: str) -> list[Any]:
    if not isinstance(data, list):
        raise InputError(f"'{what}' is missing or not a list", where, "Write timelines with `to_json`")
    return data


def _number(data: object, where: str) -> float:
    if type(data) not in (int, float) or not 0 <= data < LARGEST:  # type: ignore[operator]
        raise InputError(f"{data!r} is not a finite number of at least 0", where, "Times are seconds, sizes are bytes")
    return float(data)  # type: ignore[arg-type]


def _rows(rows: list[Any], where: str, read: Callable[[list[Any], str], _Row]) -> tuple[_Row, ...]:
    found = []
    for i, row in enumerate(rows):
        place = f"{where} {i}"
        if not isinstance(row, list):
            raise InputError(f"{row!r} is not a list", place, "Write timelines with `to_json`")
        found.append(read(row, place))
    return tuple(found)


def _span(start: object, end: object, where: str) -> tuple[float, float]:
    first, last = _number(start, where), _number(end, where)
    if last < first:
        raise InputError(f"it ends at {last} before it starts at {first}", where, "Check the clocks of that run")
    return first, last


def _ordered(times: list[float], where: str) -> None:
    for i, (earlier, later) in enumerate(pairwise(times)):
        if later < earlier:
            raise InputError(f"entry {i + 1} is earlier than entry {i}", where, "List them in order of time")


def _events(rows: object, rank: int, where: str) -> tuple[Event, ...]:
    def read(row: list[Any], place: str) -> tuple[str, float, float]:
        if len(row) != 3 or not isinstance(row[0], str):
            raise InputError(f"{row!r} is not [action, start, end]", place, "Write timelines with `to_json`")
        return (row[0], *_span(row[1], row[2], place))

    found = _rows(_list(rows, where, "events"), f"{where}, event", read)
    try:
        known = {text: parse(f"rank 0: {text}").ranks[0] for text, _, _ in found}
    except ScheduleError as error:
        raise InputError(error.what, where, error.remedy) from error
    for i, (text, _, _) in enumerate(found):
        if [str(action) for action in known[text]] != [text]:
            raise InputError(f"{text!r} is not one action", f"{where}, event {i}", "Give each event one action")
    _ordered([start for _, start, _ in found], where)
    return tuple(Event(rank, known[text][0], start, end) for text, start, end in found)


def _transfer(row: list[Any], where: str, ranks: int) -> Transfer:
    whole = row[1:6]  # source, destination, microbatch, source rank, destination rank
    if len(row) != 9 or row[0] not in ("F", "B") or any(type(number) is not int or number < 0 for number in whole):
        raise InputError(
            f"{row!r} is not [kind, source, destination, microbatch, source rank, destination rank, start, end, size]",
            where,
            "Write timelines with `to_json`",
        )
    if max(row[4:6]) >= ranks:
        raise InputError(f"it is between ranks {row[4]} and {row[5]}, there are {ranks}", where, "Ranks count from 0")
    source, destination, microbatch, source_rank, destination_rank = whole
    start, end = _span(row[6], row[7], where)
    size = _number(row[8], where)
    return Transfer(row[0], source, destination, microbatch, source_rank, destination_rank, start, end, size)


def _curve(rows: object, where: str) -> Curve:
    def read(row: list[Any], place: str) -> tuple[float, float]:
        if len(row) != 2:
            raise InputError(f"{row!r} is not [time, bytes]", place, "Write timelines with `to_json`")
        return _number(row[0], place), _number(row[1], place)

    curve = _rows(_list(rows, where, "memory"), f"{where}, point", read)
    _ordered([time for time, _ in curve], where)
    return curve
