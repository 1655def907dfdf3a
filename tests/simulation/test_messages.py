"""Bytes of messages that wait: counted by hand on a chain of two ranks."""

from __future__ import annotations

from dataclasses import replace

from csc.ir.schedule import parse
from csc.simulation.pipeline import Link, Network, Pipeline, StageWork, from_json, peak_memory, peaks, to_json
from csc.simulation.simulate import simulate

SENDING = "rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | SEND F 0>1 1 | RECV B 1>0 0 | B 0 0 | RECV B 1>0 1 | B 0 1 | REDUCE\n"
TAKING = "rank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | RECV F 0>1 1 | F 1 1 | B 1 1 | SEND B 1>0 1 | REDUCE\n"


def two(answered: bool = False) -> Pipeline:
    stage = StageWork(1.0, 1.0, 0.0, has_w=False, saved=10.0, state=100.0, working=5.0)
    return Pipeline((stage, stage), {("F", 0, 1): 3.0, ("B", 1, 0): 2.0}, Network(Link(), Link(), None, (), answered))


def test_messages_wait_until_they_were_taken() -> None:
    """Rank 1 computes one microbatch after the other; the F of the second waits on rank 0 until rank 1 posts it."""
    schedule = parse("# mine\n" + SENDING + TAKING)
    pipeline = two()
    run = simulate(pipeline, schedule)
    assert peak_memory(pipeline, schedule) == [125.0, 115.0]
    # Rank 0 holds what it saved twice, and the second message from 2 on, when rank 1 is in B, which posts it: moved.
    # Rank 1 posts the second F (3) when B of the first starts, at 2, and still holds what that saved; its own
    # gradient (2) leaves at 3, when rank 0 has posted it long ago.
    assert peaks(pipeline, schedule, run) == [125.0 + 2.0, 115.0 + 3.0]


def test_without_an_answer_a_sender_keeps_its_messages() -> None:
    """gloo: F's until their B's come back, B's until the step ends."""
    schedule = parse("# mine\n" + SENDING + TAKING)
    pipeline = two(answered=True)
    # Rank 1 is fullest in its first B, when it has posted the second F and sent no gradient yet.
    assert peaks(pipeline, schedule, simulate(pipeline, schedule)) == [125.0 + 2 * 3.0 + 2.0, 115.0 + 3.0]
    assert from_json(to_json(pipeline)) == pipeline


def test_what_stays_on_its_rank_waits_for_the_next_stage() -> None:
    schedule = parse("# mine\nrank 0: F 0 0 | F 0 1 | F 1 1 | F 1 0 | B 1 0 | B 0 0 | B 1 1 | B 0 1 | REDUCE\n")
    pipeline = replace(two(), stages=(replace(two().stages[0], saved=0.0), replace(two().stages[1], saved=0.0)))
    assert peaks(pipeline, schedule, simulate(pipeline, schedule)) == [205.0 + 3.0]
