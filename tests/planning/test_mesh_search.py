"""What a search for a mesh tries and plans again: the steps of it, on numbers alone, and orders of ranks on nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import csc
from csc.analysis.hardware import Wire, hardware, toml_text
from csc.driver import mesh_search
from csc.driver.mesh_candidates import (
    GAIN,
    NEAR,
    NOTHING_FIXED,
    ROOM,
    FixedChoices,
    FoundMeshes,
    MeshCandidate,
    MeshRow,
    MeshTraces,
    forms,
    forms_of,
)
from csc.driver.mesh_choice import choose
from csc.driver.mesh_search import MESHES, MeshPlans, MeshSearch, in_turn
from csc.driver.search_clock import SearchClock
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from csc.planning.meshes import PLAIN, MeshDivision, MeshForm, MeshLayout, layouts
from tests.compiler.tensor_models import BATCHES, MODELS

LAYOUT = MeshLayout(Mesh(dp=2, pp=2), 1, 4)


def search(**parts: Any) -> MeshSearch:
    """One that knows nothing but this."""
    found = object.__new__(MeshSearch)
    found.found, found.fixed, found.drafted, found.behind = FoundMeshes(), FixedChoices(), [], []
    for name, part in parts.items():
        setattr(found, name, part)
    return found


def candidate(layout: MeshLayout, expected: float, zero: int = 1) -> MeshCandidate:
    return MeshCandidate(layout, replace(Options(), mesh=layout.mesh, zero=zero), "none", expected, 0, expected)


def row(seconds: float, mesh: Mesh = LAYOUT.mesh) -> MeshRow:
    return MeshRow(str(mesh), 4, 1, 1, "none", seconds, 0.0, 1.0, True)


@pytest.mark.parametrize(
    ("zero", "elsewhere", "again"),
    [
        (1, 0.9, True), (1, (1 - 2 * GAIN) * ROOM, True), (1, ROOM, False), (1, 1.1, False),
        (3, 1.1, True), (3, (1 - 2 * GAIN) * NEAR, True), (3, NEAR, False), (3, 1.3, False),
    ],
)  # fmt: skip
def test_a_plan_is_made_again_for_an_order_near_the_best(
    zero: int, elsewhere: float, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """elsewhere: what the plan takes in the other order; the best is 1.0, it takes 1.5 and the one made for the other
    order .95.
    """
    own, other = LAYOUT.mesh.orders()
    priced = [SimpleNamespace(mesh=mesh, options=mesh, problem=mesh, seconds=each)
              for mesh, each in ((own, 1.5), (other, elsewhere))]  # fmt: skip
    monkeypatch.setattr(mesh_search, "priced_orders", lambda *asked: priced)
    planned: Any = SimpleNamespace(stages=(), placement=(), schedule=None)
    made: list[Mesh] = []

    def plan(numbers: Any, *asked: Any, **options: Any) -> Any:
        made.append(numbers)
        return planned

    monkeypatch.setattr(mesh_search, "plan", plan)
    monkeypatch.setattr(mesh_search, "draft", plan)
    one = replace(candidate(LAYOUT, 1.0, zero), problem=SimpleNamespace(ranks=2))  # type: ignore[arg-type]

    def priced_row(one: MeshCandidate, options: Any, planned: Any) -> MeshRow:
        return row(0.95, other) if options is other else row(1.5)

    problems: Any = SimpleNamespace(program=lambda *of: None)
    plans = MeshPlans(problems, FoundMeshes(best=1.0), SearchClock(60.0, lambda: 0.0))
    monkeypatch.setattr(plans, "_row", priced_row)
    expected = row(0.95, other) if again else row(1.5)
    assert plans.plan(one) == expected and made[1:] == [other] * again
    drafted = plans.draft(one)
    assert drafted is not None and drafted[0] == expected
    assert drafted[1].options == (other if again else one.options)  # and so it is planned


def test_which_drafts_are_planned_first() -> None:
    """Of two about as fast the one whose step is smaller, and what fits before what does not."""
    deep, wide = MeshLayout(Mesh(pp=4), 1, 16), MeshLayout(Mesh(dp=2, pp=2), 1, 8)
    slow, none = candidate(wide, 1.2), candidate(wide, 0.5)
    first, second = candidate(wide, 1.02), candidate(deep, 1.0)
    assert in_turn([slow, none, second, first], {none}) == [first, second, slow, none]
    assert in_turn([none], {none}) == [none] and in_turn([], {}) == []


@pytest.mark.long
@pytest.mark.usefixtures("traces")
def test_the_order_of_a_plan_that_was_made_again_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of two, with slow links between: replicas of a stage stand in one node."""
    profile = replace(hardware("a100"), within=Wire(0.0, 1e12), between=Wire(0.0, 1e6), ranks_per_node=2)
    (tmp_path / "nodes.toml").write_text(toml_text(profile))
    only = Mesh(dp=2, pp=2)
    monkeypatch.setattr(mesh_search, "layouts", lambda *asked: [one for one in layouts(*asked) if one.mesh == only])
    model = csc.compile(
        MODELS["llama"](), example=BATCHES["llama"](4), cache=False, check=False, hardware=str(tmp_path / "nodes.toml")
    )
    found = choose(model, 4, None, 600.0, lambda text: None, FixedChoices(microbatches=2, zero=1, recompute="none"))
    assert [each.mesh for each in found.rows] == ["dp=2,pp=2,order=pp-dp"]


def test_forms_of_an_encoder() -> None:
    division = MeshDivision(4, 1, 1)
    assert forms_of("v", division, PLAIN) == [MeshForm((("v", 1),)), MeshForm((("v", 2),))]
    assert forms_of("v", division, MeshForm((("v", 2),), True)) == [MeshForm((("v", 1),), True), MeshForm((), True)]
    assert forms_of("v", MeshDivision(2, 1, 1), PLAIN) == [MeshForm((("v", 1),))] and not forms_of(
        "v", MeshDivision(1, 1, 1), PLAIN
    )
    beside = MeshForm((("a", 2),))  # one number between 1 and all of tp is tried
    assert forms_of("v", MeshDivision(8, 1, 1), beside) == [
        MeshForm((("a", 2), ("v", 1))), MeshForm((("a", 2), ("v", 2)))
    ]  # fmt: skip
    whole = MeshForm((("a", 1), ("v", 1)), True, ("a", "v"))
    spread = MeshForm((("a", 1),), True, ("a",), ("v",))
    assert forms_of("v", MeshDivision(2, 2, 1), whole) == [replace(whole, own=(("a", 1),)), spread]
    assert forms_of("v", MeshDivision(2, 2, 1), spread) == []
    for form in (*forms_of("v", MeshDivision(8, 2, 1), whole), spread):
        layout = MeshLayout(Mesh(tp=8, cp=2, pp=2), 1, 4).in_form(form)
        assert Mesh.parse(str(layout.mesh)) == layout.mesh and layout.division == MeshDivision(8, 2, 1, form)
        assert layout.in_form(PLAIN).division == MeshDivision(8, 2, 1)
    assert MeshLayout(Mesh(dp=4), 1, 4).in_form(spread) == MeshLayout(Mesh(dp=4), 1, 4)
    assert MeshLayout(Mesh(cp=4), 1, 4).in_form(spread).context == {"v": 4}
    assert "context v=2" in str(MeshDivision(2, 2, 1, spread))


@pytest.mark.parametrize(
    ("seconds", "spare", "worth"), [(1.0, 0.1, True), (1.0, 0.0005, False), (1.1, 0.05, False), (1.1, 0.12, True)]
)
def test_an_encoder_is_divided_otherwise_where_that_may_make_a_layout_the_best(
    seconds: float, spare: float, worth: bool
) -> None:
    layout = MeshLayout(Mesh(tp=4), 1, 4)
    asked = search(problems=SimpleNamespace(spare=lambda one, name: spare))
    assert not asked._may_gain(layout, "v")  # never looked at
    asked.found.best = 1.0
    asked.found.expect(candidate(layout, seconds))
    assert asked._may_gain(layout, "v") is worth


def test_what_cannot_be_faster_is_drafted_last_so_that_there_is_something_to_compare_with() -> None:
    """The fastest comes first; the others are left until all else is done, and of them no more than are shown."""
    drafted: list[int] = []

    def draft(one: MeshCandidate) -> tuple[MeshRow, MeshCandidate]:
        drafted.append(one.layout.mesh.dp)
        return row(one.seconds, one.layout.mesh), one

    asked = search(plans=SimpleNamespace(draft=draft), clock=SearchClock(1e9), tell=str)
    problem: Any = object()
    waiting = [
        replace(candidate(MeshLayout(Mesh(dp=dp), 1, 4), float(dp)), problem=problem) for dp in (4, 2, 9, 3, 5, 8, 7, 6)
    ]
    asked._draft(waiting)
    assert drafted == [2] and len(asked.found.slow) == 7
    asked._compare()
    assert drafted == [2, 3, 4, 5, 6] and len(drafted) == MESHES


def tried(refused: Callable[[MeshForm], str], cp: int, names: Sequence[str] = ("a", "v")) -> list[MeshForm]:
    """The forms of tp=3 that are traced until csc divides so, and of the same with more cp ranks behind them."""
    found: list[MeshForm] = []
    problems: Any = SimpleNamespace(model=SimpleNamespace(options=Options()))
    known = FoundMeshes()
    traces = MeshTraces(problems, known, SearchClock(math.inf), names, NOTHING_FIXED, print)

    def in_form(listed: Sequence[MeshLayout], form: MeshForm) -> list[Any]:
        found.append(form)
        why = refused(form)
        if why:
            known.refused[listed[0].in_form(form).division] = why
        return [] if why else [form]

    traces.in_form = in_form  # type: ignore[method-assign]
    for each in sorted({1, cp}):
        made = traces.first_form(MeshDivision(3, each, 1), [MeshLayout(Mesh(tp=3, cp=each), 1, 4)])
        assert bool(made) == any(not refused(form) for form in forms(names, Options(), MeshDivision(3, each, 1)))
    return found


def test_what_is_refused_in_all_forms_is_traced_in_few() -> None:
    """The language model cannot be divided: encoders and tokens matter not, nor does cp."""
    assert tried(lambda form: "llm", 1, ()) == [MeshForm((), True), PLAIN]
    one = tried(lambda form: "llm" if form.own else "v", 4, ("v",))
    assert one == [MeshForm((), True), MeshForm((("v", 1),), True), PLAIN, MeshForm((("v", 1),))]
    both = tried(lambda form: "llm" if len(form.own) == 2 else "a", 4)
    assert len(both) == 6 and len(set(both)) == 6


def test_what_is_refused_in_some_forms_is_found_in_others() -> None:
    tried(lambda form: "" if form.own == (("a", 1),) else "v", 1)
    tried(lambda form: "tokens" if form.sequence else "", 1)
    tried(lambda form: "samples" if form.whole else "", 4)
    tried(lambda form: "samples" if form.own else "" if not form.sequence else "tokens", 1)
