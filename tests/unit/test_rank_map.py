"""The mesh as one map of components against the class with a tuple for each axis, which it replaces."""

from __future__ import annotations

import ast
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.mesh import Axes, Mesh
from tests.unit import old_mesh as before

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?:[A-Za-z_][\w.]*\.)?(?:dp|pp|cp|tp)=\d+|ranks=\d+|order=[a-z-]+")
AXES = ("dp", "pp", "cp", "tp")


def named_in_tests() -> list[Any]:
    """Every text and every dict in the tests that reads as a mesh, right or wrong."""
    found: dict[str, Any] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 200:
                parts = node.value.removeprefix("--mesh ").split(",")
                if all(NAME.fullmatch(part.strip()) for part in parts):
                    found.setdefault(node.value, node.value)
            if isinstance(node, ast.Dict):
                try:
                    table = ast.literal_eval(node)
                except ValueError:
                    continue
                nested = all(isinstance(own, dict) and set(own) <= set(AXES) for own in table.values())
                if table and (set(table) <= {*AXES, "order"} or nested):
                    found.setdefault(repr(table), table)
    return list(found.values())


def said(build: Any, form: Any) -> Any:
    """A mesh, or the words of its refusal."""
    try:
        return build(form)
    except InputError as error:
        return str(error)


def compare(old: before.Mesh, new: Mesh) -> None:
    assert (str(new), new.to_dict(), new.size, new.order) == (str(old), old.to_dict(), old.size, old.order)
    assert list(new.to_dict()) == list(old.to_dict()), "program.json keeps the order of its fields"
    assert (new.own("tp"), new.own("pp"), new.own("cp")) == tuple(
        map(dict, (old.components, old.own_stages, old.own_cp))
    )
    assert list(new.in_front.items()) == list(before.in_front(old).items())
    assert (new.narrow, new.wide) == (before.on_fewer(old), before.on_more(old))
    assert new.replicas_share_ranks == bool(old.own_replicas)
    assert (new.divisions, new.held_in_copies) == (old.divisions, old.held_in_copies)
    assert new.graph_key == ((old.cp, old.tp), old.components, old.own_ranks, old.own_cp)
    components = {*new.components, "another"}
    for name in components:
        assert (new.dividing(name), new.extent_of(name).width) == (old.dividing(name), old.tp_ranks(name))
    assert list(map(str, new.orders())) == list(map(str, old.orders()))
    alone = before.replace(old, dp=1, own_replicas=())
    assert str(new.one_replica()) == str(alone)
    staged = tuple((component, 1) for component, _ in old.own_ranks)
    small = before.replace(old, dp=1, pp=1 + len(staged), own_stages=staged, own_replicas=())
    assert str(new.fewest_stages().one_replica()) == str(small)
    if new.is_open or new.size > 200:
        return
    for rank in range(new.size):
        assert new.coordinates(rank) == old.coordinates(rank)
        assert new.rank_of(*new.coordinates(rank)) == rank and new.shard(rank) == old.shard(rank)
        assert new.replicas_of(rank) == old.replicas_of(rank)
        assert [new.served(rank, number) for number in range(7)] == [old.served(rank, number) for number in range(7)]
        assert [new.part(name, rank) for name in components] == [old.part(name, rank) for name in components]
        for position, replica in product(range(new.pp), (None, *new.replicas)):
            assert new.receivers(rank, position, replica) == old.receivers(rank, position, replica)
            assert new.sender(rank, position, replica) == old.sender(rank, position, replica)
    for position in range(new.pp):
        assert (new.extent(position), new.sharers(position)) == (old.extent(position), old.sharers(position))
    kinds = [one for one in vars(Group).values() if isinstance(one, Group)]
    kinds += [Group(kind, size) for size in new.divisions for kind in ("copies", "division", "holders")]
    kinds += [Group.sequences(size) for size in {*new.own("cp").values()} if size > 1]
    for what in kinds:
        assert (new.groups(what), new.sizes(what)) == (old.groups(what), old.sizes(what))
        assert [new.group(what, rank) for rank in range(new.size)] == [
            old.group(what, rank) for rank in range(old.size)
        ]
        for positions in ([0], [new.pp - 1], [new.pp - 1, 0][: new.pp]):
            assert new.groups(what, positions) == old.groups(what, positions)
            assert [new.group(what, rank, positions) for rank in range(new.size)] == [
                old.group(what, rank, positions) for rank in range(old.size)
            ]


@pytest.mark.parametrize("form", named_in_tests(), ids=str)
def test_meshes_of_the_tests(form: Any) -> None:
    old, new = said(before.Mesh.of, form), said(Mesh.of, form)
    if isinstance(old, str) or isinstance(new, str):
        assert isinstance(old, str) and isinstance(new, str), (old, new)
        assert new == old or "axis dp of" in new, "a dp that is no size is told as any other"
        return
    compare(old, new)
    assert Mesh.of(new.to_dict()) == Mesh.parse(str(new)) == new


small = st.sampled_from([1, 2, 3, 4, 6])
orders = st.sampled_from(["", "", "", "pp-dp-cp-tp", "dp-cp-pp-tp", "dp-cp-tp-pp"])


@st.composite
def forms(draw: st.DrawFn) -> str:
    """Text of a mesh with up to three components, many of which fit."""
    dp, cp, tp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 4])), draw(small)
    parts, stages = [f"dp={dp}", f"cp={cp}", f"tp={tp}"], draw(st.integers(1, 2))
    for name in draw(st.permutations("abc"))[: draw(st.integers(0, 3))]:
        own = draw(st.sampled_from([1, tp, *(size for size in range(1, tp + 1) if tp % size == 0)]))
        width = draw(st.sampled_from([tp, own, 1, 2 * tp, 3 * tp, own]))
        shares, own_cp = dp, cp
        if draw(st.integers(0, 3)) == 0:
            own_cp = draw(st.sampled_from([size for size in (1, 2, 4) if cp % size == 0]))
            shares = dp * cp // own_cp
            parts.append(f"{name}.cp={own_cp}")
        if own != tp or draw(st.booleans()):
            parts.append(f"{name}.tp={own}")
        if draw(st.integers(0, 3)):
            its = draw(st.integers(1, 2))
            stages += its
            parts.append(f"{name}.pp={its}")
        if draw(st.integers(0, 3)):
            parts.append(f"{name}.dp={draw(st.sampled_from([max(1, shares * width // own), max(1, dp // 2), dp]))}")
    parts.insert(draw(st.integers(0, len(parts))), f"pp={stages}")
    order = draw(orders)
    return ",".join([*parts, f"order={order}"] if order else parts)


@given(forms())
@settings(max_examples=150, deadline=None)
def test_any_mesh(form: str) -> None:
    old, new = said(before.Mesh.of, form), said(Mesh.of, form)
    assert isinstance(old, str) == isinstance(new, str), (old, new)
    if not isinstance(new, str):
        compare(old, new)
        assert Mesh.of(new.to_dict()) == Mesh.parse(str(new)) == new


by_component = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.dictionaries(st.sampled_from(AXES), st.sampled_from([1, 2, 4])), min_size=1
)


@given(by_component)
@settings(max_examples=150, deadline=None)
def test_any_dict_of_components(form: dict[str, dict[str, int]]) -> None:
    old, new = said(before.Mesh.of, form), said(Mesh.of, form)
    assert isinstance(old, str) == isinstance(new, str), (old, new)
    if not isinstance(new, str):
        compare(old, new)
        assert Mesh.of({name: Axes(**own) for name, own in form.items()}) == new
