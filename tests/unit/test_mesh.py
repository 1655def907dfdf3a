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


@given(*[st.integers(1, 4)] * 4)
def test_coordinates_and_ranks_are_inverse(dp: int, pp: int, cp: int, tp: int) -> None:
    mesh = Mesh(dp, pp, cp, tp)
    assert [mesh.rank_of(*mesh.coordinates(r)) for r in range(mesh.size)] == list(range(mesh.size))


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
        (SimpleNamespace(mesh_dim_names=("pp", "dp"), shape=(2, 2)), "in the order pp, dp"),
    ],
)
def test_other_forms_are_refused(form: object, part: str) -> None:
    with pytest.raises(InputError, match=part):
        Mesh.of(form)


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
