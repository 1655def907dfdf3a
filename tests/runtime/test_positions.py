"""Where ranks stand: what they tell of it, and the sentence that is made of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

import csc
from csc.errors import RankLost
from csc.ir.schedule import Action
from csc.runtime.meeting import Positions
from tests import launching
from tests.compiler import small


@pytest.fixture
def four() -> Iterator[list[Positions]]:
    """Four ranks that tell at once, but for the last one, which tells nothing."""
    store = dist.HashStore()
    made = [Positions(store, rank, 4, 0.2) for rank in range(3)]
    yield made
    for one in made:
        one.close()


def settled(positions: list[Positions]) -> None:
    """Wait until all have told where they stand now."""
    for one in positions:
        while (told := one._of(one._rank)) is None or told != one.now:
            time.sleep(0.01)


def test_a_chain_of_waits(four: list[Positions]) -> None:
    four[2].moved(Action.recv(("F", 1, 2), 5))
    four[2].waits = ("layers.7", 1)
    four[1].moved(Action("BW", 1, 4))
    settled(four)
    assert four[2].told() == (
        ". Where they stand: rank 2, before F of stage 2, microbatch 5, waits for layers.7 from rank 1; "
        "rank 1, at BW of stage 1, microbatch 4"
    )
    four[1].waits = ("layers.3", 2)  # a circle
    settled(four)
    assert four[2].told().count("rank 2, before F") == 1 and "layers.3 from rank 2" in four[2].told()
    four[1].waits = ("layers.3", 3)
    settled(four)
    assert four[2].told().endswith("rank 3 has not said where it is")
    four[1].moved("the end of a step")  # what was told is not left standing
    settled(four)
    assert "rank 1, at the end of a step" in four[2].told()


def test_waits_for_any_of_several(four: list[Positions]) -> None:
    four[0].moved("'train_step' of step 3")
    four[0].waits = ("the others", None)
    four[1].moved("'train_step' of step 3")
    four[1].waits = ("the others", None)
    settled(four)
    assert four[0].told() == (
        ". Where they stand: rank 0, at 'train_step' of step 3, waits for the others; rank 2, between steps; "
        "rank 3 has not said where it is"
    )
    assert Positions(None, 0, 1, 1.0).told() == ""


def test_a_rank_that_has_become_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is stopped: what it told last is not where it is."""
    store = dist.HashStore()
    here, stopped = (Positions(store, rank, 2, 0.2) for rank in range(2))
    stopped.moved(Action("F", 1, 4))
    settled([here, stopped])
    stopped.close()
    assert here.told().endswith("rank 1, at F of stage 1, microbatch 4")
    time.sleep(0.2)  # what its thread was about to tell
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30)
    assert "microbatch 4 (said 30 s ago and nothing since: stopped, or in a call that holds" in here.told()
    here.close()


def test_a_rank_that_waited_once_and_has_become_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    here, stopped = (Positions(store, rank, 2, 0.2) for rank in range(2))
    stopped.moved("'train_step' of step 3")
    stopped.waits = ("the others", None)
    settled([here, stopped])
    stopped.close()
    assert "rank 1" not in here.told(), "it waits as well"
    time.sleep(0.2)  # what its thread was about to tell
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 30)
    assert "rank 1, at 'train_step' of step 3, waits for the others (said 30 s ago" in here.told()
    here.close()


def main(directory: Any) -> None:
    """The first of two ranks does not get done with its second microbatch."""
    compiled = csc.compile(
        small.text(2),
        mesh="pp=2",
        example=small.text_batch(2),
        microbatches=2,
        schedule="1f1b",
        cuts=["layers.1"],
        timeout=3,
        check=False,
    )
    compiled.train_step(small.text_batch(2))
    if dist.get_rank() == 0:
        functions = compiled.trainer().ranks[0].functions
        forward, calls = functions[0].forward, []

        def slow(*arguments: Any) -> Any:
            calls.append(time.sleep(8 if calls else 0))
            return forward(*arguments)

        object.__setattr__(functions[0], "forward", slow)
    try:
        compiled.train_step(small.text_batch(2))
    except RankLost as error:
        (directory / f"told_{dist.get_rank()}.txt").write_text(str(error))


@pytest.mark.gloo
def test_a_rank_that_hangs_is_found(tmp_path: Any) -> None:
    launching.ranks(main, 2, tmp_path)
    told = (tmp_path / "told_1.txt").read_text()
    assert "Where they stand: rank 1, before F of stage 1, microbatch 1, waits for layers.0 from rank 0" in told
    assert "; rank 0, at F of stage 0, microbatch 1." in told
