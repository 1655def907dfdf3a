"""Forms of tensor-parallel layouts, stages that encoders may have, and what nothing divided falls below."""

from __future__ import annotations

from dataclasses import replace

import pytest

from csc.driver.mesh_candidates import MeshChoice, MeshIfRoom, MeshRow, forms, own_stages
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from csc.planning.meshes import PLAIN, MeshDivision, MeshForm, MeshLayout, least_seconds
from csc.planning.problem import Problem, Unit, Value, in_parts

TP = MeshDivision(4, 1, 1)


def test_forms_share_out_tokens_first_and_encoders_together_before_each() -> None:
    found = forms(("vision", "audio"), Options(), TP)
    groups = [(), (("audio", 1), ("vision", 1)), (("vision", 1),), (("audio", 1),)]
    assert found == [MeshForm(own, sequence) for sequence in (True, False) for own in groups]
    assert forms(("vision",), Options(), TP) == [
        MeshForm(own, sequence) for sequence in (True, False) for own in ((), (("vision", 1),))
    ]
    assert forms((), Options(), TP) == [MeshForm((), True), PLAIN]


def test_ranks_of_cp_share_out_samples_of_encoders_first() -> None:
    both, whole = ("vision", "audio"), ("audio", "vision")
    assert forms(both, Options(), MeshDivision(1, 2, 1)) == [MeshForm(whole=whole), PLAIN]
    assert forms((), Options(), MeshDivision(1, 2, 1)) == [PLAIN] == forms(both, Options(), MeshDivision(1, 1, 1))
    of_tp = forms(both, Options(), TP)
    assert forms(both, Options(), MeshDivision(4, 2, 1)) == [*(replace(one, whole=whole) for one in of_tp), *of_tp]
    layout = MeshLayout(Mesh(dp=2, cp=2, pp=3), 2, 8).in_form(MeshForm((("vision", 1),), True, whole))
    assert str(layout.mesh) == "dp=2,pp=3,cp=2,audio.cp=1,vision.cp=1" and not layout.sequence
    assert layout.division == MeshDivision(1, 2, 2, MeshForm(whole=whole))
    assert str(layout.division) == "tp=1, cp=2, audio.cp=1, vision.cp=1"


def test_what_the_options_say_is_kept() -> None:
    assert all(form.sequence for form in forms(("vision",), Options(sequence_parallel=True), TP))
    options = replace(Options(), context=(("vision", 2),))
    assert {form.own for form in forms(("vision", "audio"), options, TP)} == {(), (("audio", 1),)}
    assert {form.whole for form in forms(("vision", "audio"), options, MeshDivision(1, 2, 1))} == {(), ("audio",)}


def test_a_layout_in_a_form_is_a_mesh_that_can_be_written() -> None:
    layout = MeshLayout(Mesh(dp=2, tp=4, pp=3), 2, 8)
    form = MeshForm((("vision", 1),), True)
    found = layout.in_form(form)
    assert str(found.mesh) == "dp=2,pp=3,tp=4,vision.tp=1" and Mesh.parse(str(found.mesh)) == found.mesh
    assert found.division == MeshDivision(4, 1, 2, form) and layout.division == MeshDivision(4, 1, 2)
    assert str(found.division) == "tp=4, cp=1, vision.tp=1, sequence_parallel" and "sequence" in str(found)
    assert found.in_form(PLAIN) == layout
    alone = MeshLayout(Mesh(dp=8), 2, 8)
    assert alone.in_form(form) == alone


def chain(ranks: int, *seconds: tuple[str, float]) -> Problem:
    units = tuple(Unit(f"u{i}", name, time, time, time) for i, (name, time) in enumerate(seconds))
    values = tuple(Value(i, (i + 1,), (True,), 1.0, 1.0) for i in range(len(units) - 1))
    return Problem(units, values, ranks, 8)


def test_own_stages_follow_the_work() -> None:
    numbers = chain(8, ("vision", 1.0), ("vision", 1.0), ("llm", 3.0), ("llm", 3.0))
    assert own_stages(("vision",), numbers) == [(("vision", 2),)]
    assert own_stages(("vision",), replace(numbers, ranks=6)) == [(("vision", 1),), (("vision", 2),)]
    assert own_stages((), numbers) == [] and own_stages(("vision",), replace(numbers, ranks=1)) == []
    assert own_stages(("vision",), replace(numbers, ranks=2)) == [(("vision", 1),)]


@pytest.mark.parametrize("parts", [1, 2, 8])
def test_nothing_divided_is_faster_than_an_even_part(parts: int) -> None:
    """Products divided evenly, what is not divided (norms) and exchanges on top."""
    whole = chain(2, ("llm", 3.0), ("llm", 3.0), ("llm", 1.0))
    divided = replace(
        whole,
        units=tuple(
            replace(
                unit, forward=0.9 * unit.forward / parts + 0.1 * unit.forward + 0.01,
                backward_input=unit.backward_input / parts + 0.02, backward_weight=unit.backward_weight / parts,
            )
            for unit in whole.units
        ),
    )  # fmt: skip
    assert least_seconds(in_parts(whole, parts)) <= least_seconds(divided)
    assert least_seconds(in_parts(whole, parts)) == pytest.approx(least_seconds(whole) / parts)


def test_what_was_left_is_at_most_so_much_faster() -> None:
    row = MeshRow("dp=2", 2, 1, 1, "none", 2.0, 0.0, 1.0, True, True)
    choice = MeshChoice(2, 4, None, (row,), 0, 0, {}, 3, left_seconds=1.5)
    assert choice.gap == pytest.approx(0.25) and choice.as_dict()["gap"] == choice.gap
    assert replace(choice, left_seconds=2.5).gap == 0.0
    whole = MeshChoice(2, 4, None, (row,), 0, 0, {}, 0)
    assert whole.gap == 0.0 and whole.as_dict()["left_seconds"] is None
    assert row.how == "2 microbatches, zero=1, recompute=none, sequence_parallel=True"
    assert MeshIfRoom("dp=2", 2, 1, "full", 1.0, 1.0).how == "2 microbatches, zero=1, recompute=full"
