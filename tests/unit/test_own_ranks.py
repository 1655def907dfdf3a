"""Meshes in which some positions of the pipeline have fewer ranks or more, or ranks that replicas share, against brute
force over coordinates.
"""

from __future__ import annotations

import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.mesh import Axes, Mesh
from tests.unit.test_groups import AGREE, AXES, FIXED, WITHIN, agree

# tp of the mesh and of the narrow positions, or the wide ones
widths = st.sampled_from([
    *[(2, 1), (3, 1), (4, 1), (4, 2), (6, 2), (6, 3), (8, 4)], *[(1, 2), (1, 3), (1, 4), (2, 4), (2, 6), (4, 8)],
])  # fmt: skip
orders = st.sampled_from([AXES, ("pp", "dp", "cp", "tp"), ("dp", "cp", "pp", "tp")])
small = st.integers(1, 3)


@st.composite
def uneven(draw: st.DrawFn) -> tuple[Mesh, list[dict[str, int]], int, int]:
    """A mesh, the coordinates of every rank, how many positions have another number of ranks, and how many."""
    (tp, width), in_front, rest = draw(widths), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    dp, cp, order = draw(small), draw(st.integers(1, 2)), draw(orders)
    own = draw(st.sampled_from([1, min(width, tp)]))
    eye = Axes(dp=dp * width // own, pp=in_front, tp=own)
    mesh = Mesh(dp, in_front + rest, cp, tp, order, components={"eye": eye})
    size = {"dp": dp, "pp": in_front + rest, "cp": cp, "tp": max(tp, width)}
    at = [dict(zip(order, one, strict=True)) for one in product(*(range(size[axis]) for axis in order))]
    there = [one for one in at if one["tp"] < (tp if one["pp"] >= in_front else width)]
    return mesh, there, in_front, width


@given(uneven())
def test_ranks_count_through_what_is_there(given: tuple[Mesh, list[dict[str, int]], int, int]) -> None:
    mesh, at, in_front, width = given
    assert mesh.size == len(at)
    for rank, own in enumerate(at):
        assert mesh.coordinates(rank)._asdict() == {axis: own[axis] for axis in AXES}
        assert mesh.rank_of(**{axis: own[axis] for axis in AXES}) == rank
    assert [mesh.width(p) for p in range(mesh.pp)] == [width if p < in_front else mesh.tp for p in range(mesh.pp)]
    assert mesh.sizes(Group.LAYER) == (mesh.cp, max(width, mesh.tp))
    with pytest.raises(IndexError, match=f"tp index {width} is outside"):
        mesh.rank_of(tp=width)
    assert mesh == Mesh.parse(str(mesh)) == Mesh.of(mesh.to_dict())


@given(uneven(), st.data())
def test_groups_are_of_those_that_are_there(
    given: tuple[Mesh, list[dict[str, int]], int, int], data: st.DataObject
) -> None:
    mesh, at, _, _ = given
    within = [Group(kind, size) for size in mesh.divisions for kind in WITHIN]
    what = data.draw(st.sampled_from([one for one in (*FIXED, *within) if one != Group.PIPELINE]))
    for rank, own in enumerate(at):
        same = [other for other, its in enumerate(at) if agree(what, its, own)]
        assert mesh.group(what, rank) == tuple(same)
    assert sorted(rank for group in mesh.groups(what) for rank in group) == list(range(mesh.size))
    for position in range(mesh.pp):
        everyone = sorted(rank for group in mesh.groups(what, [position]) for rank in group)
        assert everyone == [rank for rank, its in enumerate(at) if its["pp"] == position]


@given(uneven())
def test_messages_come_from_one_and_go_to_all_that_need_them(
    given: tuple[Mesh, list[dict[str, int]], int, int],
) -> None:
    """Neighbours of so many hold, in this order, what each rank of a narrow position has made. Of a wide one those
    send that have a counterpart, and all get gradients.
    """
    mesh, at, _, width = given
    for source, destination in product(range(mesh.pp), repeat=2):
        senders = {rank: mesh.receivers(rank, destination) for rank, its in enumerate(at) if its["pp"] == source}
        receiving = [rank for rank, its in enumerate(at) if its["pp"] == destination]
        assert sorted(rank for own in senders.values() for rank in own) == receiving, "each receives once"
        for rank in receiving:
            sender = mesh.sender(rank, source)
            assert rank in senders[sender]
            assert [at[sender][axis] for axis in ("dp", "cp")] == [at[rank][axis] for axis in ("dp", "cp")]
            assert at[sender]["tp"] == at[rank]["tp"] % mesh.width(source)
        fewer = min(mesh.width(source), mesh.width(destination))
        assert all(bool(own) == (at[rank]["tp"] < fewer) for rank, own in senders.items())
    if 1 < width < mesh.tp:
        for group in mesh.groups(Group.division(width)):
            assert [at[mesh.sender(rank, 0)]["tp"] for rank in group] == list(range(width))


@pytest.mark.parametrize(
    ("mesh", "widths", "divisions"),
    [
        ("dp=2,tp=8,pp=4,a.pp=1,a.tp=1,a.dp=4,b.pp=1,b.tp=1,b.dp=8,text.pp=2", [2, 4, 8, 8], (2, 4)),
        ("tp=8,pp=2,a.pp=1,a.tp=1,a.dp=2,b.tp=4", [2, 8], (2, 4)),
        ("tp=4,pp=3,a.pp=1,a.tp=4,a.dp=2,b.pp=1,b.tp=2,b.dp=1,c.tp=2,text.pp=1", [8, 2, 4], (2, 4)),
        ("tp=2,pp=2,a.pp=1,a.tp=2,a.dp=2", [4, 2], (2,)),
        ("tp=12,pp=2,a.tp=3,b.tp=2,c.tp=6", [12, 12], (2, 3, 6)),
    ],
)
def test_several_widths(mesh: str, widths: list[int], divisions: tuple[int, ...]) -> None:
    """And several numbers of ranks that divide components."""
    found = Mesh.parse(mesh)
    assert found.divisions == divisions and found == Mesh.of(found.to_dict()) == Mesh.parse(str(found))
    at = [
        dict(zip(("pp", "dp", "cp", "tp"), (p, d, 0, t), strict=True)) if found.order[0] == "pp" else
        {"dp": d, "pp": p, "cp": 0, "tp": t}
        for d in range(found.dp) for p, width in enumerate(widths) for t in range(width)
    ]  # fmt: skip
    assert [found.coordinates(rank)._asdict() for rank in range(found.size)] == at
    for what in [Group(kind, size) for size in divisions for kind in WITHIN]:
        for rank, own in enumerate(at):
            assert found.group(what, rank) == tuple(r for r, its in enumerate(at) if agree(what, its, own))
    for source, destination in product(range(found.pp), repeat=2):
        senders = [rank for rank, its in enumerate(at) if its["pp"] == source]
        sent = [other for rank in senders for other in found.receivers(rank, destination)]
        assert sorted(sent) == [rank for rank, its in enumerate(at) if its["pp"] == destination]
        assert all(rank in found.receivers(found.sender(rank, source), destination) for rank in sent)


@st.composite
def shared(draw: st.DrawFn) -> tuple[Mesh, list[dict[str, Any]]]:
    """A mesh with a component whose ranks replicas share, and the coordinates of every rank with its replicas."""
    several, dp, tp, cp = draw(st.integers(2, 3)), draw(small), draw(st.integers(1, 2)), draw(st.integers(1, 2))
    in_front, rest = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    own = draw(st.sampled_from([1, tp]))
    mesh = Mesh(dp * several, in_front + rest, cp, tp, components={"eye": Axes(dp=dp, pp=in_front, tp=own)})
    at: list[dict[str, Any]] = []
    for position in range(in_front + rest):
        replicas, width = (dp, own) if position < in_front else (dp * several, tp)
        each = several if position < in_front else 1
        at += [
            {"pp": position, "dp": d, "cp": c, "tp": t, "of": set(range(d * each, (d + 1) * each))}
            for d, c, t in product(range(replicas), range(cp), range(width))
        ]
    return mesh, at


@given(shared())
def test_ranks_that_replicas_share(given: tuple[Mesh, list[dict[str, Any]]]) -> None:
    mesh, at = given
    assert mesh.size == len(at) and mesh == Mesh.parse(str(mesh)) == Mesh.of(mesh.to_dict())
    for rank, own in enumerate(at):
        assert mesh.coordinates(rank)._asdict() == {axis: own[axis] for axis in AXES}
        assert mesh.rank_of(**{axis: own[axis] for axis in AXES}) == rank
        assert set(mesh.replicas_of(rank)) == own["of"]
        served = [mesh.served(rank, number) for number in range(5 * len(own["of"]))]
        assert sorted(served) == sorted(product(own["of"], range(5))), "each of its replicas' microbatches once"
        assert [mb for _, mb in served] == sorted(mb for _, mb in served)
    for what in set(FIXED) - {Group.PIPELINE, Group.REPLICA}:
        for rank, own in enumerate(at):
            same = [other for other, its in enumerate(at) if all(its[axis] == own[axis] for axis in AGREE[what.kind])]
            assert mesh.group(what, rank) == tuple(same)
        assert sorted(rank for group in mesh.groups(what) for rank in group) == list(range(mesh.size))


@given(shared())
def test_messages_of_each_replica_where_replicas_share_ranks(given: tuple[Mesh, list[dict[str, Any]]]) -> None:
    mesh, at = given
    for source, destination, replica in product(range(mesh.pp), range(mesh.pp), range(mesh.dp)):
        senders = [rank for rank, its in enumerate(at) if its["pp"] == source and replica in its["of"]]
        receiving = [rank for rank, its in enumerate(at) if its["pp"] == destination and replica in its["of"]]
        sent = [other for rank in senders for other in mesh.receivers(rank, destination, replica)]
        assert sorted(sent) == receiving, "each rank that works for the replica receives once"
        for rank in receiving:
            assert rank in mesh.receivers(mesh.sender(rank, source, replica), destination, replica)


@st.composite
def mixed(draw: st.DrawFn) -> tuple[Mesh, list[dict[str, Any]]]:
    """A mesh with several components on other numbers of ranks, narrow, wide or shared, and the coordinates of every
    rank with its replicas: written from what the axes of a component mean, one position after the other.
    """
    dp, cp, tp = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 2)), draw(st.sampled_from([1, 2, 4]))
    components, positions = dict[str, Axes](), list[tuple[int, int]]()
    for name in draw(st.permutations("abc"))[: draw(st.integers(1, 3))]:
        own = draw(st.sampled_from([size for size in (1, 2, 4) if tp % size == 0]))
        fewer = [(size, own) for size in (1, 2) if size < dp]
        more = [(dp, tp * times) for times in (2, 3)]
        narrow = [(dp, size) for size in (1, 2) if size < tp and own in (1, size)]
        replicas, width = draw(st.sampled_from([*fewer, *more, *narrow]))
        components[name] = Axes(dp=replicas * width // own, pp=draw(st.integers(1, 2)), tp=own)
        positions += [(replicas, width)] * (components[name].pp or 0)
    positions.append((dp, tp))
    mesh = Mesh(dp, len(positions), cp, tp, components=components)
    shared = any(replicas < dp for replicas, _ in positions)
    order = ("pp", "dp", "cp", "tp") if shared else AXES
    size = {"dp": dp, "pp": len(positions), "cp": cp, "tp": max(width for _, width in positions)}
    at: list[dict[str, Any]] = [dict(zip(order, one)) for one in product(*(range(size[axis]) for axis in order))]
    at = [one for one in at if one["dp"] < positions[one["pp"]][0] and one["tp"] < positions[one["pp"]][1]]
    for one in at:
        each = dp // positions[one["pp"]][0]
        one["of"] = set(range(one["dp"] * each, (one["dp"] + 1) * each))
    return mesh, at


@given(mixed())
def test_several_components_on_other_numbers_of_ranks(given: tuple[Mesh, list[dict[str, Any]]]) -> None:
    mesh, at = given
    assert mesh.size == len(at) and mesh == Mesh.parse(str(mesh)) == Mesh.of(mesh.to_dict())
    assert pickle.loads(pickle.dumps(mesh)) == mesh and hash(replace(mesh)) == hash(mesh)
    for rank, own in enumerate(at):
        assert mesh.coordinates(rank)._asdict() == {axis: own[axis] for axis in AXES}
        assert mesh.rank_of(**{axis: own[axis] for axis in AXES}) == rank
        assert set(mesh.replicas_of(rank)) == own["of"]
    for what in set(FIXED) - {Group.PIPELINE, Group.REPLICA}:
        for rank, own in enumerate(at):
            same = [other for other, its in enumerate(at) if all(its[axis] == own[axis] for axis in AGREE[what.kind])]
            assert mesh.group(what, rank) == tuple(same)
    for source, destination, replica in product(range(mesh.pp), range(mesh.pp), range(mesh.dp)):
        senders = [rank for rank, its in enumerate(at) if its["pp"] == source and replica in its["of"]]
        receiving = [rank for rank, its in enumerate(at) if its["pp"] == destination and replica in its["of"]]
        sent = [other for rank in senders for other in mesh.receivers(rank, destination, replica)]
        assert sorted(sent) == receiving, "each rank that works for the replica receives once"
        assert all(rank in mesh.receivers(mesh.sender(rank, source, replica), destination, replica) for rank in sent)


def test_a_mesh_of_any_length_lists_no_positions() -> None:
    mesh = Mesh(dp=2, pp=10**30, components={"eye": Axes(dp=4, pp=10**20)})
    assert mesh.size == 2 * 10**30 + 2 * 10**20
    assert [mesh.width(position) for position in (0, 10**20 - 1, 10**20)] == [2, 2, 1]
    for rank in (0, 10**20, 10**29, mesh.size - 1):
        assert mesh.rank_of(*mesh.coordinates(rank)) == rank


def test_fewer_replicas_in_four_forms() -> None:
    """The component named last has the mesh's."""
    mesh = Mesh.of({"eye": {"dp": 2, "pp": 1}, "text": {"dp": 4, "pp": 2}})
    assert (mesh.dp, mesh.size, mesh.in_front, mesh.order[0]) == (4, 10, {"eye": (2, 1)}, "pp")
    assert mesh == Mesh.parse("dp=4,pp=3,eye.pp=1,eye.dp=2,text.pp=2,text.tp=1,eye.tp=1")
    assert [mesh.sharers(place) for place in range(mesh.pp)] == [2, 1, 1] and mesh.orders() == [mesh]
    alone = Mesh.of({"eye": {"pp": 1}, "text": {"dp": 3, "tp": 2, "pp": 1}})
    assert (alone.size, alone.in_front) == (7, {"eye": (1, 1)})
    divided = Mesh.parse("dp=2,tp=4,pp=2,eye.pp=1,eye.tp=2,eye.dp=1")
    assert (divided.size, divided.divisions, divided.width(0), divided.sharers(0)) == (10, (2,), 2, 2)
    whole = Mesh.parse("dp=2,tp=4,pp=2,eye.pp=1,eye.dp=1")
    assert (whole.size, whole.width(0), whole.in_front) == (12, 4, {"eye": (1, 4)})
    both = Mesh.parse("dp=2,tp=2,pp=3,a.pp=1,a.dp=1,b.pp=1,b.tp=1,b.dp=2")
    assert [both.extent(place) for place in range(3)] == [(1, 2), (2, 1), (2, 2)], "in the order of dp"


def test_a_mesh_in_four_forms() -> None:
    mesh = Mesh.of({"vision_tower": {"tp": 1, "dp": 2, "pp": 1}, "language_model": {"tp": 4, "pp": 2}})
    assert (mesh.size, mesh.in_front, mesh.divisions) == (10, {"vision_tower": (1, 2)}, (2,))
    assert str(mesh).endswith("vision_tower.dp=2") and mesh == Mesh.parse(str(mesh)) == Mesh.of(mesh.to_dict())
    assert mesh.orders() == [mesh], "with one replica"
    alike = Mesh.of({"vision_tower": {"tp": 1, "dp": 4, "pp": 1}, "language_model": {"tp": 4, "pp": 2}})
    assert alike.size == 12 and not alike.in_front
    assert not Mesh.parse("tp=4,pp=3,vision_tower.tp=1,vision_tower.dp=4,vision_tower.pp=1").in_front


def test_more_ranks_in_four_forms() -> None:
    """The mesh is that of the component with the largest tp, among equals of that with the fewest replicas."""
    mesh = Mesh.of({"eye": {"tp": 1, "dp": 4, "pp": 1}, "text": {"tp": 2, "dp": 1, "pp": 2}})
    assert (mesh.size, mesh.in_front, mesh.divisions) == (8, {"eye": (1, 4)}, ())
    assert str(mesh).endswith("eye.dp=4") and mesh == Mesh.parse(str(mesh)) == Mesh.of(mesh.to_dict())
    alone = Mesh.of({"eye": {"dp": 4, "pp": 1}, "text": {"dp": 2, "pp": 2}})
    assert (alone.dp, alone.tp, alone.size, alone.in_front) == (2, 1, 8, {"eye": (2, 2)})
    assert alone == Mesh.parse(str(alone)) == Mesh.of(alone.to_dict())
    assert [alone.width(place) for place in range(alone.pp)] == [2, 1, 1]
    held = Mesh.of({"eye": {"tp": 2, "dp": 2, "pp": 1}, "text": {"tp": 2, "dp": 1, "pp": 2}})
    assert (held.size, held.in_front, held.divisions) == (8, {"eye": (1, 4)}, (2,))
    assert held.held_in_copies == ("eye",) == Mesh.parse("tp=2,pp=3,eye.pp=1,eye.dp=2").held_in_copies
    both = Mesh.of({"eye": {"dp": 4, "pp": 1}, "ear": {"dp": 1, "pp": 1}, "text": {"tp": 2, "pp": 1}})
    assert (both.size, list(both.in_front)) == (7, ["eye", "ear"]), "in the order that they are named in"
    assert [both.width(place) for place in range(both.pp)] == [4, 1, 2] and both == Mesh.of(both.to_dict())
    apart = Mesh.parse("cp=2,pp=2,eye.pp=1,eye.cp=1,eye.dp=4")
    assert (apart.size, apart.in_front) == (6, {"eye": (1, 2)}) and apart == Mesh.of(apart.to_dict())
    assert Mesh.parse(str(apart)) == apart


@pytest.mark.parametrize(
    ("mesh", "said"),
    [
        ("tp=4,a.tp=1,a.dp=2", "a has dp . tp = 2 in a mesh where dp . tp = 4, and no pipeline stages of its own"),
        ({"a": {"tp": 4}, "b": {"tp": 2}}, "b has dp . tp = 2 in a.*same ranks: b with tp=2 and dp=2.*give b a pp"),
        ("tp=4,pp=2,a.pp=1,a.tp=1,a.dp=3", "a has dp . tp = 3 in.*fits is a with tp=1 and dp=[24]"),
        ("tp=4,dp=2,pp=2,a.pp=1,a.tp=1,a.dp=3", "a has dp . tp = 3 ranks in a mesh of 2 replicas.*tp=1 and dp=[24]"),
        ("tp=8,pp=2,a.pp=1,a.tp=2,a.dp=2", "which all divide its layers or .tp=1. share out its samples"),
        ("tp=4,pp=2,a.pp=1,a.tp=1,a.dp=6", "a has dp . tp = 6 in a mesh where.*more ranks.*a with tp=1 and dp=[48]"),
        ("tp=2,pp=2,dp=2,a.pp=1,a.dp=5", "a has dp . tp = 10 in a mesh.*groups that divide.*a with tp=2 and dp=4"),
        ("tp=4,pp=2,dp=2,a.pp=1,a.tp=1,a.dp=9", "a has dp . tp = 9 ranks in a mesh of 2 replicas.*tp=1 and dp=8"),
        ("pp=2,a.dp=3", "a has dp . tp = 3 in a mesh where dp . tp = 1, and no pipeline stages.*dp=1.*give a a pp"),
        ("tp=2,pp=2,a.pp=1,a.tp=1,a.dp=0", "axis dp of a has size 0"),
        ({"a": {"tp": 2}, "b": {"tp": 1, "dp": 4}}, "b has dp . tp = 4.*no pipeline stages.*same ranks: b with tp=1"),
        ("tp=2,pp=2,order=tp-pp,a.pp=1,a.tp=1,a.dp=4", "a is on another number of ranks.*Let tp ranks stand beside"),
        ("tp=4,pp=2,order=tp-pp,a.pp=1,a.tp=1,a.dp=2", "Let tp ranks stand beside each other"),
        ("dp=6,pp=2,a.dp=4,a.pp=1", "a has dp=4 in a mesh of 6 replicas.*do not share 4 ranks.*fits is a with dp=3"),
        ("dp=2,pp=2,a.dp=1", "a has dp=1 in a mesh of 2 replicas, and no pipeline stages.*give a a pp"),
        ("dp=2,pp=2,order=dp-pp,a.dp=1,a.pp=1", "order of ranks is dp-pp.*a has fewer replicas.*put pp in front"),
        ("dp=2,cp=2,pp=2,a.dp=1,a.cp=1,a.pp=1", "a has dp . tp = 1 ranks in a mesh of 4 replicas"),
        ("dp=2,pp=2,a.dp=0,a.pp=1", "axis dp of a has size 0"),
    ],
)  # fmt: skip
def test_what_cannot_be(mesh: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Mesh.of(mesh)


@pytest.mark.parametrize(
    ("components", "said"),
    [
        ({"a": Axes(dp=3, pp=1)}, "a has dp=3 in a mesh of 4 replicas, which do not share 3 ranks evenly"),
        ({"a": Axes(dp=8)}, "a has dp . tp = 16 in a mesh where dp . tp = 8, and no pipeline stages of its own"),
        ({"a": Axes(tp=0)}, "axis tp of a has size 0"),
        ({"a": Axes(pp=2)}, "a.pp=2 leaves none of pp=2"),
        ({"a": {"xp": 2}}, "the mesh has {'xp': 2} for a. Map components to sizes of axes"),
        ({"": {"tp": 1}}, "the mesh names '' as a component. Name it as the model does"),
        ({"a,b": {"tp": 1}}, "the mesh names 'a,b' as a component"),
        ({"a": 2}, "the mesh has 2 for a. Map components"),
        ((("a", 2),), "the mesh has components=.*. Map components to sizes of axes: components={"),
    ],
)
def test_axes_that_do_not_fit(components: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        Mesh(dp=4, pp=2, tp=2, components=components)
