"""Weights from and to the directories of `save_pretrained`, whole and in shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

import csc
from benchmarks.coverage.models import qwen2_5_vl
from csc.driver.checkpoint import format_of
from csc.errors import InputError
from csc.runtime import weights
from csc.runtime.specs import ParameterSpec
from tests import launching
from tests.compiler import weights_worker
from tests.compiler.peft_models import llama, text_batch
from tests.models import hf

pytestmark = pytest.mark.usefixtures("traces")


def randomised(model: nn.Module, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], dict[str, torch.Tensor]]] = {
    "llava": (hf.llava, hf.llava_batch(2)),
    "llama, tied": (lambda: llama(tied=True), text_batch(2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.long_cases("llama, tied")
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """save_pretrained, in shards -> compiled.load -> compiled.save -> from_pretrained."""
    make, batch = MODELS[name]
    source = randomised(make(), 1)
    source.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    compiled = csc.compile(make(), mesh="pp=2", example=batch)
    compiled.load(tmp_path / "hf")
    assert_same(tensors(compiled.model), tensors(source))
    compiled.save(tmp_path / "csc")
    assert_same(tensors(type(source).from_pretrained(tmp_path / "csc")), tensors(source))
    for file in ("config.json", "generation_config.json"):  # the same but for what csc never saw
        assert json.loads((tmp_path / "csc" / file).read_text()) == json.loads((tmp_path / "hf" / file).read_text())
    with safe_open(tmp_path / "csc/model.safetensors", "pt") as written:
        index = json.loads((tmp_path / "hf" / weights.INDEX).read_text())
        assert set(written.keys()) == set(index["weight_map"]), "the names of HF's checkpoints"


def specs(model: nn.Module, part: str = "") -> list[ParameterSpec]:
    return [
        ParameterSpec(name, tuple(p.shape), p.dtype, True, (0,), (0,))
        for name, p in model.named_parameters()
        if part in name
    ]


def read_back(model: PreTrainedModel, directory: Path, shard: str = "20KB") -> None:
    """Every parameter, from a sharded checkpoint as HF writes it."""
    model.save_pretrained(directory, max_shard_size=shard)
    found = weights.read(directory, specs(model), "cpu", format_of(model, dict(model.named_parameters())))
    assert_same(found, {name: p.detach() for name, p in model.named_parameters()})


def test_qwen_vl(tmp_path: Path) -> None:
    """Its patches are a linear layer, and a convolution in the checkpoint."""
    read_back(randomised(qwen2_5_vl()[0], 2), tmp_path)


def test_experts_are_joined(tmp_path: Path) -> None:
    """One tensor per expert in the checkpoint, one for all in the model: neither names nor shapes agree."""
    from transformers import MixtralConfig, MixtralForCausalLM

    model = MixtralForCausalLM(
        MixtralConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
            num_local_experts=3, vocab_size=50,
        )
    )  # fmt: skip
    read_back(randomised(model, 3), tmp_path)
    assert ".experts.2." in (tmp_path / weights.INDEX).read_text()
    assert not any(".experts.2." in name for name, _ in model.named_parameters())


def test_a_rank_reads_its_own_shards_alone(tmp_path: Path) -> None:
    """The shards of other layers may be missing on this machine."""
    model = llama()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    index = json.loads((tmp_path / weights.INDEX).read_text())["weight_map"]
    own = {file for key, file in index.items() if "layers.1." in key}
    for file in set(index.values()) - own:
        (tmp_path / file).unlink()
    form = format_of(model, dict(model.named_parameters()))
    found = weights.read(tmp_path, specs(model, "layers.1."), "cpu", form)
    assert_same(found, {n: p.detach() for n, p in model.named_parameters() if "layers.1." in n})
    with pytest.raises(InputError, match="there is no such file"):
        weights.read(tmp_path, specs(model, "layers.0."), "cpu", form)


def test_another_models_checkpoint(tmp_path: Path) -> None:
    hf.llava().save_pretrained(tmp_path)
    model = llama()
    form = format_of(model, dict(model.named_parameters()))
    with pytest.raises(InputError, match=r"parameter 'model\.embed_tokens\.weight' is not in it\. Close names there"):
        weights.read(tmp_path, specs(model), "cpu", form)


@pytest.mark.gloo
def test_two_processes(tmp_path: Path) -> None:
    """Each reads and writes its part; the tied embedding is on both."""
    source = randomised(llama(tied=True), 1)
    source.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    launching.ranks(weights_worker.checkpoint, 2, tmp_path)
    index = json.loads((tmp_path / "csc" / weights.INDEX).read_text())
    assert len(set(index["weight_map"].values())) == 2
    assert_same(tensors(type(source).from_pretrained(tmp_path / "csc")), tensors(source))
