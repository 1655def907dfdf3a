"""The schedule: for every pipeline rank the list of actions that it runs, in order.

Terms: *F*, *B*, *W* compute a microbatch's forward, input gradients and weight gradients on a stage; *BW* does B and
W in one action, region by region, so that it never holds what W needs of more than one; *SEND* and *RECV* move the
values of a message (F: activations, B: gradients) from stage a to stage b; *GATHER* makes a stage's parameters whole,
of which data-parallel ranks hold shards, and *FREE* drops what it made; *REDUCE* sums gradients over ranks at the end
of a step. A *rank* here is a position on the pp axis; it runs one stage or several. Between two stages of one rank
nothing is sent: the rank keeps the values until the other stage takes them. A *channel* is (message kind, stage a,
stage b), a *wire* (message kind, rank a, rank b): the messages of a wire, whatever their channels, arrive in the order
in which they are sent.

    # 1f1b, 2 ranks, 1 microbatches
    rank 0: F 0 0 | SEND F 0>1 0 | RECV B 1>0 0 | B 0 0 | W 0 0 | REDUCE
    rank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | W 1 0 | REDUCE

    parse(text) -> Schedule        str(schedule) -> text
    part(schedule, channels, has_b, has_w, gathered) -> Schedule what is left where there is less to do
    with_messages(name, orders, channels) -> Schedule            from the order of F, B, W and BW alone
    fused(order) -> order                                         every B with its W right behind it as one BW

`csc.ir.schedule_verifier` checks a schedule. A line that starts with white space continues the rank above it;
`#` starts a comment; the first comment names the schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from csc.errors import ScheduleError

Kind = Literal["F", "B", "W", "BW", "SEND", "RECV", "GATHER", "FREE", "REDUCE"]
Message = tuple[str, int, int]  # (kind, source stage, destination stage)

WHOLE = ("GATHER", "FREE")  # actions between which parameters are whole
PARTS: dict[str, tuple[Kind, ...]] = {"F": ("F",), "B": ("B",), "W": ("W",), "BW": ("B", "W")}  # what each computes
WIDTH = 110


class Action(NamedTuple):
    """One step of one rank. `stage` is the stage that it is for; stage and microbatch are -1 for REDUCE, the microbatch
    for GATHER and FREE too.

    SEND and RECV also carry the message's kind and both ends; for the others these are "" and -1. (A tuple, since a
    schedule of 512 ranks has millions of them, which are made, hashed and compared.)
    """

    kind: Kind
    stage: int = -1
    microbatch: int = -1
    message: str = ""
    source: int = -1
    destination: int = -1

    @property
    def computes(self) -> bool:
        """True for F, B, W and BW."""
        return self.kind in PARTS

    @property
    def parts(self) -> tuple[Action, ...]:
        """The F, B and W that a compute does: itself, or B and W."""
        kinds = PARTS[self.kind]
        return (self,) if len(kinds) == 1 else tuple(Action(kind, self.stage, self.microbatch) for kind in kinds)

    @property
    def channel(self) -> Message:
        """(kind, source, destination) of a SEND or RECV."""
        return (self.message, self.source, self.destination)

    def __str__(self) -> str:
        if self.kind == "REDUCE":
            return "REDUCE"
        if self.computes:
            return f"{self.kind} {self.stage} {self.microbatch}"
        if self.kind in WHOLE:
            return f"{self.kind} {self.stage}"
        return f"{self.kind} {self.message} {self.source}>{self.destination} {self.microbatch}"

    @classmethod
    def send(cls, channel: Message, microbatch: int) -> Action:
        kind, source, destination = channel
        return cls("SEND", source, microbatch, kind, source, destination)

    @classmethod
    def recv(cls, channel: Message, microbatch: int) -> Action:
        kind, source, destination = channel
        return cls("RECV", destination, microbatch, kind, source, destination)


@dataclass(frozen=True)
class Schedule:
    """A name and, for pipeline rank r, `ranks[r]`: what it runs. Every dp replica runs the same list."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @property
    def microbatches(self) -> int:
        """One more than the largest microbatch number."""
        return 1 + max((a.microbatch for actions in self.ranks for a in actions), default=-1)

    @cached_property
    def placement(self) -> dict[int, int]:
        """The rank of each stage: the first one that has an action of it."""
        found: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind != "REDUCE":
                    found.setdefault(action.stage, rank)
        return dict(sorted(found.items()))

    def __str__(self) -> str:
        lines = [f"# {self.name}, {len(self.ranks)} ranks, {self.microbatches} microbatches"]
        for rank, actions in enumerate(self.ranks):
            head = f"rank {rank}:"
            line = head
            for i, action in enumerate(actions):
                part = f" {action}" + (" |" if i + 1 < len(actions) else "")
                if len(line) + len(part) > WIDTH:
                    lines.append(line)
                    line = " " * len(head)
                line += part
            lines.append(line)
        return "\n".join(lines) + "\n"


_NUMBER = r"([0-9]{1,9})"
_RANK = re.compile(rf"rank\s+{_NUMBER}\s*:(.*)", re.DOTALL)
_COMPUTE = re.compile(rf"(F|BW|B|W)\s+{_NUMBER}\s+{_NUMBER}")
_MOVE = re.compile(rf"(SEND|RECV)\s+([FB])\s+{_NUMBER}\s*>\s*{_NUMBER}\s+{_NUMBER}")
_HOLD = re.compile(rf"(GATHER|FREE)\s+{_NUMBER}")
_FORMS = "Actions are: F s mb, B s mb, W s mb, BW s mb, SEND K a>b mb, RECV K a>b mb, GATHER s, FREE s, REDUCE"


def _action(text: str, where: str) -> Action:
    if text == "REDUCE":
        return Action("REDUCE")
    if found := _COMPUTE.fullmatch(text):
        return Action(found[1], int(found[2]), int(found[3]))  # type: ignore[arg-type]
    if found := _HOLD.fullmatch(text):
        return Action(found[1], int(found[2]))  # type: ignore[arg-type]
    if found := _MOVE.fullmatch(text):
        channel = (found[2], int(found[3]), int(found[4]))
        make = Action.send if found[1] == "SEND" else Action.recv
        return make(channel, int(found[5]))
    raise ScheduleError(f"{text[:40]!r} is not an action", where, _FORMS)


def parse(text: str) -> Schedule:
    """Read a schedule's text. ScheduleError, with the line, for text that is not one. The order is not
    checked: see `csc.ir.schedule_verifier`.
    """
    name = ""
    ranks: list[list[Action]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        where = f"schedule, line {number}"
        line, hash_, comment = raw.partition("#")
        if hash_ and not name:
            name = comment.split(",")[0].strip()
        if not line.strip():
            continue
        if line[0].isspace():
            if not ranks:
                raise ScheduleError("the line continues a rank, but no rank came before", where, _FORMS)
            body = line
        else:
            found = _RANK.fullmatch(line.strip())
            if found is None:
                raise ScheduleError(f"{line.strip()[:40]!r} does not start with 'rank N:'", where, _FORMS)
            if int(found[1]) != len(ranks):
                raise ScheduleError(
                    f"rank {found[1]} stands where rank {len(ranks)} should",
                    where,
                    "List the ranks once each, in order from 0",
                )
            ranks.append([])
            body = found[2]
        parts = [part.strip() for part in body.split("|")]
        ranks[-1] += [_action(part, where) for part in parts if part]
    if not ranks:
        raise ScheduleError("it lists no rank", "schedule", "Write a line 'rank N: ...' for every rank")
    return Schedule(name or "schedule", tuple(tuple(actions) for actions in ranks))


def with_messages(name: str, orders: Sequence[Sequence[Action]], channels: Iterable[Message]) -> Schedule:
    """The schedule whose rank r runs the F, B, W and BW of `orders[r]` in that order.

    A SEND stands right after the action that makes its values, a RECV right before the first one that needs
    it or a later message of its wire: both ends of a wire list its messages in the order of the sender.
    """
    rank_of = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    leaving: dict[tuple[str, int], list[Message]] = {}
    coming: dict[tuple[str, int], list[Message]] = {}
    for channel in sorted(set(channels)):
        kind, source, destination = channel
        if rank_of.get(source) != rank_of.get(destination):
            leaving.setdefault((kind, source), []).append(channel)
            coming.setdefault((kind, destination), []).append(channel)
    sent: dict[tuple[str, int, int], list[tuple[Message, int]]] = {}
    number: dict[tuple[Message, int], int] = {}
    for rank, order in enumerate(orders):
        for action in order:
            for channel in leaving.get((PARTS[action.kind][0], action.stage), ()):
                wire = sent.setdefault((channel[0], rank, rank_of[channel[2]]), [])
                number[channel, action.microbatch] = len(wire)
                wire.append((channel, action.microbatch))
    taken = dict.fromkeys(sent, 0)
    ranks = []
    for rank, order in enumerate(orders):
        actions: list[Action] = []
        for action in order:
            for channel in coming.get((PARTS[action.kind][0], action.stage), ()):
                if (channel, action.microbatch) not in number:
                    continue  # nobody sends it: the verifier will say so
                key = (channel[0], rank_of[channel[1]], rank)
                upto = number[channel, action.microbatch] + 1
                actions += [Action.recv(*item) for item in sent[key][taken[key] : upto]]
                taken[key] = max(taken[key], upto)
            actions.append(action)
            leave = leaving.get((PARTS[action.kind][0], action.stage), ())
            actions += [Action.send(channel, action.microbatch) for channel in leave]
        ranks.append((*actions, Action("REDUCE")))
    return Schedule(name, tuple(ranks))


def fused(order: Sequence[Action]) -> list[Action]:
    """An order of F, B, W and BW in which every B whose W is the next action is one BW with it."""
    found: list[Action] = []
    for action in order:
        item = (action.stage, action.microbatch)
        if action.kind == "W" and found and found[-1] == Action("B", *item):
            found[-1] = Action("BW", *item)
        else:
            found.append(action)
    return found


def part(
    schedule: Schedule,
    channels: Iterable[Message],
    has_b: Sequence[bool],
    has_w: Sequence[bool],
    gathered: Sequence[bool] | None = None,
) -> Schedule:
    """The schedule without the messages, Bs, Ws and gathers that a program has not, in the same order. gathered: of
    which stages parameters are gathered; None: of none.
    """
    there = set(channels)

    def left(action: Action) -> Action | None:
        if action.kind in ("SEND", "RECV"):
            return action if action.channel in there else None
        if action.kind in WHOLE:
            return action if gathered is not None and gathered[action.stage] else None
        if not action.computes or action.kind == "F":
            return action
        kind = doable(action.kind, has_b[action.stage], has_w[action.stage])
        return Action(kind, action.stage, action.microbatch) if kind else None

    ranks = ([kept for action in actions if (kept := left(action)) is not None] for actions in schedule.ranks)
    return Schedule(schedule.name, tuple(tuple(_used(actions)) for actions in ranks))


def _used(actions: Sequence[Action]) -> list[Action]:
    """Without the GATHERs and FREEs between which their stage has nothing to compute."""
    idle: set[int] = set()
    since: dict[int, int] = {}  # by stage, the place of its GATHER since which it has not computed
    for i, action in enumerate(actions):
        if action.kind == "GATHER":
            since[action.stage] = i
        elif action.kind == "FREE" and action.stage in since:
            idle |= {since.pop(action.stage), i}
        elif action.computes:
            since.pop(action.stage, None)
    return [action for i, action in enumerate(actions) if i not in idle]


def doable(kind: Kind, has_b: bool, has_w: bool) -> Kind | None:
    """What of a B, W or BW a stage does that has B and W, B alone, or neither."""
    if kind == "BW":
        return "BW" if has_b and has_w else "B" if has_b else "W" if has_w else None
    return kind if (has_b if kind == "B" else has_w) else None
