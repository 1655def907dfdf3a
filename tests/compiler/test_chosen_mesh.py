"""csc.Mesh(ranks=...): the mesh that csc chooses, in one process and of several, and what is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.cache.store import Store
from csc.driver import mesh_choice
from csc.driver.mesh_candidates import MeshChoice, MeshRow
from csc.errors import InputError
from tests import launching
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")


def compiled(model: nn.Module, ranks: int, **options: Any) -> csc.CompiledModel:
    settings = {"hardware": "h100", "cache": False, "check": False} | options
    found = csc.compile(model, mesh=csc.Mesh(ranks=ranks), example=BATCHES["llama"](4), **settings)
    assert isinstance(found, csc.CompiledModel)
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [long(2, {"microbatches": 2}), long(4, {}), long(4, {"zero": 3}), long(4, {"recompute": "full"}), long(1, {})],
)
def test_the_chosen_mesh_trains_as_eager_does(ranks: int, options: dict[str, Any]) -> None:
    model = MODELS["llama"]()
    eager = copy.deepcopy(model)
    found = compiled(model, ranks, **options)
    assert found.options.mesh.size == ranks and not found.options.mesh.is_open
    assert found.options.microbatches == options.get("microbatches", found.options.microbatches)
    assert found.options.zero in (0, options.get("zero", found.options.zero))
    if "recompute" in options:
        assert found.options.recompute == (("*", "full"),)
    loss = found.train_step(BATCHES["llama"](4))
    expected = eager(**BATCHES["llama"](4)).loss
    expected.backward()
    assert torch.allclose(loss, expected.detach(), rtol=1e-6)
    own, theirs = gradients(model), gradients(eager)
    assert own.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert float((own[name] - gradient).norm()) <= 1e-5 * max(float(gradient.norm()), 1e-4), name


def test_a_choice_is_kept_between_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the same model, sizes, options and hardware, and for nothing else; a damaged one is made again."""
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path))
    searched = []

    def choose(compiled: csc.CompiledModel, ranks: int, *_: Any) -> MeshChoice:
        searched.append(ranks)
        row = MeshRow(f"dp={ranks}", 2, 1, 1, "none", 1.0, 0.0, 1.0, True)
        return MeshChoice(ranks, 4, None, (row,), 0, 0, {}, 0)

    monkeypatch.setattr(mesh_choice, "choose", choose)
    first = compiled(MODELS["llama"](), 2, cache=True)
    again = compiled(MODELS["llama"](), 2, cache=True)
    assert searched == [2] and again.options == first.options
    assert "was chosen in" in first.inspected.mesh_text and "earlier start" not in first.inspected.mesh_text
    assert again.inspected.mesh_text == first.inspected.mesh_text + ", at an earlier start"
    assert again.with_options(microbatches=1).inspected.mesh_text
    assert not first.with_options(mesh="pp=2").inspected.mesh_text
    for ranks, more in ((1, {}), (2, {"hardware": "a100", "microbatches": 2})):
        before = len(searched)
        compiled(MODELS["llama"](), ranks, cache=True, **more)
        assert len(searched) == before + 1, more
    store = Store(tmp_path)
    entry = max((one for one in store.entries() if one.kind == "mesh"), key=lambda one: one.used)
    assert entry.about["name"] == "LlamaForCausalLM" and entry.about["mesh"] == {"ranks": 2}
    for text in (b"{", b'{"options": {"mesh": "dp=0"}, "why": ""}'):
        store.write("mesh", entry.key, {"mesh.json": text}, entry.about)
        (tmp_path / f"mesh-{entry.key}" / "mesh.json").write_bytes(text)
        before = len(searched)
        compiled(MODELS["llama"](), 2, cache=True, hardware="a100", microbatches=2)
        assert len(searched) == before + 1


@pytest.mark.long
def test_a_component_that_some_cp_ranks_share_is_no_hindrance() -> None:
    """What is known of one device is of whole components; meshes that cannot spread it so are left out."""
    settings = {"hardware": "h100", "cache": False, "check": False, "microbatches": 2, "context": {"vision_tower": 2}}
    found = csc.compile(MODELS["llava"](), mesh="ranks=2", example=BATCHES["llava"](4), **settings)
    assert found.options.mesh == csc.Mesh(cp=2) and found.options.context == (("vision_tower", 2),)
    assert not bool(torch.isnan(found.train_step(BATCHES["llava"](4))))


def rank(ranks: int) -> None:
    mesh_choice.SECONDS = 2.0  # some layouts are enough
    found = compiled(MODELS["llama"](), ranks, microbatches=2)
    loss = float(found.train_step(BATCHES["llama"](4)))
    print(found.options.mesh, found.options.microbatches, found.options.zero, found.options.recompute)
    print(loss)


@pytest.mark.gloo
def test_every_process_has_the_mesh_that_the_first_one_chose() -> None:
    first, second = (said.splitlines()[-2:] for said in launching.ranks(rank, 2, 2))
    assert first == second and " 2 " in first[0]
    with pytest.raises(AssertionError, match="2 processes were started and the mesh has 3 ranks"):
        launching.ranks(rank, 2, 3)


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]()
    with pytest.raises(InputError, match="there is no example batch"):
        csc.compile(model, mesh="ranks=2")
    with pytest.raises(InputError, match="a list of ready microbatches"):
        csc.compile(model, mesh="ranks=2", example=[BATCHES["llama"](2), BATCHES["llama"](2)])
    for option in ({"cuts": ["model.layers.1"]}, {"schedule": "1f1b"}, {"chunks": 2}, {"memory": ["4GB", "8GB"]}):
        with pytest.raises(InputError, match=f"the options {next(iter(option))} are of one mesh"):
            compiled(model, 2, **option)
    with pytest.raises(InputError, match=r"4 samples of a step cannot be divided among 2 devices.*microbatches=3"):
        compiled(model, 2, microbatches=3)
    with pytest.raises(InputError, match="has to choose, and this model has one"):
        csc.compile(model, mesh="pp=2", example=BATCHES["llama"](4)).with_options(mesh="ranks=2")
    monkeypatch.setattr(mesh_choice, "SECONDS", 1e-3)  # one layout
    with pytest.raises(InputError, match=r"no mesh of 1 ranks fits.*: dp=1 .* needs .* on its fullest rank, of 1000 B"):
        compiled(model, 1, memory="1KB")
