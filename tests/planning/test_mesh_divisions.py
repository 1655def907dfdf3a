"""Which division of a model is traced next, told from those that were."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from csc.driver import mesh_candidates
from csc.driver.mesh_candidates import DividedProblems, MeshCandidate, UntracedDivisions, encoders
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.planning.meshes import PLAIN, MeshDivision, MeshForm, MeshLayout, layouts
from tests.planning.test_mesh_forms import chain

IDEAL = 10.0


@dataclass
class Known:
    """What a search knows: nothing divided takes less than IDEAL."""

    extras: dict[MeshDivision, float] = field(default_factory=dict)

    def ideal(self, layout: MeshLayout) -> float:
        return IDEAL / layout.samples


def untraced(known: Known, sizes: tuple[int, ...] = (1,)) -> UntracedDivisions:
    return UntracedDivisions(cast(DividedProblems, known), layouts(64, 256, sizes, 8, 32))


def expected(listed: UntracedDivisions) -> dict[tuple[int, int, int], float]:
    """All, in the order in which they would be traced."""
    found = {}
    while (one := listed.next()) is not None:
        seconds, division = one
        assert all(layout.division == division for layout in listed.take(division))
        found[division.tp, division.cp, division.samples] = seconds
    return found


def test_nothing_is_known_at_first() -> None:
    """Whole layers come first."""
    found = expected(untraced(Known()))
    assert list(found)[:4] == [(1, 1, 1), (2, 1, 1), (1, 2, 1), (4, 1, 1)]
    assert set(found.values()) == {IDEAL} and len(found) == 4 * 4


def test_what_is_told_of_the_same_sizes_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search asks it of every division, each time that it looks for the next one."""
    asked: list[tuple[int, int, float]] = []

    def least(numbers: Any) -> float:
        asked.append((numbers.ranks, numbers.microbatches, numbers.units[0].work))
        return 1.0 + len(asked)

    monkeypatch.setattr(mesh_candidates, "least_seconds", least)
    problems = DividedProblems(cast(Any, None))
    problems.wholes = {1: chain(1, ("a", 8.0)), 2: None}
    listed = [MeshLayout(Mesh(dp=dp, pp=pp, tp=tp), 1, many) for dp in (1, 2) for pp in (1, 2) for tp in (1, 4)
              for many in (3, 6)]  # fmt: skip
    for _ in range(3):
        found = {one: problems.ideal(one) for one in listed}
    assert len(asked) == len(set(asked)) == 8 == len(set(found.values()))
    assert problems.ideal(MeshLayout(Mesh(), 2, 3)) == 0.0, "nothing is known of one device"


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_workers_divide_all_there_is(count: int) -> None:
    """Nothing twice; a division, whose other forms a worker may trace, is of one, and whole layers of all."""
    asked, listed = layouts(64, 256, (1, 2), 8, 32), untraced(Known(), (1, 2))
    traced: list[MeshCandidate] = []
    for _ in range(4):
        one = listed.next()
        assert one is not None
        for layout in listed.take(one[1]):
            layout = layout.in_form(MeshForm((), layout.mesh.tp > 1))
            traced += [MeshCandidate(layout, Options(), "none", float(layout.mesh.pp), 0, 1.0) for _ in range(2)]
    parts = listed.parts(traced, count)
    assert len(parts) == count and sum(len(candidates) for candidates, _ in parts) == len(traced)
    found: list[MeshLayout] = []
    owners: dict[MeshDivision, set[int]] = {}
    for number, (candidates, own) in enumerate(parts):
        found += {one.layout.in_form(PLAIN) for one in candidates}
        for one in candidates:
            owners.setdefault(one.layout.division, set()).add(number)
        while (following := own.next()) is not None:
            found += own.take(following[1])
    assert len(found) == len(asked) and set(found) == set(asked)
    assert all(len(own) == 1 for division, own in owners.items() if division.tp * division.cp > 1)
    assert len(owners[MeshDivision(1, 1, 1)]) >= min(count, 2)


def test_extras_grow_with_ranks_and_add_up() -> None:
    known = Known({MeshDivision(1, 1, 1): 0.0, MeshDivision(2, 1, 1): 0.1, MeshDivision(1, 2, 1): 0.3})
    found = expected(untraced(known))
    assert found[4, 1, 1] == pytest.approx(IDEAL * 1.2) and found[1, 4, 1] == pytest.approx(IDEAL * 1.6)
    assert found[2, 2, 1] == pytest.approx(IDEAL * 1.4) and found[8, 8, 1] == pytest.approx(IDEAL * (1 + 0.4 + 1.2))
    assert list(found.values()) == sorted(found.values())


def test_the_form_that_takes_least_counts_and_the_sharpest_of_what_is_known() -> None:
    known = Known({
        MeshDivision(2, 1, 1): 0.2, MeshDivision(2, 1, 1, MeshForm(("vision",))): 0.05, MeshDivision(4, 1, 1): 0.3,
        MeshDivision(1, 2, 1): -0.02,
    })  # fmt: skip
    found = expected(untraced(known))
    assert found[8, 1, 1] == pytest.approx(IDEAL * 1.6) and found[2, 1, 1] == pytest.approx(IDEAL * 1.05)
    assert found[1, 8, 1] == IDEAL  # less work than one device's is no promise for more ranks


def test_microbatches_of_other_sizes_tell_nothing() -> None:
    found = expected(untraced(Known({MeshDivision(2, 1, 1): 0.5}), (1, 2)))
    assert found[4, 1, 1] == pytest.approx(IDEAL * 2) and found[4, 1, 2] == IDEAL / 2


def test_encoders_are_all_components_but_that_of_the_loss() -> None:
    """Also one with more work than the language model has."""

    def program(*regions: tuple[str, str]) -> Program:
        return cast(Program, SimpleNamespace(regions=[SimpleNamespace(kind=k, component=c) for k, c in regions]))

    layer: Any = "layer"
    assert encoders(program((layer, "vision"), (layer, "vision"), (layer, "llm"), ("head", "llm"))) == ("vision",)
    both = program((layer, "audio"), (layer, "vision"), ("other", "projector"), (layer, "llm"), ("loss", "model"))
    assert encoders(both) == ("audio", "vision")
    assert encoders(program((layer, "llm"))) == () == encoders(program(("other", "model")))


def test_what_one_device_does_alone_comes_first() -> None:
    """Though sizes that nobody knows anything of could be faster: its graph is there."""

    @dataclass
    class Free(Known):
        def ideal(self, layout: MeshLayout) -> float:
            return IDEAL / layout.mesh.tp

    listed = untraced(Free())
    first, second = listed.next(), None
    if first is not None:
        listed.take(first[1])
        second = listed.next()
    assert first is not None and (first[1].tp, first[1].cp) == (1, 1)
    assert second is not None and second[1].tp > 1
