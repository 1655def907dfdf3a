"""Mesh: ranks, coordinates, and every form that names one."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from csc.errors import CscError, InputError
from csc.ir.mesh import Mesh

ORDERS = [(*("dp", "cp", "tp")[:i], "pp", *("dp", "cp", "tp")[i:]) for i in range(4)]


@given(*[st.integers(1, 4)] * 4, st.sampled_from(ORDERS))
def test_coordinates_and_ranks_are_inverse(dp: int, pp: int, cp: int, tp: int, order: tuple[str, ...]) -> None:
    mesh = Mesh(dp, pp, cp, tp, order)
    assert [mesh.rank_of(*mesh.coordinates(r)) for r in range(mesh.size)] == list(range(mesh.size))
    shape = [getattr(mesh, axis) for axis in order]
    for rank in range(mesh.size):
        at = mesh.coordinates(rank)._asdict()
        counted = 0
        for axis, size in zip(order, shape):
            counted = counted * size + at[axis]
        assert counted == rank, "the order that was asked for, whatever axes of size 1 did to it"
    assert Mesh.parse(str(mesh)) == Mesh.of(mesh.to_dict()) == mesh
    assert ("order" in str(mesh)) == (mesh.order != Mesh.AXES) == ("order" in mesh.to_dict())
    others = mesh.orders()
    assert others[0] == mesh and len(set(others)) == len(others)
    placed = {tuple(other.coordinates(r) for r in range(mesh.size)) for other in others}
    assert len(placed) == len(others), "each is another numbering"


def test_a_device_mesh_says_its_order() -> None:
    found = Mesh.of(SimpleNamespace(mesh_dim_names=("pp", "dp", "tp"), shape=(2, 4, 2)))
    assert found == Mesh.parse("dp=4,pp=2,tp=2,order=pp-dp-tp") and found.coordinates(2) == (1, 0, 0, 0)


def test_rank_is_dp_times_pp_plus_stage() -> None:
    assert Mesh(dp=2, pp=3).rank_of(dp=1, pp=2) == 5
    assert Mesh(dp=2, pp=3).coordinates(4)[:2] == (1, 1)


def test_every_form() -> None:
    mesh = Mesh(dp=2, pp=3)
    device_mesh = SimpleNamespace(mesh_dim_names=("dp", "pp"), shape=(2, 3))
    for form in (
        mesh,
        "pp=3,dp=2",
        " dp = 2 , pp=3 ",
        {"pp": 3, "dp": 2},
        device_mesh,
        str(mesh),
        mesh.to_dict(),
    ):
        assert Mesh.of(form) == mesh
    assert Mesh.parse(str(Mesh())) == Mesh()


@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("", "no axis"),
        ("pp", "'pp' is not NAME=SIZE"),
        ("pp=x", "is not NAME=SIZE"),
        ("pp=0", "size 0"),
        ("qq=2", "no axis 'qq'"),
        ("pp=2,pp=3", "given twice"),
        ({"data": 2}, "no axis 'data'"),
        ({"pp": 1.5}, "size 1.5"),
        (7, "int is not a mesh"),
        (SimpleNamespace(mesh_dim_names=None, shape=(2,)), "no axis names"),
        (SimpleNamespace(mesh_dim_names=("cp", "dp"), shape=(2, 2)), "in the order cp, dp"),
        ("pp=2,dp=2,order=pp", "order of ranks is 'pp'"),
        ("pp=2,dp=2,order=pp-dp-dp", "order of ranks is"),
        ("dp=2,cp=2,order=cp-dp", "Name the axes larger than 1"),
        ("order=pp", "no axis is given"),
        ("ranks=0", "ranks has size 0"),
        ({"ranks": True}, "ranks has size True"),
        ("ranks=4,pp=2", "has ranks=4, for csc to choose the axes, and pp=2 too"),
    ],
)
def test_other_forms_are_refused(form: object, part: str) -> None:
    with pytest.raises(InputError, match=part):
        Mesh.of(form)


def test_a_mesh_that_is_to_be_chosen() -> None:
    for form in (Mesh(ranks=6), "ranks=6", {"ranks": 6}):
        mesh = Mesh.of(form)
        assert (mesh.is_open, mesh.size, str(mesh)) == (True, 6, "ranks=6")
        assert Mesh.of(mesh.to_dict()) == Mesh.parse(str(mesh)) == mesh
        with pytest.raises(InputError, match="the axes of ranks=6 are not chosen yet"):
            mesh.coordinates(0)
    assert not Mesh(pp=6).is_open


def test_outside_the_mesh() -> None:
    with pytest.raises(IndexError):
        Mesh(pp=2).coordinates(2)
    with pytest.raises(IndexError):
        Mesh(pp=2).rank_of(pp=2)


def test_ground_floor_does_not_import_torch() -> None:
    code = (
        "import sys, csc.errors, csc.ir.mesh, csc.ir.schedule;"
        "import csc.planning.partition, csc.planning.schedules;"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_errors_read_as_sentences() -> None:
    assert str(CscError("it broke", "here", "Mend it")) == "here: it broke. Mend it."
    assert str(CscError("it broke.")) == "it broke."
    assert CscError("a", "b", "c").args == ("a", "b", "c")
