"""Schedules: GPipe and 1F1B over a DAG of stages.

Terms: see csc.ir.schedule. *Warm-up*: the forwards a stage runs before its first backward. A stage has B if
gradients must flow to or through it, and W if it has trainable parameters; a stage without both (frozen) only
runs F and frees right after.

    gpipe(stages, microbatches, messages, has_b, has_w) -> Schedule         all F, then all B and W
    one_f_one_b(stages, microbatches, messages, has_b, has_w) -> Schedule   in turns; on stage s at most
                                                                            pp - s microbatches are alive

`messages` are (kind, source, destination): F messages lead to later stages, B messages to earlier ones. In
both schedules a stage sends its gradients right after B and before W, so nobody waits for W, and adds up
microbatches in the order 0, 1, 2, ...: both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from csc.errors import ScheduleError
from csc.ir.schedule import Action, Message, Schedule, verify


def gpipe(
    stages: int,
    microbatches: int,
    messages: Iterable[Message],
    has_b: Sequence[bool],
    has_w: Sequence[bool],
) -> Schedule:
    """All forwards, then all backwards (Huang et al. 2019). Every microbatch's activations are alive at the
    turn.
    """
    return _build("gpipe", stages, microbatches, messages, has_b, has_w, lambda stage: microbatches)


def one_f_one_b(
    stages: int,
    microbatches: int,
    messages: Iterable[Message],
    has_b: Sequence[bool],
    has_w: Sequence[bool],
) -> Schedule:
    """One forward, one backward in turn after a warm-up of pp - s forwards (PipeDream-flush, Narayanan et al.
    2021).

    Free of deadlock on any DAG: F k on stage s waits for B k - (pp - s), which needs forwards of at most k -
    2 on every stage after s. Stages without B run their forwards without a limit, since they keep nothing.
    """
    return _build("1f1b", stages, microbatches, messages, has_b, has_w, lambda stage: stages - stage)


def _build(
    name: str,
    stages: int,
    microbatches: int,
    messages: Iterable[Message],
    has_b: Sequence[bool],
    has_w: Sequence[bool],
    warm_up: Callable[[int], int],
) -> Schedule:
    channels = sorted(set(messages))
    for kind, source, destination in channels:
        if (source < destination) != (kind == "F"):
            raise ScheduleError(
                f"message {kind} {source}>{destination} leads the wrong way",
                f"schedule {name}",
                "Number the stages so that activations go to later stages and gradients to earlier ones",
            )
    lists = []
    for stage in range(stages):
        backward = has_b[stage] or has_w[stage]
        ahead = min(warm_up(stage), microbatches) if backward else microbatches
        actions: list[Action] = []
        for mb in range(microbatches + ahead):  # step mb: forward of mb, backward of mb - ahead
            if mb >= ahead and backward:
                actions += _backward(stage, mb - ahead, channels, has_b[stage], has_w[stage])
            if mb < microbatches:
                actions += _around(Action("F", stage, mb), channels)
        lists.append((*actions, Action("REDUCE", stage)))
    schedule = Schedule(name, tuple(lists))
    verify(schedule, channels, has_b, has_w, microbatches)
    return schedule


def _around(action: Action, channels: Sequence[Message]) -> list[Action]:
    """The action with the messages that it needs before it and those that it produces after it."""
    stage, mb, kind = action.stage, action.microbatch, action.kind
    before = [Action.recv(c, mb) for c in channels if c[0] == kind and c[2] == stage]
    after = [Action.send(c, mb) for c in channels if c[0] == kind and c[1] == stage]
    return [*before, action, *after]


def _backward(stage: int, mb: int, channels: Sequence[Message], has_b: bool, has_w: bool) -> list[Action]:
    actions = _around(Action("B", stage, mb), channels) if has_b else []
    return [*actions, Action("W", stage, mb)] if has_w else actions
