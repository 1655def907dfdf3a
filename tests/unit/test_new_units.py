"""New units of several microbatches in few runs of an encoder."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from csc.driver.features import Partly, runs

UNITS = [(f"{label}{number}", label) for label in "ab" for number in range(6)]
microbatches = st.lists(st.lists(st.sampled_from(UNITS), min_size=1, max_size=4), min_size=1, max_size=6)


def partly(number: int, units: list[tuple[str, str]], kept: set[str]) -> Partly:
    keys, cut = [key for key, _ in units], SimpleNamespace(entries={"x": [1] * len(units)})
    named: Any = SimpleNamespace(labels=[label for _, label in units], cut=cut)
    rows = torch.tensor([UNITS.index(one) if one in UNITS else 0 for one in units])
    return Partly(number, named, keys, {"x": rows}, {key: {} for key in keys if key in kept})


@given(listed=microbatches, kept=st.sets(st.sampled_from([key for key, _ in UNITS])))
def test_every_new_unit_is_in_a_run_in_a_place_of_its_label(
    listed: list[list[tuple[str, str]]], kept: set[str]
) -> None:
    """As many runs as microbatches at most; what is new in the one at whose sizes it runs keeps its place."""
    given_ = [partly(number, units, kept) for number, units in enumerate(listed)]
    made: set[str] = set()
    found = list(runs(given_))
    assert len({run.at.number for run in found}) == len(found)
    for run in found:
        assert not set(run.at.keys) <= made | kept, "it was worth a run"
        places = zip(run.at.keys, run.at.units.labels, run.filled, strict=True)
        for key, label, (one, place) in places:
            assert one.units.labels[place] == label
            assert one is run.at or (key in kept | made and one.number > run.at.number)
        assert run.entries()["x"].tolist() == [UNITS.index((key, key[0])) for key in run.keys]
        made |= set(run.keys)
    assert {key for one in given_ for key in one.keys} <= made | kept


def test_eight_microbatches_with_a_new_unit_each_take_two_runs() -> None:
    one = [partly(n, [(f"{n}{k}", "a") for k in range(4)], set()) for n in range(8)]
    halves = [Partly(p.number, p.units, p.keys, {}, {key: {} for key in p.keys[1:]}) for p in one]
    assert [run.keys for run in runs(halves)] == [["00", "10", "20", "30"], ["40", "50", "60", "70"]]
