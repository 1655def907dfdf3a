"""The schedule: for every stage the list of actions that its ranks run, in order.

Terms: *F*, *B*, *W* compute a microbatch's forward, input gradients and weight gradients on a stage; *SEND*
and *RECV* move the values of a message (F: activations, B: gradients) from stage a to stage b; *REDUCE* sums
gradients over ranks at the end of a step. A *channel* is (message kind, a, b): its messages arrive in the
order in which they are sent.

    # 1f1b, 2 stages, 1 microbatches
    stage 0: F 0 0 | SEND F 0>1 0 | RECV B 1>0 0 | B 0 0 | W 0 0 | REDUCE
    stage 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | W 1 0 | REDUCE

    parse(text) -> Schedule        str(schedule) -> text        peak_in_flight(schedule) -> [count per stage]
    verify(schedule, messages, has_b, has_w, microbatches)                       ScheduleError with a sentence

A line that starts with white space continues the stage above it; `#` starts a comment; the first comment
names the schedule.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from csc.errors import ScheduleError

Kind = Literal["F", "B", "W", "SEND", "RECV", "REDUCE"]
Message = tuple[str, int, int]  # (kind, source stage, destination stage)

COMPUTE = ("F", "B", "W")
WIDTH = 110


@dataclass(frozen=True)
class Action:
    """One step of one stage. `stage` is the stage that runs it; `microbatch` is -1 for REDUCE.

    SEND and RECV also carry the message's kind and both ends; for the others these are "" and -1.
    """

    kind: Kind
    stage: int
    microbatch: int = -1
    message: str = ""
    source: int = -1
    destination: int = -1

    @property
    def computes(self) -> bool:
        """True for F, B and W."""
        return self.kind in COMPUTE

    @property
    def channel(self) -> Message:
        """(kind, source, destination) of a SEND or RECV."""
        return (self.message, self.source, self.destination)

    def __str__(self) -> str:
        if self.kind == "REDUCE":
            return "REDUCE"
        if self.computes:
            return f"{self.kind} {self.stage} {self.microbatch}"
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
    """A name and, for stage s, `stages[s]`: what its ranks run. Every dp replica runs the same list."""

    name: str
    stages: tuple[tuple[Action, ...], ...]

    @property
    def microbatches(self) -> int:
        """One more than the largest microbatch number."""
        return 1 + max((a.microbatch for actions in self.stages for a in actions), default=-1)

    def __str__(self) -> str:
        lines = [f"# {self.name}, {len(self.stages)} stages, {self.microbatches} microbatches"]
        for stage, actions in enumerate(self.stages):
            head = f"stage {stage}:"
            line = head
            for i, action in enumerate(actions):
                part = f" {action}" + (" |" if i + 1 < len(actions) else "")
                if len(line) + len(part) > WIDTH:
                    lines.append(line)
                    line = " " * len(head)
                line += part
            lines.append(line)
        return "\n".join(lines) + "\n"


_STAGE = re.compile(r"stage\s+(\d+)\s*:(.*)", re.DOTALL)
_COMPUTE = re.compile(r"([FBW])\s+(\d+)\s+(\d+)")
_MOVE = re.compile(r"(SEND|RECV)\s+([FB])\s+(\d+)\s*>\s*(\d+)\s+(\d+)")
_FORMS = "Actions are: F s mb, B s mb, W s mb, SEND K a>b mb, RECV K a>b mb, REDUCE"


def _action(text: str, stage: int, where: str) -> Action:
    if text == "REDUCE":
        return Action("REDUCE", stage)
    if found := _COMPUTE.fullmatch(text):
        action = Action(found[1], int(found[2]), int(found[3]))  # type: ignore[arg-type]
    elif found := _MOVE.fullmatch(text):
        channel = (found[2], int(found[3]), int(found[4]))
        make = Action.send if found[1] == "SEND" else Action.recv
        action = make(channel, int(found[5]))
    else:
        raise ScheduleError(f"{text!r} is not an action", where, _FORMS)
    if action.stage != stage:
        raise ScheduleError(
            f"'{action}' belongs to stage {action.stage} but stands in the list of stage {stage}",
            where,
            "Move it",
        )
    return action


def parse(text: str) -> Schedule:
    """Read a schedule's text. ScheduleError, with the line, for text that is not one. The order is not
    checked: see `verify`.
    """
    name = ""
    stages: list[list[Action]] = []
    for number, raw in enumerate(text.splitlines(), 1):
        where = f"schedule, line {number}"
        line, hash_, comment = raw.partition("#")
        if hash_ and not name:
            name = comment.split(",")[0].strip()
        if not line.strip():
            continue
        if line[0].isspace():
            if not stages:
                raise ScheduleError("the line continues a stage, but no stage came before", where, _FORMS)
            body = line
        else:
            found = _STAGE.fullmatch(line.strip())
            if found is None:
                raise ScheduleError(f"{line.strip()[:40]!r} does not start with 'stage N:'", where, _FORMS)
            if int(found[1]) != len(stages):
                raise ScheduleError(
                    f"stage {found[1]} stands where stage {len(stages)} should",
                    where,
                    "List the stages once each, in order from 0",
                )
            stages.append([])
            body = found[2]
        parts = [part.strip() for part in body.split("|")]
        stages[-1] += [_action(part, len(stages) - 1, where) for part in parts if part]
    if not stages:
        raise ScheduleError("it lists no stage", "schedule", "Write a line 'stage N: ...' for every stage")
    return Schedule(name or "schedule", tuple(tuple(actions) for actions in stages))


def peak_in_flight(schedule: Schedule) -> list[int]:
    """Per stage, the largest number of microbatches whose saved activations are alive at once.

    They live from F to the last of the stage's B and W of that microbatch. A stage without B or W keeps
    nothing: 0.
    """
    peaks = []
    for actions in schedule.stages:
        last = {a.microbatch: i for i, a in enumerate(actions) if a.kind in ("B", "W")}
        alive = peak = 0
        for i, action in enumerate(actions):
            if action.kind == "F" and action.microbatch in last:
                alive += 1
                peak = max(peak, alive)
            elif action.kind in ("B", "W") and last[action.microbatch] == i:
                alive -= 1
        peaks.append(peak)
    return peaks


def verify(
    schedule: Schedule,
    messages: Iterable[Message],
    has_b: Sequence[bool],
    has_w: Sequence[bool],
    microbatches: int,
) -> None:
    """Raise a ScheduleError unless the schedule does the work of these stages, whole, once, in a possible
    order.

    `messages` are the channels between stages, `has_b[s]` and `has_w[s]` say whether stage s has B and W.
    Time is linear in the number of actions.
    """
    channels = set(messages)
    if len(schedule.stages) != len(has_b):
        raise ScheduleError(
            f"it has {len(schedule.stages)} stages, the program has {len(has_b)}",
            _where(schedule),
            "Add or remove",
        )
    for stage, actions in enumerate(schedule.stages):
        needed = {kind for kind, there in (("F", True), ("B", has_b[stage]), ("W", has_w[stage])) if there}
        places = _places(schedule, stage, actions, needed, channels, microbatches)
        _check_order(schedule, stage, places, needed, channels)
    _check_channels(schedule, channels)
    _check_progress(schedule)


def _where(schedule: Schedule, stage: int | None = None) -> str:
    return f"schedule {schedule.name}" + ("" if stage is None else f", stage {stage}")


def _places(
    schedule: Schedule,
    stage: int,
    actions: Sequence[Action],
    needed: set[str],
    channels: set[Message],
    microbatches: int,
) -> dict[Action, int]:
    """Position of every action of a stage, having checked that it holds exactly the actions that it needs."""
    where = _where(schedule, stage)
    places: dict[Action, int] = {}
    for i, action in enumerate(actions):
        if action.stage != stage:
            raise ScheduleError(f"'{action}' belongs to stage {action.stage}", where, "Move it to that stage")
        if action in places:
            raise ScheduleError(f"'{action}' stands there twice", where, "Remove one")
        if action.kind != "REDUCE" and not 0 <= action.microbatch < microbatches:
            raise ScheduleError(f"'{action}' is for a microbatch outside 0..{microbatches - 1}", where, "Remove it")
        if action.computes and action.kind not in needed:
            raise ScheduleError(f"'{action}' has nothing to do: the stage has no {action.kind}", where, "Remove it")
        if action.kind in ("SEND", "RECV") and action.channel not in channels:
            known = ", ".join(f"{k} {a}>{b}" for k, a, b in sorted(channels)) or "none"
            raise ScheduleError(f"'{action}': there is no such message; there are: {known}", where, "Remove it")
        places[action] = i
    wanted = [Action(kind, stage, mb) for mb in range(microbatches) for kind in sorted(needed)]  # type: ignore[arg-type]
    for channel in sorted(channels):
        if channel[1] == stage:
            wanted += [Action.send(channel, mb) for mb in range(microbatches)]
        if channel[2] == stage:
            wanted += [Action.recv(channel, mb) for mb in range(microbatches)]
    for action in [*wanted, Action("REDUCE", stage)]:
        if action not in places:
            raise ScheduleError(f"'{action}' is missing", where, "Every action is needed once per microbatch")
    if actions[-1].kind != "REDUCE":
        raise ScheduleError(f"'{actions[-1]}' comes after REDUCE", where, "Put REDUCE at the end of the stage")
    return places


def _check_order(
    schedule: Schedule, stage: int, places: dict[Action, int], needed: set[str], channels: set[Message]
) -> None:
    """Each action of a stage comes after those of the same stage and microbatch whose result it uses."""

    def after(later: Action, earlier: Action, why: str) -> None:
        if places[later] < places[earlier]:
            raise ScheduleError(
                f"'{later}' comes before '{earlier}', {why}", _where(schedule, stage), "Swap their order"
            )

    for action in places:
        mb = action.microbatch
        if action.kind == "B":
            after(action, Action("F", stage, mb), "whose saved activations it uses")
        elif action.kind == "W":
            earlier: Kind = "B" if "B" in needed else "F"
            after(action, Action(earlier, stage, mb), "whose results it uses")
        elif action.kind == "SEND":
            after(action, Action(action.message, stage, mb), "which produces what it sends")  # type: ignore[arg-type]
        elif action.kind == "RECV":
            after(Action(action.message, stage, mb), action, "which brings what it needs")  # type: ignore[arg-type]


def _check_channels(schedule: Schedule, channels: set[Message]) -> None:
    """Both ends of a channel list its messages in the same order: NCCL matches them by order alone."""
    sent: dict[Message, list[int]] = {channel: [] for channel in channels}
    received: dict[Message, list[int]] = {channel: [] for channel in channels}
    for actions in schedule.stages:
        for action in actions:
            if action.kind == "SEND":
                sent[action.channel].append(action.microbatch)
            elif action.kind == "RECV":
                received[action.channel].append(action.microbatch)
    for (kind, a, b), order in sorted(sent.items()):
        for mine, theirs in zip(order, received[kind, a, b]):
            if mine != theirs:
                raise ScheduleError(
                    f"'{Action.send((kind, a, b), mine)}' of stage {a} meets "
                    f"'{Action.recv((kind, a, b), theirs)}' of stage {b}",
                    _where(schedule),
                    "Messages are matched by order alone: list them in the same order on both stages",
                )


def _check_progress(schedule: Schedule) -> None:
    """Run the lists: SEND never blocks, RECV waits for its SEND, REDUCE is last and needs no check."""
    position = [0] * len(schedule.stages)
    sent: set[tuple[Message, int]] = set()
    waiting: dict[tuple[Message, int], int] = {}
    ready = list(range(len(schedule.stages)))
    while ready:
        stage = ready.pop()
        actions = schedule.stages[stage]
        while position[stage] < len(actions):
            action = actions[position[stage]]
            token = (action.channel, action.microbatch)
            if action.kind == "RECV" and token not in sent:
                waiting[token] = stage
                break
            if action.kind == "SEND":
                sent.add(token)
                if token in waiting:
                    ready.append(waiting.pop(token))
            position[stage] += 1
    if not waiting:
        return
    # Every blocked stage waits for a stage that is itself blocked, so following the waits runs into a circle.
    path: list[int] = []
    stage = min(waiting.values())
    while stage not in path:
        path.append(stage)
        stage = schedule.stages[stage][position[stage]].source
    circle = path[path.index(stage) :]
    waits = [f"stage {s} waits at '{schedule.stages[s][position[s]]}'" for s in circle]
    raise ScheduleError(
        f"deadlock: {', '.join(waits)}, in a circle: each one's SEND stands behind the wait of the other",
        _where(schedule),
        "Move one of these SENDs, with the action that produces it, ahead of its stage's wait",
    )
