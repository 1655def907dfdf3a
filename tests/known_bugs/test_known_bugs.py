"""Published wrong-number bugs of other frameworks: csc makes the step that eager PyTorch makes, or refuses the layout.

Each case is the construct of a report in a model of our own, compiled for the layout that had the bug, all ranks in one
process. docs/known-bugs.md has a row for each.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.check.eager import eager_step
from csc.check.judge import NOISE
from csc.driver.compiled import CompiledModel
from csc.driver.new_model import compiled_model
from csc.errors import InputError
from csc.reports.verification import Verification, verify
from tests.known_bugs import models
from tests.tiers import long

PAGE = Path(__file__).parents[2] / "docs" / "known-bugs.md"
TOLERANCE = 1e-5  # several ranks add up in another order
TRAINED = 1e-4  # of three steps
NO_PROOF = "cannot prove that the losses of microbatches make the loss of the batch"

Batch = dict[str, torch.Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Batch]]] = {
    "decoder": (models.decoder, models.decoder_batch),
    "sinks": (models.sinks, models.decoder_batch),
    "smoothed": (models.smoothed, models.decoder_batch),
    "gathered": (models.gathered, models.decoder_batch),
    "routed": (models.routed, models.routed_batch),
    "unbalanced": (models.unbalanced, models.routed_batch),
    "seeing": (models.seeing, models.seeing_batch),
}


@dataclass(frozen=True)
class Case:
    """reports: as docs/known-bugs.md names them. watched: globs over the parameters that the bug gave wrong gradients,
    or wrong values after `steps`. refused: what csc says, where it does not compile this.
    """

    reports: tuple[str, ...]
    model: str
    mesh: Any
    watched: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None
    samples: int = 4
    steps: int = 0
    refused: str = ""


VISION_TWICE = {"vision": {"dp": 2, "pp": 1}, "language": {"dp": 1, "pp": 1}}
VISION_MORE = {"vision": {"dp": 4, "pp": 1}, "language": {"dp": 2, "pp": 1}}
SHARED = ("*.query_norm.weight", "*.out_norm.weight")  # read by all heads
SEQUENCE = {"sequence_parallel": True}
CASES = {
    "a norm that all heads share, tp": Case(("Megatron-LM#7452, 11",), "decoder", "tp=2", SHARED),
    "attention, cp": Case(
        ("Megatron-LM#1464", "Megatron-LM#1465", "Megatron-LM#906"), "decoder", "cp=2", ("*.attention.*", "embed.*")
    ),
    "tied embeddings and shards of the optimizer": Case(
        ("Megatron-LM#844", "Megatron-LM#656"), "decoder", "pp=2,dp=2", ("embed.weight",), {"zero": 1}, steps=3
    ),
    "an encoder with replicas of its own": Case(
        ("Megatron-Bridge#5555", "Megatron-Bridge#4066"), "seeing", VISION_TWICE, ("vision.*", "projector.*")
    ),
    "a router and its balance loss, tp": Case(
        ("Megatron-LM#7452, 10", "Megatron-LM#599"), "routed", "tp=2", ("*.router.weight", "*.mlp_norm.*"), SEQUENCE
    ),
}  # fmt: skip
LONG = {
    "norms over shared-out tokens": Case(("Megatron-LM#1446",), "decoder", "tp=2", ("norm.*", "*.norm.*"), SEQUENCE),
    "a second loss with targets of its own": Case(
        ("Megatron-LM#7452, 3", "Megatron-LM#2417"), "decoder", "dp=2", ("second.*", "embed.*"), {"microbatches": 2}
    ),
    "smoothed labels, tp": Case(
        ("Megatron-LM#7452, 1", "Megatron-LM#737"), "smoothed", "tp=2", ("embed.weight", "*.mlp.*")
    ),
    "words that all tp ranks gather": Case(("Megatron-LM#7452, 2",), "gathered", "tp=2", ("embed.weight", "*.mlp.*")),
    "a loss over shared-out tokens, in microbatches": Case(
        ("Megatron-LM#7452, 9", "Megatron-Bridge#4974"), "decoder", "cp=2", ("embed.*", "*.mlp.*"), {"microbatches": 2}
    ),
    "a second head computed again": Case(
        ("Megatron-LM#7452, 4",), "decoder", "dp=2,tp=2", ("second.*",), {"recompute": "full", **SEQUENCE}
    ),
    "layers computed again": Case(
        ("Megatron-LM#290",), "decoder", "pp=2", ("layers.*",), {"recompute": "full", "microbatches": 4}
    ),
    "weights gathered behind the step": Case(
        ("Megatron-LM#663", "Megatron-LM#950", "Megatron-LM#4609"), "decoder", "dp=2", ("*",), {"zero": 3}, steps=3
    ),
    "shards of sizes that do not divide": Case(
        ("Megatron-LM#835",), "decoder", "dp=3", ("embed.weight", "*.query_norm.weight"), {"zero": 2}, 6, steps=3
    ),
    "a router alone, tp": Case(("torchtitan#2387",), "unbalanced", "tp=2", ("*.router.weight",), SEQUENCE),
    "a balance loss over replicas": Case(("Megatron-LM#7452, 5",), "routed", "dp=2,tp=2", refused=NO_PROOF),
    "experts over replicas": Case(("transformers#48687",), "unbalanced", "dp=2", refused=NO_PROOF),
    "cross-attention, tp in replicas": Case(
        ("Megatron-LM#7452, 6",), "seeing", "dp=2,tp=2", ("language.layers.0.cross.*",)
    ),
    "merged features, tokens shared out in replicas": Case(
        ("Megatron-LM#7452, 7",), "seeing", "dp=2,tp=2", ("language.embed.weight", "projector.*"), SEQUENCE
    ),
    "an encoder with more replicas": Case(("Megatron-Bridge#4066",), "seeing", VISION_MORE, ("vision.*",)),
    "an encoder beside cp": Case(("Megatron-LM#3816",), "seeing", "cp=2", ("vision.*", "projector.*")),
    "whole images on cp ranks": Case(
        ("Megatron-Bridge#4784",), "seeing", "cp=2,vision.cp=1", ("vision.*", "projector.*")
    ),
}  # fmt: skip


@cache
def captured(model: str) -> CompiledModel:
    make, batch = MODELS[model]
    return csc.compile(make(), example=batch(), check=False)


@cache
def eager_norms(model: str) -> dict[str, float]:
    compiled = captured(model)
    names = {name for name, _ in compiled.model.named_parameters()}
    right = eager_step(compiled.model, MODELS[model][1](), names)
    return {name: float(gradient.norm()) for name, gradient in right.gradients.items()}


def result_of(case: Case) -> Verification:
    base = captured(case.model)
    options = base.with_options(mesh=case.mesh, **(case.options or {})).options
    batch = MODELS[case.model][1](case.samples)
    return verify(compiled_model(base.model, options, batch, None, base.compiler), steps=case.steps)


def watched(case: Case) -> list[str]:
    """Gradients that say something: no rounding noise beside those of their modules."""
    norms = eager_norms(case.model)
    matching = [name for name in norms if any(fnmatch(name, glob) for glob in case.watched)]
    for glob in case.watched:
        assert any(fnmatch(name, glob) for name in matching), f"no gradient is called {glob}"
    modules = {name: max(n for other, n in norms.items() if _module(other) == _module(name)) for name in matching}
    return [name for name in matching if norms[name] > NOISE * modules[name]]


def _module(name: str) -> str:
    return name.rpartition(".")[0]


@pytest.mark.usefixtures("traces")
@pytest.mark.parametrize("name", [*CASES, *map(long, LONG)])
def test_the_step_is_eagers_or_refused(name: str) -> None:
    case = (CASES | LONG)[name]
    if case.refused:
        with pytest.raises(InputError, match=case.refused) as error:
            result_of(case)
        assert error.value.where and error.value.remedy
        return
    result = result_of(case)
    assert result.params_missing == result.params_unexpected == ()
    assert result.loss_rel <= TOLERANCE
    assert {name: value for name, value in result.grad_rel.items() if not value <= TOLERANCE} == {}
    assert {name: value for name, value in result.trained_rel.items() if not value <= TRAINED} == {}
    names = watched(case)
    assert names and result.grad_rel.keys() >= set(names)
    assert case.steps == 0 or result.trained_rel.keys() >= set(names)


CLIPPED = "Megatron-LM#7452, 8"


@pytest.mark.long
@pytest.mark.usefixtures("traces")
def test_weights_of_divided_heads_count_in_the_norm_that_clips() -> None:
    """Each tp rank has the sinks of its own heads: their gradients belong into the norm, once."""
    base, batch = captured("sinks"), models.decoder_batch()
    right = {name: torch.tensor(norm) for name, norm in eager_norms("sinks").items()}
    compiled = base.with_options(mesh="tp=2")
    compiled.train_step(batch)
    norm = compiled.clip_grad_norm_(1e9)
    sinks = {name for name in right if name.endswith("sinks")}
    without = torch.stack([value for name, value in right.items() if name not in sinks]).norm()
    assert float(norm) == pytest.approx(float(torch.stack(list(right.values())).norm()), rel=2e-6)
    assert float(norm) != pytest.approx(float(without), rel=2e-5)
    compiled.zero_grad()


LOADED = "Megatron-LM#7452, 12"


@pytest.mark.long
def test_weights_saved_by_replicas_are_each_stages_own(tmp_path: Path) -> None:
    """Each stage's layers under the names that the whole model has, wherever they ran."""
    batch, saved, loaded = models.decoder_batch(), models.decoder(), models.decoder()
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.zero_()
    csc.compile(saved, mesh="dp=2", zero=3, example=batch, check=False).save(tmp_path)
    stages = csc.compile(loaded, mesh="pp=2", example=batch, check=False)
    stages.load(tmp_path)
    stages.gather()
    for name, tensor in saved.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_page_has_a_row_for_each_report() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| [")]
    listed = {
        re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", report) for row in rows for report in row.split("|")[1].split("; ")
    }
    tested = {report for case in (CASES | LONG).values() for report in case.reports} | {CLIPPED, LOADED}
    assert {report.strip() for report in listed} == tested
    refused = {report for case in (CASES | LONG).values() if case.refused for report in case.reports}
    for row in rows:
        reports = {re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", report).strip() for report in row.split("|")[1].split("; ")}
        assert ("refused" in row.split("|")[-2]) == bool(reports & refused), row
