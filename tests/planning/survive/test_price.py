"""What survive= takes beside a plan, and which meshes can lose ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import csc
from csc.commands.main import app
from csc.driver.mesh_candidates import FixedChoices
from csc.driver.options import of_fewer, refuse_beside_survive
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from csc.planning.meshes import MeshForm, MeshLayout
from csc.reports.forecast import memory_forecast
from csc.reports.survival_price import SurvivalPrice, price_of, survival_price
from tests.compiler import small


def priced(survive: csc.Survive, **options: Any) -> tuple[SurvivalPrice, csc.CompiledModel]:
    compiled = csc.compile(
        lambda: small.text(2), example=small.text_batch(16), microbatches=2, hardware="a100", check=False, **options
    )
    return survival_price(compiled.program, compiled.options, survive), compiled


@pytest.mark.parametrize("zero", [2, *(pytest.param(zero, marks=pytest.mark.long) for zero in (0, 1))])
def test_the_price_is_of_gradients_and_of_shards_that_several_have(zero: int) -> None:
    price, compiled = priced(csc.Survive(1, copies=1), mesh="dp=4", zero=zero)
    (held,) = memory_forecast(compiled.program, compiled.options)
    whole = sum(p.numel() * 4 for p in compiled.model.parameters())
    assert price.size == whole and price.copies == 2 * whole and (price.sends, price.before, price.after) == (2, 2, 3)
    assert price.sums == 2 * whole - held.gradients, "two whole buffers, of which the plan has what zero leaves"
    state = pytest.approx(2 * whole / 2 - held.optimizer, abs=64)  # of two moments, halves in place of quarters
    assert price.optimizer == (state if zero else 0)
    assert 0 < price.seconds < 1 and price.seconds == pytest.approx(2 * survival_price(
        compiled.program, compiled.options, csc.Survive(1, copies=2)).seconds)  # fmt: skip
    without = survival_price(compiled.program, compiled.options, csc.Survive(2))
    assert (without.copies, without.sends, without.seconds, without.after) == (0, 0, 0, 4)


@pytest.mark.parametrize(
    ("mesh", "zero", "fewer"), [("pp=2", 0, "pp=1"), pytest.param("dp=2", 3, "dp=1", marks=pytest.mark.long)]
)
def test_the_price_of_a_neighbours_copy(mesh: str, zero: int, fewer: str) -> None:
    price, compiled = priced(csc.Survive(1, mirror=True), mesh=mesh, zero=zero)
    held = memory_forecast(compiled.program, compiled.options)
    assert price.mirror == max(row.parameters + row.gradients + row.optimizer for row in held)
    assert (price.sends, price.size, Mesh.parse(price.fewer)) == (
        1, max(row.gradients for row in held), Mesh.parse(fewer),
    )  # fmt: skip
    assert price.sums == 0 and (price.before, price.after) == (2, 4 if zero else 2)
    goes_on, memory, copies = price.sentences(10 * price.seconds)
    assert f"go on as {price.fewer}" in goes_on and "of a neighbour's parameters" in memory
    assert copies.endswith("10.0% of the step")


def test_pipelines_that_mirror_each_other_cost_nothing_and_the_ways_to_go_on_are_planned() -> None:
    compiled = csc.compile(
        lambda: small.text(4), example=small.text_batch(8), mesh="dp=2,pp=2", microbatches=2, hardware="a100",
        survive=csc.Survive(1, mirror=True),
    )  # fmt: skip
    price = price_of(compiled, compiled.survive)
    assert price is not None and (price.mirror, price.sends, price.size, price.seconds) == (0, 0, 0, 0)
    assert Mesh.parse(price.fewer) == Mesh(pp=3) and price.after == 4
    for mesh, seconds in zip((Mesh(pp=2), Mesh(pp=3)), price.steps.values(), strict=True):
        planned = compiled.with_options(mesh=mesh, microbatches=4).program.plan
        assert planned is not None and seconds == planned.makespan
    *_, ways = price.sentences(1.0)
    assert re.fullmatch(r"a step afterwards is planned to take .* as .*pp=2.*, .* as pp=3 \(mirror=True\)", ways)


def test_a_mesh_of_one_fewer_that_is_deeper_than_the_model_is_told_as_what_it_is_for() -> None:
    compiled = csc.compile(
        small.text(2), example=small.text_batch(8), mesh="dp=2,pp=4", microbatches=2, cache=False,
        survive=csc.Survive(1, mirror=True),
    )  # fmt: skip
    given, options = compiled.inspected.microbatch, compiled.options
    with pytest.raises(
        InputError, match=r"rank of dp=2,pp=4 is lost .* as pp=7, .* 5 regions\. use a mesh of which one"
    ):
        compiled._all.standby(given, options, of_fewer(options))


@pytest.mark.parametrize(
    ("mesh", "microbatches", "fewer"),
    [("dp=2,pp=2", 2, "pp=3"), ("dp=3,pp=3", 4, "dp=2,pp=4"), ("dp=3,pp=3", 3, "pp=8"), ("dp=4,pp=4", 3, "dp=3,pp=5")],
)
def test_those_that_are_left_are_pipelines_no_shorter_than_before(mesh: str, microbatches: int, fewer: str) -> None:
    before = Options(mesh=Mesh.parse(mesh), microbatches=microbatches)
    after = of_fewer(before)
    assert after.mesh == Mesh.parse(fewer) and after.mesh.size == before.mesh.size - 1
    assert after.mesh.dp * after.microbatches == before.mesh.dp * before.microbatches


def test_the_price_in_sentences() -> None:
    price = SurvivalPrice(1, 4_000_000, 0, 8_000_000, 2, 4_000_000, 0.01, 2, 4)
    first, memory, copies = price.sentences(0.1)
    assert first.endswith("those that are left do 4 microbatches each in place of 2")
    assert "3.81 MiB of gradients at the end of a step" in memory and "optimizer" not in memory
    assert "3.81 MiB are sent 2 times a step" in copies and copies.endswith("10.0% of the step")
    assert len(SurvivalPrice(2, 1, 1, 0, 0, 1, 0.0, 2, 4).sentences(0.1)) == 2


def test_layouts_that_can_lose_ranks() -> None:
    two = FixedChoices(failures=1)
    assert two.allow(MeshLayout(Mesh(dp=2, tp=2), 1, 4)) and not two.allow(MeshLayout(Mesh(pp=4), 1, 4))
    own = MeshLayout(Mesh(dp=2, tp=2), 1, 4).in_form(MeshForm(own=(("vision", 1),)))
    assert own.mesh.components and not two.allow(own) and FixedChoices().allow(own)
    assert {zero for zero, _ in two.ways()} == {1} and {zero for zero, _ in FixedChoices().ways()} == {1, 3}
    assert not FixedChoices(microbatches=2, failures=1).allow(MeshLayout(Mesh(dp=2), 1, 4))


def test_meshes_that_cannot_be_chosen() -> None:
    with pytest.raises(InputError, match=r"divided among 2 devices .* 2 replicas that survive=1 needs"):
        csc.compile(lambda: small.text(2), example=small.text_batch(1), mesh=csc.Mesh(ranks=2), survive=1)
    with pytest.raises(InputError, match=r"Mesh\(ranks=2\) a rank cannot be lost.*use mesh='pp=2'"):
        csc.compile(
            lambda: small.text(2), example=small.text_batch(4), mesh=csc.Mesh(ranks=2),
            survive=csc.Survive(1, mirror=True),
        )  # fmt: skip
    with pytest.raises(InputError, match=r"with zero=3 a rank cannot be lost.*use zero=2"):
        csc.compile(lambda: small.text(2), example=small.text_batch(4), mesh=csc.Mesh(ranks=2), zero=3, survive=1)


@pytest.mark.long
def test_the_chosen_mesh_has_two_replicas() -> None:
    chosen = csc.compile(lambda: small.text(2), example=small.text_batch(4), mesh=csc.Mesh(ranks=2), survive=1)
    assert chosen.options.mesh == Mesh(dp=2) and chosen.options.zero < 3


def test_what_cannot_be_lost_with() -> None:
    for options, said in (({"fuse": True}, "fuse=True"), ({"cuda_graphs": True}, "cuda_graphs=True")):
        with pytest.raises(InputError, match=f"with {said} a rank cannot be lost.*leave {said} out"):
            refuse_beside_survive(csc.compile(lambda: small.text(2), mesh="dp=2", **options).options)


def asked(directory: Path) -> list[str]:
    file = directory / "model.py"
    file.write_text(
        "from tests.compiler import small\nexample = small.text_batch(8)\n\n\ndef model():\n    return small.text(2)\n"
    )
    return ["plan", f"{file}:model", "--example", "example", "--hardware", "a100", "--limit", "0"]


def test_explain_says_what_it_takes(tmp_path: Path) -> None:
    file = tmp_path / "compiled.py"
    file.write_text(
        "import csc\nfrom tests.compiler import small\ncompiled = csc.compile(small.text(2), mesh='pp=2', "
        "example=small.text_batch(4), hardware='a100', survive=csc.Survive(1, mirror=True))\n"
    )
    said = CliRunner().invoke(app, ["explain", f"{file}:compiled"])
    assert said.exit_code == 0 and "survive=1, mirrored: when a rank is killed" in said.output


@pytest.mark.long
def test_the_command_says_what_it_takes(tmp_path: Path) -> None:
    options = ["--survive", "1", "--mesh", "dp=2,pp=2", "--copies", "1"]
    said = CliRunner().invoke(app, [*asked(tmp_path), *options])
    assert said.exit_code == 0 and re.search(r"survive=1: 1 killed rank may take.*copies: .* a step", said.output, re.S)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--survive", "1", "--lengths", "model.py"], "--lengths and --survive are given"),
        (["--copies", "1"], "--copies is given without --survive"),
        (["--mirror"], "--mirror is given without --survive"),
        (["--survive", "1", "--mesh", "pp=2"], "no copy of some weights would be left"),
    ],
)
def test_what_the_command_refuses(tmp_path: Path, options: list[str], fault: str) -> None:
    refused = CliRunner().invoke(app, [*asked(tmp_path), *options])
    assert isinstance(refused.exception, InputError) and fault in str(refused.exception)
