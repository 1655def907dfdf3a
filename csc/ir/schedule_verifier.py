"""Checks that a schedule does the work of a program's stages: whole, once, in a possible order.

Terms: see csc.ir.schedule.

    verify(schedule, messages, has_b, has_w, microbatches, gathered)      ScheduleError: the action, its rank, the cycle

Time is linear in the number of actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from csc.errors import ScheduleError
from csc.ir.schedule import WHOLE, Action, Kind, Message, Schedule


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
        own = [stage for stage, home in placement.items() if home == rank]
        needed = {
            stage: {kind for kind, there in (("F", True), ("B", has_b[stage]), ("W", has_w[stage])) if there}
            for stage in own
        }
        places = _places(schedule, rank, actions, needed, channels, moved, microbatches)
        _check_order(schedule, rank, places, needed, channels - moved)
        _check_whole(schedule, rank, divided)
    _check_wires(schedule, placement)
    _check_progress(schedule, placement)


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
                what = f"'{action}' has nothing to do: stage {action.stage} has no {part.kind}"
                raise ScheduleError(what, where, "Remove it")
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
            what = f"'{action}' has nothing to do: no parameters of stage {stage} are divided"
            raise ScheduleError(what, where, "Remove it; ranks divide parameters with zero=3")
        if action.kind == "GATHER":
            if stage in used:
                what = f"'{action}' stands there again before 'FREE {stage}'"
                raise ScheduleError(what, where, "Remove it, or FREE the stage before")
            used[stage] = False
        elif action.kind == "FREE":
            if not used.pop(stage, False):
                what = f"'{action}' ends no use: it should come after 'GATHER {stage}' and what the stage computes then"
                raise ScheduleError(what, where, "Remove it, with its GATHER if there is one")
        elif action.computes and divided[stage]:
            if stage not in used:
                what = f"'{action}' comes where the parameters of stage {stage} are not whole"
                raise ScheduleError(what, where, f"Put 'GATHER {stage}' before it, and 'FREE {stage}' behind it")
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
