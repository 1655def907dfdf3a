"""Parameter-efficient training: PEFT's adapters in the compiled form, and in PEFT's own files."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    PeftModel,
    PromptEncoderConfig,
    PromptTuningConfig,
    ShiraConfig,
    VBLoRAConfig,
    get_peft_model,
)
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

import csc
from csc.analysis.explain import explain
from csc.driver.checkpoint import BASE, convert
from csc.errors import InputError
from csc.reports.verification import verify
from tests import launching
from tests.compiler import weights_worker
from tests.compiler.peft_models import TEXT, adapted, base, llama, peft_model, text_batch
from tests.compiler.test_parity import check, training_only
from tests.exactness import FLOAT32
from tests.models import hf
from tests.tiers import long

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("traces")]


@pytest.fixture(scope="module")
def lora() -> csc.CompiledModel:
    """LoRA on the LLM of a LLaVA whose encoder is frozen."""
    return csc.compile(peft_model("llava"), mesh="pp=2", example=hf.llava_batch(2))


@pytest.mark.parametrize("stages", [long(2), 3])
def test_lora_on_the_llm_with_a_frozen_encoder(lora: csc.CompiledModel, stages: int) -> None:
    check(verify(lora.with_options(mesh={"pp": stages})), FLOAT32, 16)


def test_explain_shows_what_lora_costs(lora: csc.CompiledModel) -> None:
    components, regions = explain(lora.program)
    of = {row.name: row for row in components}
    assert of["vision_tower"].flops[1:] == (0, 0) and of["vision_tower"].trainable == 0
    assert of["language_model"].trainable == 4 * 4 * (48 + 48 + 48 + 24)
    first, *later = (row for row in regions if ".layers." in row.name and row.component == "language_model")
    for row in later:  # the frozen base passes gradients on (B); only the adapters have W
        assert row.flops[1] > row.flops[0] and 0 < row.flops[2] < 0.05 * row.flops[0]
    assert first.flops[1] == 0 and "leads to them" in first.why
    head = next(row for row in regions if row.name.endswith("lm_head"))
    assert head.flops[1] == head.flops[0] and head.flops[2] == 0


@pytest.fixture(scope="module")
def mixed() -> csc.CompiledModel:
    """DoRA, embeddings of new tokens, and a head that is trained and saved whole."""
    model = adapted(llama(), use_dora=True, modules_to_save=["lm_head"], trainable_token_indices=[98])
    return csc.compile(model, mesh="pp=2", example=text_batch(2))


@pytest.mark.long
def test_dora_new_tokens_and_a_trained_head(mixed: csc.CompiledModel) -> None:
    check(verify(mixed), FLOAT32, 6 * 3 + 1 + 1)


@pytest.mark.long
def test_new_tokens_alone_in_tied_embeddings() -> None:
    """The new rows are one parameter that the input embedding and the head read, on two stages."""
    model = adapted(llama(tied=True), trainable_token_indices=[97, 98])
    with training_only(model, lambda name: "trainable_tokens" in name) as count:
        compiled = csc.compile(model, mesh="pp=3", example=text_batch(2))
        check(verify(compiled), FLOAT32, count)
    assert count == 1


@pytest.fixture(scope="module")
def plain() -> csc.CompiledModel:
    return csc.compile(llama(), mesh="pp=3", example=text_batch(4), microbatches=2)


def test_norms_alone(plain: csc.CompiledModel) -> None:
    with training_only(plain.model, lambda name: "norm" in name) as count:
        check(verify(plain.with_options()), FLOAT32, count)
    assert count == 7


def trained(compiled: csc.CompiledModel, batch: Any) -> None:
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    for _ in range(2):
        compiled.train_step(batch)
        optimizer.step()
        optimizer.zero_grad()


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    expected, found = dict(one.named_parameters()), dict(other.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_adapters_go_to_pefts_files_and_back(mixed: csc.CompiledModel, tmp_path: Path) -> None:
    before = copy.deepcopy(mixed.model)
    trained(mixed, text_batch(2))
    mixed.save_adapter(tmp_path / "adapter")
    assert {"adapter_model.safetensors", "adapter_config.json"} <= {f.name for f in (tmp_path / "adapter").iterdir()}
    assert_same(mixed.model, PeftModel.from_pretrained(llama(), str(tmp_path / "adapter")))
    now = dict(mixed.model.named_parameters())
    changed = {name for name, parameter in before.named_parameters() if not torch.equal(parameter, now[name])}
    assert changed == {name for name, parameter in now.items() if parameter.requires_grad}


def test_a_checkpoint_becomes_pefts_files_and_the_base_beside_them(mixed: csc.CompiledModel, tmp_path: Path) -> None:
    trained(mixed, text_batch(2))
    csc.CheckpointManager(tmp_path / "run", mixed).save(1)
    out = convert(tmp_path / "run", tmp_path / "out", "hf").made
    found = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(out / BASE), str(out))
    assert_same(mixed.model, found)
    mixed.save_adapter(tmp_path / "adapter")
    one, other = (load_file(path / "adapter_model.safetensors") for path in (out, tmp_path / "adapter"))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    told = [json.loads((path / "adapter_config.json").read_text()) for path in (out, tmp_path / "adapter")]
    assert told[0] == told[1]


@pytest.mark.long
def test_a_base_that_adapters_have_changed_is_not_changed_again(tmp_path: Path) -> None:
    """PiSSA takes from the base what the adapter begins with. Adapters that PEFT computes from values are refused."""
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules=TEXT, init_lora_weights="pissa"))
    compiled = csc.compile(model, mesh="pp=2", example=text_batch(2), check=False)
    csc.CheckpointManager(tmp_path / "run", compiled).save(1)
    out = convert(tmp_path / "run", tmp_path / "out", "hf").made
    assert_same(model, PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(out / BASE), str(out)))
    prompted = get_peft_model(llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    compiled = csc.compile(prompted, mesh="pp=2", example=text_batch(2), check=False)
    csc.CheckpointManager(tmp_path / "prompts", compiled).save(1)
    with pytest.raises(InputError, match=r"'default' is of prompts.*save_adapter"):
        convert(tmp_path / "prompts", tmp_path / "none", "hf")
    assert not (tmp_path / "none").exists()


class Scored(torch.nn.Module):
    """Not of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.v_proj = torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.v_proj(self.q_proj(x).relu()).square().mean()


def test_adapters_that_peft_or_transformers_cannot_write_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No save fails for it, and weights are converted in the model's own names."""
    model, batch = adapted(Scored(), target_modules=["q_proj", "v_proj"]), {"x": torch.randn(2, 4)}
    run = csc.CheckpointManager(tmp_path / "run", csc.compile(model, mesh="pp=1", example=batch, check=False))
    run.save(1)
    assert (tmp_path / "run" / "step-00000001" / "adapters.json").is_file()
    monkeypatch.setattr(LoraConfig, "save_pretrained", lambda self, directory: json.dumps({1j}))
    run.save(2)
    for step in (1, 2):
        made = convert(tmp_path / "run", tmp_path / f"out{step}", "hf", step).made
        found = load_file(made / "model.safetensors")
        assert all(torch.equal(found[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("text", ["{", "{}", '{"default": {"peft_type": "NONE"}}', '{"other": {"peft_type": "LORA"}}'])
def test_a_damaged_list_of_adapters_makes_nothing(mixed: csc.CompiledModel, text: str, tmp_path: Path) -> None:
    csc.CheckpointManager(tmp_path / "run", mixed).save(1)
    [file] = (tmp_path / "run").glob("*/adapters.json")
    file.write_text(text)
    with pytest.raises(InputError, match=r"adapters\.json"):
        convert(tmp_path / "run", tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_a_model_without_adapters_has_none_to_save(plain: csc.CompiledModel, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"LlamaForCausalLM has no adapters.*peft\.get_peft_model"):
        plain.save_adapter(tmp_path)


@pytest.mark.gloo
def test_adapters_of_several_processes_are_gathered(tmp_path: Path) -> None:
    launching.ranks(weights_worker.adapter, 2, "llama", 2, tmp_path)
    alone = csc.compile(peft_model("llama"), mesh="pp=2", example=text_batch(2))
    trained(alone, text_batch(2))
    assert_same(alone.model, PeftModel.from_pretrained(base("llama"), str(tmp_path / "adapter")))


ADAPTERS: dict[str, Callable[[], Any]] = {
    "LoHa": lambda: LoHaConfig(r=4, target_modules=TEXT),
    "LoKr": lambda: LoKrConfig(r=4, target_modules=TEXT),
    "prompt tuning": lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4),
    "P-tuning": lambda: PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=16),
}
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "dropped modules": (lambda: LoHaConfig(r=4, target_modules=TEXT, module_dropout=0.3), "takes a Python decision"),
    "VBLoRA": (
        lambda: VBLoRAConfig(r=2, num_vectors=8, vector_length=8, topk=2, target_modules=TEXT),
        "takes a Python decision",
    ),
    "SHiRA": (lambda: ShiraConfig(r=2, target_modules=TEXT), "computes with a sparse tensor"),
}


def begun(config: Any) -> PeftModel:
    """Adapters in the middle of their training: none is zero."""
    model = get_peft_model(llama(), config).train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["pp=2", "dp=2"])
@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_of_other_kinds_in_microbatches(kind: str, mesh: str) -> None:
    compiled = csc.compile(begun(ADAPTERS[kind]()), mesh=mesh, example=text_batch(4), microbatches=2, cache=False)
    assert compiled.check().startswith("checked against eager PyTorch: loss to")
    assert verify(compiled).good(1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_are_refused_are_named_with_their_line(kind: str) -> None:
    config, message = REFUSED[kind]
    with pytest.raises(InputError, match=message) as refused:
        csc.compile(begun(config()), example=text_batch(4), microbatches=2, cache=False)
    assert "/peft/tuners/" in refused.value.where and "opaque" in refused.value.remedy
