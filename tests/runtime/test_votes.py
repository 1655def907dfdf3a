"""Votes: they travel as whole numbers, and come back as they were said."""

from __future__ import annotations

from dataclasses import astuple, fields

from hypothesis import given
from hypothesis import strategies as st

from csc.runtime.meeting import StepVote, VoteNumbers, as_int

WHOLE = st.integers(-(2**63), 2**63 - 1)
VOTES = st.builds(StepVote, *[st.booleans() if type(field.default) is bool else WHOLE for field in fields(StepVote)])


@given(WHOLE, st.floats(allow_nan=False), VOTES)
def test_a_row_says_what_the_vote_said(content: int, value: float, step: StepVote) -> None:
    row = [1, 2, 0, 3, 4, content, as_int(value), 0, *map(int, astuple(step))]
    assert VoteNumbers.of(row) == VoteNumbers(content, value, step)


@given(st.lists(VOTES, max_size=4))
def test_what_any_rank_says_is_said_and_digests_are_not(votes: list[StepVote]) -> None:
    together = StepVote.of_any(votes)
    for field in fields(StepVote):
        said = [getattr(vote, field.name) for vote in votes]
        assert getattr(together, field.name) == (any(said) if type(field.default) is bool else 0)
