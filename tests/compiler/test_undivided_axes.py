"""What one refused division of a search says of others."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from csc.passes.tensor import Indivisible, OddAxis

import csc
from csc.driver.mesh_candidates import FixedChoices, MeshTraces, UndividedAxes
from csc.driver.mesh_choice import choose
from csc.errors import InputError
from csc.planning.meshes import MeshDivision, MeshForm
from tests.compiler.tensor_models import BATCHES, MODELS
from tests.models.hf import llava, llava_batch


def test_a_refusal_is_for_all_that_divide_the_component_so() -> None:
    known = UndividedAxes({"spread"})
    heads, wide = OddAxis("heads", 8, 1, "q.weight"), OddAxis("heads", 2, 3, "k.weight", "a reason", (1, 2))
    known.note(Indivisible("8 heads by tp=3", "mesh", "take 2", {"llm": (heads, wide)}))
    known.note(InputError("4 is too much", "mesh", "take 2"))
    said = "8 heads of q.weight (llm) cannot be divided by tp="
    assert known.why(MeshDivision(3, 2, 4, MeshForm((("vision", 1),), True))) == f"{said}3"
    assert known.why(MeshDivision(6, 1, 1)) == f"{said}6"
    assert known.why(MeshDivision(3, 1, 1, MeshForm((("llm", 1),)))) is None
    assert known.why(MeshDivision(4, 1, 1)) is None and known.why(MeshDivision(1, 3, 1)) is None
    spread = Indivisible("9 heads by tp=4", "mesh", "take 3", {"spread": (OddAxis("heads", 9, 1, "q"),)})
    known.note(spread)
    assert known.why(MeshDivision(4, 1, 1)) is None
    copied = pickle.loads(pickle.dumps(spread))
    assert str(copied) == str(spread) and copied.axes == spread.axes


def test_a_search_traces_one_form_of_what_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """And first what one device does alone, which is traced already."""
    traced: list[str] = []
    searched = MeshTraces.in_form

    def noted(self: Any, listed: Any, form: Any) -> Any:
        tell, self._tell = self._tell, traced.append
        found = searched(self, listed, form)
        self._tell = tell
        return found

    monkeypatch.setattr(MeshTraces, "in_form", noted)
    compiled = csc.compile(MODELS["llava"](), example=BATCHES["llava"](3), mesh={"pp": 1}, check=False)
    choice = choose(compiled, 3, None, 600.0, lambda _: None)
    refused = [one for one in traced if one.startswith("tp=3")]
    assert traced[0] == "tp=1, cp=1" and len(refused) == 1
    assert "cannot be divided by tp=3" in choice.refused["tp=3, cp=1"]


@pytest.mark.long
@pytest.mark.parametrize(
    "fixed",
    [FixedChoices(None, None, None), FixedChoices(None, 1, "full"), FixedChoices(2, None, None)],
    ids=["free", "zero and recompute", "microbatches"],
)
def test_a_search_that_knows_finds_what_one_finds_that_traces_all(
    fixed: FixedChoices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder with three heads on four devices: the same meshes, plans and refusals from fewer traces."""
    model = llava()
    vision = type(model.config.vision_config)(
        hidden_size=36, intermediate_size=66, num_hidden_layers=3, num_attention_heads=3, image_size=24, patch_size=8,
    )  # fmt: skip
    model = type(model)(type(model.config)(**{**model.config.to_dict(), "vision_config": vision}))
    found, traced = [], []
    for known in (True, False):
        if not known:
            monkeypatch.setattr(UndividedAxes, "why", lambda self, division: None)
        compiled = csc.compile(model, example=llava_batch(4), mesh={"pp": 1}, check=False)
        told: list[str] = []
        found.append(choose(compiled, 4, None, 900.0, told.append, fixed))
        traced.append(len(told))
    with_it, without = found
    assert with_it.rows == without.rows and len(with_it.rows) > 1
    assert set(with_it.refused) == set(without.refused) and traced[0] < traced[1]
