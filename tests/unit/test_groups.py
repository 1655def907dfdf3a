"""Groups of ranks against brute force over coordinates, and nobody who lists ranks by hand."""

from __future__ import annotations

import math
import re
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.errors import InputError
from csc.ir.groups import SUMMED, WHOLE, Group, Placement, held, held_summed
from csc.ir.mesh import Axes, Mesh

ROOT = Path(__file__).parents[2]
AXES = ("dp", "pp", "cp", "tp")
# What the ranks of a group agree in, written apart from the axes that the group itself lists.
AGREE = {
    "world": (), "position": ("pp",), "data": ("pp", "tp"), "samples": ("pp", "cp", "tp"),
    "context": ("dp", "pp", "tp"), "tensor": ("dp", "pp", "cp"), "layer": ("dp", "pp"), "pipeline": ("dp", "cp", "tp"),
    "replica": ("dp",), "copies": ("dp", "pp", "cp", "part"), "division": ("dp", "pp", "cp", "copy"),
    "holders": ("pp", "part"), "sequences": ("dp", "pp", "tp", "place"),
}  # fmt: skip
WITHIN = ("copies", "division", "holders")
FIXED = [Group(kind) for kind in AGREE if kind not in (*WITHIN, "sequences")]
sizes = st.tuples(*[st.integers(1, 3)] * 2, st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
orders = st.sampled_from([(*("dp", "cp", "tp")[:i], "pp", *("dp", "cp", "tp")[i:]) for i in range(4)])


def places(shape: tuple[int, ...], order: tuple[str, ...] = AXES) -> list[dict[str, int]]:
    """The coordinates of every rank, which count through the axes in this order."""
    size = dict(zip(AXES, shape, strict=True))
    return [dict(zip(order, at, strict=True)) for at in product(*(range(size[axis]) for axis in order))]


def agree(what: Group, one: dict[str, int], other: dict[str, int], without: str = "") -> bool:
    """In what the ranks of a group have in common."""
    size = what.size or 1
    both = [{**at, "copy": at["tp"] // size, "part": at["tp"] % size, "place": at["cp"] % size} for at in (one, other)]
    return all(both[0][axis] == both[1][axis] for axis in AGREE[what.kind] if axis != without)


@st.composite
def meshes(draw: st.DrawFn) -> tuple[Mesh, list[dict[str, int]], Group]:
    """With components whose layers fewer ranks divide, several numbers of them, and whose tokens fewer share; and a
    kind of group.
    """
    shape, order = draw(sizes), draw(orders)
    cp = draw(st.sampled_from([size for size in range(1, shape[2] + 1) if shape[2] % size == 0]))
    between = [size for size in range(2, shape[-1]) if shape[-1] % size == 0]
    own = draw(st.lists(st.sampled_from(between), unique=True)) if between else []
    components = {f"tower{size}": Axes(tp=size) for size in own} | {"eye": Axes(cp=cp)}
    mesh = Mesh(*shape, order, components=components)
    assert mesh.own("cp") == ({"eye": cp} if cp < mesh.cp else {}) and mesh == Mesh.parse(str(mesh)) == Mesh.of(
        mesh.to_dict()
    )
    assert mesh.divisions == tuple(sorted(own)) and [mesh.dividing(f"tower{size}") for size in own] == own
    within = [Group(kind, size) for size in own for kind in WITHIN] + [Group.sequences(cp)] * (cp > 1)
    return mesh, places(shape, order), draw(st.sampled_from([*FIXED, *within]))


def test_every_kind_of_group_is_looked_at() -> None:
    assert set(FIXED) == {one for one in vars(Group).values() if isinstance(one, Group)}
    for one in (*FIXED, *(Group(kind, 4) for kind in (*WITHIN, "sequences"))):
        assert Group.of(str(one)) == one
    for wrong in ("", "nobody", "copies", "copies 1", "copies x", "data 2", "division -2", "holders 2 3"):
        with pytest.raises(ValueError, match="is no group of ranks"):
            Group.of(wrong)


@given(meshes())
def test_a_group_is_who_agrees_in_the_other_coordinates(given: tuple[Mesh, list[dict[str, int]], Group]) -> None:
    mesh, at, what = given
    for rank, own in enumerate(at):
        same = [other for other, its in enumerate(at) if agree(what, its, own)]
        assert mesh.group(what, rank) == tuple(same), "ascending, and with the rank itself"
    listed = [rank for group in mesh.groups(what) for rank in group]
    assert sorted(listed) == list(range(mesh.size)), "each rank is in exactly one group"
    assert set(mesh.groups(what)) == {mesh.group(what, rank) for rank in range(mesh.size)}
    assert math.prod(mesh.sizes(what)) == len(mesh.group(what, 0))
    if mesh.order == mesh.AXES:
        assert list(mesh.groups(what)) == sorted(mesh.groups(what)), "in an order that all ranks find"


@given(meshes(), st.data())
def test_groups_at_some_positions_of_the_pipeline(
    given: tuple[Mesh, list[dict[str, int]], Group], data: st.DataObject
) -> None:
    mesh, at, what = given
    positions = data.draw(st.lists(st.integers(0, mesh.pp - 1), min_size=1, unique=True))
    for rank, own in enumerate(at):
        found = mesh.group(what, rank, positions)
        for position in positions:
            there = [r for r, its in enumerate(at) if its["pp"] == position and agree(what, its, own, "pp")]
            assert [r for r in found if at[r]["pp"] == position] == there
        assert list(dict.fromkeys(at[r]["pp"] for r in found)) == positions, "in the order in which they are given"
    everyone = sorted(rank for group in mesh.groups(what, positions) for rank in group)
    assert everyone == [rank for rank, its in enumerate(at) if its["pp"] in positions], "each rank there, once"


def test_a_rank_outside_the_mesh_is_in_no_group() -> None:
    with pytest.raises(IndexError, match="rank 2 is outside"):
        Mesh(pp=2).group(Group.DATA, 2)
    with pytest.raises(IndexError, match="pp index 2"):
        Mesh(pp=2).group(Group.DATA, 0, [2])


def test_a_torch_device_mesh_has_these_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        given = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "pp", "cp"))
        mesh = Mesh.of(given)
        for name, what in {"dp": Group.SAMPLES, "pp": Group.PIPELINE, "cp": Group.CONTEXT}.items():
            theirs = dist.get_process_group_ranks(given.get_group(name))
            assert mesh.group(what, 5) == tuple(theirs)
    finally:
        dist.destroy_process_group()


def test_placements() -> None:
    assert WHOLE.to_dict() == {"equal": "position"} and SUMMED.to_dict() == {"parts": "data", "equal": "tensor"}
    for placement in (WHOLE, SUMMED, held(4), Placement(), Placement(shard=Group.TENSOR, equal=Group.DATA)):
        assert Placement.of(placement.to_dict()) == placement
    assert [SUMMED.over(axis) for axis in AXES] == ["parts", "", "parts", "equal"]
    assert [WHOLE.over(axis) for axis in AXES] == ["equal", "", "equal", "equal"]
    assert [held_summed(2).over(axis) for axis in (*AXES, "copies", "division")] == [
        "parts", "", "parts", "", "parts", "shard",
    ]  # fmt: skip
    for wrong, part in (
        ({"equal": "data", "parts": "samples"}, "two things of axis dp"),
        ({"equal": "tensor", "parts": "copies 2"}, "two things of axis tp"),
        ({"equal": "holders 2", "shard": "division 4"}, "groups of 2 and of 4 within tp"),
        ({"equal": "copies"}, "'equal' over 'copies'"),
        ({"equal": ["data"]}, "'equal' over"),
        ({"equal": "pipeline"}, "over the pipeline"),
        ({"equal": "nobody"}, "'equal' over 'nobody'"),
        ({"same": "data"}, "'same' over 'data'"),
    ):
        with pytest.raises(InputError, match=part):
            Placement.of(wrong)


BY_HAND = re.compile(r"\.rank_of\(|range\([\w.]*\b(dp|cp|tp)\)|coordinates\([^)]*\)\.(dp|cp|tp)\b")
MAY = ("csc/ir/mesh.py", "csc/runtime/rank.py")  # the latter says a rank's own indices


def test_ranks_are_listed_in_one_place() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("csc", "passes", "codegen", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.relative_to(ROOT).as_posix() not in MAY
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if BY_HAND.search(line)
    ]
    assert not found, "ask Mesh.group instead:\n" + "\n".join(found)
