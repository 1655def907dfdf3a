"""The actions of a rank that several replicas share: those of the schedule, for a microbatch of each.

Terms: a *turn* is one F, B, W or BW with the messages of its microbatch that come right before it and right behind it.

    repeated(actions, replicas) -> actions           each rank with one stage: components with fewer replicas have that

Whatever order of actions is free of deadlock for one replica is so for several, turn by turn: the events of the
schedule have an order in which each comes after those that it waits for, and each stands there once for every replica.
Nothing but the rank itself waits for what comes before its compute, and no message behind it waits for anything. A turn
with two computes would not do: what the second waits for may need the first of another replica. With one stage on a
rank there is one channel for each kind between two ranks, whose messages of several replicas come in turns on both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from csc.ir.schedule import Action


def repeated(actions: Sequence[Action], replicas: int) -> tuple[Action, ...]:
    """Microbatch m of replica r is number `m * replicas + r`: gradients of each are added in the order of numbers. What
    is of no microbatch is done once.
    """
    if replicas == 1:
        return tuple(actions)
    return tuple(
        one if one.microbatch < 0 else one._replace(microbatch=one.microbatch * replicas + replica)
        for turn in _turns(actions)
        for replica in range(replicas if turn[0].microbatch >= 0 else 1)
        for one in turn
    )


def _turns(actions: Sequence[Action]) -> Iterator[list[Action]]:
    turn: list[Action] = []
    for action in actions:
        computed = any(one.computes for one in turn)
        if turn and (action.microbatch != turn[0].microbatch or (computed and action.kind != "SEND")):
            yield turn
            turn = []
        turn.append(action)
        if action.microbatch < 0:
            yield turn
            turn = []
    if turn:
        yield turn
