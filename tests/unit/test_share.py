"""What ranks say before a step, as bits of one number."""

from __future__ import annotations

from csc.driver.batches import FLAGS, UNSERVED
from csc.runtime import fusing, trainer


def test_no_bit_of_a_trainer_is_that_of_a_rank_without_a_program() -> None:
    of_functions = (fusing.BUSY, fusing.PREPARES, fusing.READY)
    said = (trainer.UNEVEN, trainer.STALE, trainer.NOTHING_AHEAD, *(trainer.FUSED * bit for bit in of_functions))
    assert len({*said, UNSERVED, FLAGS}) == 8
    assert all(bit.bit_count() == 1 for bit in (*said, UNSERVED, FLAGS))
    assert sum(said) < UNSERVED and sum(said) + UNSERVED < FLAGS
