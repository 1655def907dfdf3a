"""The schedule: for every pipeline rank the list of actions that it runs, in order; and the check that it does a
program's work.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from csc.errors import ScheduleError

# --- The grammar of a schedule, and what its words mean --------------------------------------------------------------
#
#     schedule   # NAME, N ranks, M microbatches
#                rank 0: ACTION | ACTION | ...        a line for each position on the pp axis, in order
#     ACTION     F stage mb                           forward of a microbatch
#                B stage mb                           gradients of the stage's inputs
#                W stage mb                           gradients of its weights
#                BW stage mb                          B and W, region by region: what W needs is held of one at a time
#                SEND F a>b mb    RECV F a>b mb       activations that stage b reads of stage a
#                SEND B a>b mb    RECV B a>b mb       gradients, the other way
#                GATHER stage     FREE stage          makes parameters whole that data-parallel ranks hold shards of
#                REDUCE                               sums gradients over ranks, at the end of a step
#
#     # 1f1b, 2 ranks, 1 microbatches
#     rank 0: F 0 0 | SEND F 0>1 0 | RECV B 1>0 0 | B 0 0 | W 0 0 | REDUCE
#     rank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | W 1 0 | REDUCE
#
# A rank runs one stage or several; between two of its own nothing is sent, and it keeps the values until the other
# stage takes them. A *channel* is (message kind, stage a, stage b), a *wire* (message kind, rank a, rank b): messages
# of a wire, whatever their channels, arrive in the order in which they are sent. A line that starts with white space
# continues the rank above it; `#` starts a comment, and the first comment names the schedule.
#
# `parse` refuses text that is not of this grammar, `verify` a schedule that does not do a program's work: whole, once,
# in an order in which no rank waits for ever.


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
        ranks: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                if action.kind != "REDUCE":
                    ranks.setdefault(action.stage, rank)
        return dict(sorted(ranks.items()))

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
    if match := _COMPUTE.fullmatch(text):
        return Action(match[1], int(match[2]), int(match[3]))  # type: ignore[arg-type]
    if match := _HOLD.fullmatch(text):
        return Action(match[1], int(match[2]))  # type: ignore[arg-type]
    if match := _MOVE.fullmatch(text):
        channel = (match[2], int(match[3]), int(match[4]))
        make = Action.send if match[1] == "SEND" else Action.recv
        return make(channel, int(match[5]))
    raise ScheduleError(f"{text[:40]!r} is not an action", where, _FORMS)


def parse(text: str) -> Schedule:
    """Read a schedule's text. ScheduleError, with the line, for text that is not one. `verify` checks the order."""
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
            match = _RANK.fullmatch(line.strip())
            if match is None:
                raise ScheduleError(f"{line.strip()[:40]!r} does not start with 'rank N:'", where, _FORMS)
            if int(match[1]) != len(ranks):
                raise ScheduleError(
                    f"rank {match[1]} stands where rank {len(ranks)} should",
                    where,
                    "List the ranks once each, in order from 0",
                )
            ranks.append([])
            body = match[2]
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
    actions: list[Action] = []
    for action in order:
        item = (action.stage, action.microbatch)
        if action.kind == "W" and actions and actions[-1] == Action("B", *item):
            actions[-1] = Action("BW", *item)
        else:
            actions.append(action)
    return actions


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
    present = set(channels)

    def left(action: Action) -> Action | None:
        if action.kind in ("SEND", "RECV"):
            return action if action.channel in present else None
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


# --- Checks that a schedule does the work of a program's stages: whole, once, in a possible order --------------------
#
# Time is linear in the number of actions.


def verify(
    schedule: Schedule,
    messages: Iterable[Message],
    has_b: Sequence[bool],
    has_w: Sequence[bool],
    microbatches: int,
    gathered: Sequence[bool] | None = None,
) -> None:
    """Raise a ScheduleError unless the schedule does the work of these stages.

    `messages` are the channels between stages, `has_b[s]` and `has_w[s]` say whether stage s has B and W,
    `gathered[s]` whether its parameters have to be made whole (None: of no stage). A stage may stand on any one rank,
    and a rank may run any number of stages. A BW counts as the B and the W.
    """
    channels = set(messages)
    divided = [False] * len(has_b) if gathered is None else gathered
    placement = _placement(schedule, len(has_b))
    moved = {channel for channel in channels if placement[channel[1]] != placement[channel[2]]}
    for rank, actions in enumerate(schedule.ranks):
        stages_here = [stage for stage, home in placement.items() if home == rank]
        needed = {
            stage: {kind for kind, exists in (("F", True), ("B", has_b[stage]), ("W", has_w[stage])) if exists}
            for stage in stages_here
        }
        places = _places(schedule, rank, actions, needed, channels, moved, microbatches)
        _check_order(schedule, rank, places, needed, channels - moved)
        _check_whole(schedule, rank, divided)
    _check_wires(schedule, placement)
    _check_progress(schedule, placement)


def check_whole_forward(schedule: Schedule, stage: int) -> None:
    """ScheduleError unless a stage's F of all microbatches come before its first B or W: its loss is over the whole
    batch.
    """
    rank = schedule.placement[stage]
    own = [action for action in schedule.ranks[rank] if action.computes and action.stage == stage]
    late = next((b for a, b in pairwise(own) if a.kind != "F" and b.kind == "F"), None)
    if late is not None:
        raise ScheduleError(
            f"'{late}' comes after a B or W of stage {stage}, whose loss is over the whole batch",
            _where(schedule, rank),
            f"Put all F of stage {stage} before its first B, as schedule gpipe does",
        )


def _where(schedule: Schedule, rank: int | None = None) -> str:
    return f"schedule {schedule.name}" + ("" if rank is None else f", rank {rank}")


def _placement(schedule: Schedule, stages: int) -> dict[int, int]:
    """The rank of each stage, having checked that each stage of the program has exactly one."""
    for rank, actions in enumerate(schedule.ranks):
        for action in actions:
            if action.kind == "REDUCE":
                continue
            if action.stage >= stages:
                raise ScheduleError(
                    f"'{action}' belongs to stage {action.stage}, the program has {stages} stages",
                    _where(schedule, rank),
                    f"Stages count from 0 to {stages - 1}",
                )
            if schedule.placement[action.stage] != rank:
                raise ScheduleError(
                    f"'{action}' belongs to stage {action.stage}, which rank {schedule.placement[action.stage]} runs",
                    _where(schedule, rank),
                    "Move it to that rank: a stage is run by one rank",
                )
    for stage in range(stages):
        if stage not in schedule.placement:
            raise ScheduleError(
                f"no rank runs stage {stage}, the program has {stages} stages", _where(schedule), "Add its actions"
            )
    return schedule.placement


def _places(
    schedule: Schedule,
    rank: int,
    actions: Sequence[Action],
    needed: dict[int, set[str]],
    channels: set[Message],
    moved: set[Message],
    microbatches: int,
) -> dict[Action, int]:
    """Position of every action of a rank, of BW that of its B and its W, having checked that it holds exactly the
    actions that it needs.
    """
    where = _where(schedule, rank)
    places: dict[Action, int] = {}
    for i, action in enumerate(actions):
        if action.kind in WHOLE:
            continue
        if action.kind != "REDUCE" and not 0 <= action.microbatch < microbatches:
            raise ScheduleError(f"'{action}' is for a microbatch outside 0..{microbatches - 1}", where, "Remove it")
        for part in action.parts if action.computes else ():
            if part.kind not in needed[action.stage]:
                fault = f"'{action}' has nothing to do: stage {action.stage} has no {part.kind}"
                raise ScheduleError(fault, where, "Remove it")
        if action.kind in ("SEND", "RECV") and action.channel not in channels:
            known = ", ".join(f"{k} {a}>{b}" for k, a, b in sorted(channels)) or "none"
            raise ScheduleError(f"'{action}': there is no such message; there are: {known}", where, "Remove it")
        if action.kind in ("SEND", "RECV") and action.channel not in moved:
            raise ScheduleError(
                f"'{action}' has nothing to move: rank {rank} runs both stages and keeps the values", where, "Remove it"
            )
        for part in action.parts if action.computes else (action,):
            if part in places:
                other = actions[places[part]]
                again = "stands there twice" if action == other else f"does what '{other}' does"
                raise ScheduleError(f"'{action}' {again}", where, "Remove one")
            places[part] = i
    for action in _wanted(needed, moved, microbatches):
        if action not in places:
            raise ScheduleError(f"'{action}' is missing", where, "Every action is needed once per microbatch")
    if actions[-1].kind != "REDUCE":
        raise ScheduleError(f"'{actions[-1]}' comes after REDUCE", where, "Put REDUCE at the end of the rank")
    return places


def _wanted(needed: dict[int, set[str]], moved: set[Message], microbatches: int) -> Iterable[Action]:
    for stage, kinds in needed.items():
        for kind in sorted(kinds):
            yield from (Action(kind, stage, mb) for mb in range(microbatches))  # type: ignore[arg-type]
    for channel in sorted(moved):
        if channel[1] in needed:
            yield from (Action.send(channel, mb) for mb in range(microbatches))
        if channel[2] in needed:
            yield from (Action.recv(channel, mb) for mb in range(microbatches))
    yield Action("REDUCE")


def _check_order(
    schedule: Schedule, rank: int, places: dict[Action, int], needed: dict[int, set[str]], kept: set[Message]
) -> None:
    """Each action comes after those of the same rank and microbatch whose result it uses."""

    actions = schedule.ranks[rank]

    def after(later: Action, earlier: Action, why: str) -> None:
        if places[later] < places[earlier]:
            raise ScheduleError(
                f"'{actions[places[later]]}' comes before '{actions[places[earlier]]}', {why}",
                _where(schedule, rank),
                "Swap their order",
            )

    sources: dict[tuple[str, int], list[int]] = {}
    for kind, source, destination in sorted(kept):
        sources.setdefault((kind, destination), []).append(source)
    for action in places:
        stage, mb = action.stage, action.microbatch
        if action.kind == "B":
            after(action, Action("F", stage, mb), "whose saved activations it uses")
        elif action.kind == "W":
            earlier: Kind = "B" if "B" in needed[stage] else "F"
            after(action, Action(earlier, stage, mb), "whose results it uses")
        elif action.kind == "SEND":
            after(action, Action(action.message, stage, mb), "which produces what it sends")  # type: ignore[arg-type]
        elif action.kind == "RECV":
            after(Action(action.message, stage, mb), action, "which brings what it needs")  # type: ignore[arg-type]
        for source in sources.get((action.kind, stage), ()):
            after(action, Action(action.kind, source, mb), "which produces what it needs")


def _check_whole(schedule: Schedule, rank: int, divided: Sequence[bool]) -> None:
    """A stage that is divided computes between its GATHER and its FREE alone; each GATHER has one FREE, and a use."""
    where = _where(schedule, rank)
    used: dict[int, bool] = {}  # by stage that is whole: whether it has computed since
    for action in schedule.ranks[rank]:
        stage = action.stage
        if action.kind in WHOLE and not divided[stage]:
            fault = f"'{action}' has nothing to do: no parameters of stage {stage} are divided"
            raise ScheduleError(fault, where, "Remove it; ranks divide parameters with zero=3")
        if action.kind == "GATHER":
            if stage in used:
                fault = f"'{action}' stands there again before 'FREE {stage}'"
                raise ScheduleError(fault, where, "Remove it, or FREE the stage before")
            used[stage] = False
        elif action.kind == "FREE":
            if not used.pop(stage, False):
                fault = (
                    f"'{action}' ends no use: it should come after 'GATHER {stage}' and what the stage computes then"
                )
                raise ScheduleError(fault, where, "Remove it, with its GATHER if there is one")
        elif action.computes and divided[stage]:
            if stage not in used:
                fault = f"'{action}' comes where the parameters of stage {stage} are not whole"
                raise ScheduleError(fault, where, f"Put 'GATHER {stage}' before it, and 'FREE {stage}' behind it")
            used[stage] = True
    if used:
        stage = min(used)
        raise ScheduleError(f"'GATHER {stage}' has no FREE", where, f"Put 'FREE {stage}' behind the stage's last use")


def _check_wires(schedule: Schedule, placement: dict[int, int]) -> None:
    """Both ends of a wire list its messages in the same order: NCCL matches them by order alone."""
    sent: dict[tuple[str, int, int], list[Action]] = {}
    received: dict[tuple[str, int, int], list[Action]] = {}
    for actions in schedule.ranks:
        for action in actions:
            if action.kind in ("SEND", "RECV"):
                wire = (action.message, placement[action.source], placement[action.destination])
                (sent if action.kind == "SEND" else received).setdefault(wire, []).append(action)
    for (kind, a, b), order in sorted(sent.items()):
        for mine, theirs in zip(order, received[kind, a, b]):
            if (mine.channel, mine.microbatch) != (theirs.channel, theirs.microbatch):
                raise ScheduleError(
                    f"'{mine}' of rank {a} meets '{theirs}' of rank {b}",
                    _where(schedule),
                    "Messages are matched by order alone: list them in the same order on both ranks",
                )


def _check_progress(schedule: Schedule, placement: dict[int, int]) -> None:
    """Run the lists: SEND never blocks, RECV waits for its SEND, REDUCE is last and needs no check."""
    position = [0] * len(schedule.ranks)
    sent: set[tuple[Message, int]] = set()
    waiting: dict[tuple[Message, int], int] = {}
    ready = list(range(len(schedule.ranks)))
    while ready:
        rank = ready.pop()
        actions = schedule.ranks[rank]
        while position[rank] < len(actions):
            action = actions[position[rank]]
            token = (action.channel, action.microbatch)
            if action.kind == "RECV" and token not in sent:
                waiting[token] = rank
                break
            if action.kind == "SEND":
                sent.add(token)
                if token in waiting:
                    ready.append(waiting.pop(token))
            position[rank] += 1
    if not waiting:
        return
    # Every blocked rank waits for a rank that is itself blocked, so following the waits runs into a circle.
    path: list[int] = []
    rank = min(waiting.values())
    while rank not in path:
        path.append(rank)
        rank = placement[schedule.ranks[rank][position[rank]].source]
    circle = path[path.index(rank) :]
    waits = [f"rank {r} waits at '{schedule.ranks[r][position[r]]}'" for r in circle]
    raise ScheduleError(
        f"deadlock: {', '.join(waits)}, in a circle: each one's SEND stands behind the wait of the other",
        _where(schedule),
        "Move one of these SENDs, with the action that produces it, ahead of its rank's wait",
    )
