"""Adapters on quantised bases train as in eager PyTorch: the weight stays packed, and gets no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import csc
from csc.analysis.costs import call_flops, made_dense, peak, variant_cost
from csc.capture.quantised_weights import weights_of
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from tests.compiler.peft_models import adapted, llama, text_batch
from tests.compiler.quantised_models import KINDS, Words, eager, gradients, library, quantise, words

FEW = ("nf4 nested", "int8", "torchao int8")


def mostly_long(kinds: Sequence[str], *short: str) -> list[Any]:
    """Parameters of a test, of which `make test` has the short ones."""
    return [kind if kind in short else pytest.param(kind, marks=pytest.mark.long) for kind in kinds]


def same(model: nn.Module, batch: dict[str, torch.Tensor], exact: bool = True, **options: Any) -> Any:
    """The compiled model, whose step had eager's loss and gradients under eager's names."""
    loss, expected = eager(model, batch)
    compiled = csc.compile(model, cache=False, **options)
    own = compiled.train_step(batch)
    found = gradients(model)
    assert found.keys() == expected.keys()
    tolerance: dict[str, float] = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(own, loss.cpu(), **tolerance)
    torch.testing.assert_close(found, expected, **tolerance)
    return compiled


@pytest.mark.parametrize("kind", mostly_long(KINDS, "nf4", "int8", "torchao int8"))
def test_the_gradients_of_eager(kind: str) -> None:
    same(Words(kind), words())


@pytest.mark.parametrize("kind", mostly_long(FEW, "nf4 nested"))
def test_stages(kind: str) -> None:
    same(Words(kind), words(), exact=False, mesh=csc.Mesh(pp=2), microbatches=2)


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.long), {"zero": 3}], ids=["whole", "zero 3"])
def test_replicas(options: dict[str, Any]) -> None:
    same(Words("nf4 nested"), words(), exact=False, mesh=csc.Mesh(dp=2), **options)


def test_the_weight_is_made_dense_again_and_not_kept() -> None:
    """Equal layers are one template; of a weight nothing is saved, and its bytes are those that it has."""
    model = Words("nf4")
    program = same(model, words()).program
    layers = [region for region in program.regions if region.kind == "layer"]
    assert len(layers) == 3 and len({region.template for region in layers}) == 1
    weight = next(p for p in program.parameters if p.name == "layers.0.outer.weight")
    assert (weight.dtype, weight.numel, weight.trainable) == (torch.uint8, 32 * 64 // 2, False)
    for variant in program.variants.values():
        assert not any(node.meta["val"].shape == (32, 64) for node in variant.forward.output_node().all_input_nodes)
    names = {p.name for p in program.parameters}
    assert "layers.0.outer.weight_absmax" in names and names == weights_of(model).keys()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int8"])
def test_a_bias(kind: str) -> None:
    """It is added in the product; it trains where the library has a gradient of it, which bitsandbytes has for rows
    alone.
    """
    model = Words(kind, bias=True)
    if kind.startswith("torchao"):
        model.layers[0].outer.bias.requires_grad_(True)
    same(model, words(), exact=False)


DTYPES: list[dict[str, Any]] = [
    {"dtype": torch.bfloat16},
    {"compute_dtype": torch.bfloat16},
    {"compute_dtype": torch.float16},
    {"compute_dtype": None},
    {"blocksize": 4096},
]


@pytest.mark.long
@pytest.mark.parametrize("options", DTYPES, ids=str)
def test_dtypes_and_blocks(options: dict[str, Any]) -> None:
    same(Words("nf4", **options), words())


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "int8", "torchao int4"])
def test_autocast(kind: str) -> None:
    """Products are bfloat16 there, as eager's are, and not exacter than these."""
    model = Words(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**words())
    loss.backward()
    expected = gradients(model)

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return self.model(ids, labels)

    own = csc.compile(Cast(), cache=False).train_step(words())
    torch.testing.assert_close(own, loss.detach(), rtol=2e-3, atol=0)
    for name, found in gradients(model).items():
        assert (found - expected[name]).norm() <= 0.02 * expected[name].norm(), name


@pytest.mark.long
def test_dispatch_of_tokens_is_priced_by_what_is_computed() -> None:
    """Not by bytes, for which no profile has a rate."""
    model = adapted(quantise(llama(), "nf4", lambda path: "lm_head" not in path))
    same(model, text_batch(), exact=False, mesh=csc.Mesh(cp=2))


@pytest.mark.parametrize("kind", ["nf4 nested"])
def test_a_program_on_disk_has_the_weights_in_their_parts(kind: str, tmp_path: Path) -> None:
    model = Words(kind)
    loss, expected = eager(model, words())
    csc.compile(model, cache=False, example=words(), check=False).write(tmp_path / "program", with_weights=True)
    program = load(tmp_path / "program")
    trainer = Trainer(program, None, InProcess(program))
    torch.testing.assert_close(trainer.train_step(words()), loss, rtol=0, atol=0)
    torch.testing.assert_close({n: p.grad for n, p in trainer.named_parameters()}, expected, rtol=0, atol=0)


def test_equal_weights_and_hooks_and_a_forward_packed_for_inference() -> None:
    """One layer in two places; a hook on a quantised layer; and a forward in eval mode, which may pack weights anew."""
    model = Words("nf4 nested", width=64)
    model.layers[2].outer = model.layers[0].outer
    model.layers[1].outer.register_forward_hook(lambda module, given, result: 2 * result)
    compiled = same(model, words(), exact=False)
    with torch.no_grad():
        model.eval()(**words())
    model.train()
    if getattr(model.layers[0].outer.weight.quant_state, "packing_format_for_cpu", False):
        with pytest.raises(csc.CscError, match="has packed it for inference"):
            compiled.train_step(words())
    model.state_dict()
    loss, expected = eager(model, words())
    torch.testing.assert_close(compiled.train_step(words()), loss)
    torch.testing.assert_close(gradients(model), expected)


@pytest.mark.long
def test_odd_sizes() -> None:
    """A width that no block divides, and of which two weights are no byte of one row."""
    same(Words("nf4", width=33), words())


@pytest.mark.long
def test_bfloat16_keeps_the_scales() -> None:
    """With precision="bf16" numbers of a quantised weight are what they were."""
    model = Words("torchao int8")
    compiled = csc.compile(model, cache=False, precision="bf16")
    own = compiled.train_step(words())
    torch.testing.assert_close(own, model(**words()).detach(), rtol=2e-2, atol=0)


@pytest.mark.parametrize("kind", mostly_long(FEW, "int8"))
def test_weights_that_change_after_compiling(kind: str) -> None:
    """Written to, put elsewhere, quantised anew: the next step is the model's as it is then."""
    model = Words(kind)
    compiled = same(model, words())
    other = Words(kind)
    torch.manual_seed(5)
    for mine, its in zip(model.layers, other.layers, strict=True):
        fresh = nn.Linear(64, 32, bias=False)
        its.outer = quantise(nn.Sequential(fresh), kind)[0]
        if kind == "nf4 nested":
            mine.outer.weight.data = its.outer.weight.data
            mine.outer.weight.quant_state = mine.outer.quant_state = its.outer.weight.quant_state
        elif kind == "int8":
            its.outer(torch.ones(1, 64))  # bitsandbytes loads none into a layer that has run
            mine.outer.state.CB.copy_(its.outer.state.CB)
            mine.outer.state.SCB = its.outer.state.SCB
        else:
            mine.outer.load_state_dict(its.outer.state_dict())
    loss, expected = eager(model, words())
    torch.testing.assert_close(compiled.train_step(words()), loss, rtol=0, atol=0)
    torch.testing.assert_close(gradients(model), expected, rtol=0, atol=0)


@pytest.mark.long
def test_steps_learn_and_adapters_are_all_that_changes() -> None:
    model = Words("nf4")
    before = {name: tensor.clone() for name, tensor in weights_of(model).items() if not tensor.requires_grad}
    compiled = csc.compile(model, cache=False, example=words())
    optimizer = compiled.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for _ in range(5):
        losses.append(float(compiled.train_step(words())))
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0]
    assert all(torch.equal(before[name], tensor) for name, tensor in weights_of(model).items() if name in before)


def test_tensor_parallel_ranks_have_it_whole() -> None:
    """Its blocks are not divided, and a note says so; what else there is to divide is."""
    compiled = same(Words("nf4 nested"), words(), exact=False, mesh=csc.Mesh(tp=2))
    weight = next(p for p in compiled.program.parameters if p.name == "layers.0.outer.weight")
    assert not weight.boxes
    assert any("on each tp rank whole" in note and "quantised_linear" in note for note in compiled.program.notes)


def test_memory_has_the_bytes_of_the_packed_weight_and_one_dense_one() -> None:
    program = same(Words("nf4"), words()).program
    region = next(one for one in program.regions if one.kind == "layer")
    variant = program.variants[region.variant]
    packed, scales = 2 * (32 * 64 // 2), 2 * 4 * (32 * 64 // 64)
    norm, adapters = 4 * 2 * 32, 4 * 2 * (32 + 64)
    assert variant_cost(variant).parameters == packed + scales + norm + adapters
    (call, *_) = [node for node in variant.forward.nodes if "quantised_linear" in str(node.target)]
    assert made_dense(call) == 4 * 32 * 64 and call_flops(call) == 2 * 24 * 32 * 64
    assert peak(variant.forward) >= made_dense(call)


def test_files_of_the_base_are_its_librarys() -> None:
    compiled = csc.compile(Words("nf4"), cache=False, example=words(), check=False)
    with pytest.raises(csc.CscError, match=r"is quantised, and csc does not write or read.*save_adapter"):
        compiled.save("nowhere")


class Refused:
    """Models with a quantised weight that csc does not take, and what it says of each."""

    @staticmethod
    def unquantised() -> nn.Module:
        model = Words("nf4")
        bnb = library("nf4")
        model.layers[1].outer = bnb.nn.Linear4bit(64, 32, bias=False)
        return model

    @staticmethod
    def embedding() -> nn.Module:
        model = Words("nf4")
        model.table = library("nf4").nn.Embedding4bit(20, 64, quant_type="nf4").to("cpu")
        return model

    @staticmethod
    def floating() -> nn.Module:
        model = Words("int8")
        model.layers[1].outer = library("int8").nn.Linear8bitLt(64, 32, bias=False)
        model.layers[1].outer.weight.requires_grad_(False)
        return model

    @staticmethod
    def packed() -> nn.Module:
        model = Words("nf4")
        model.layers[1].outer.weight.quant_state.packing_format_for_cpu = True
        return model

    @staticmethod
    def trains() -> nn.Module:
        model = Words("torchao int8")
        model.layers[1].outer.weight.requires_grad_(True)
        return model

    @staticmethod
    def rounded() -> nn.Module:
        model = Words("torchao int8")
        from torchao import quantization as q

        fresh = nn.Linear(64, 32, bias=False)
        q.quantize_(fresh, q.Int8DynamicActivationInt8WeightConfig())
        model.layers[1].outer = fresh
        return model


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("unquantised", r"layers.1.outer.weight.*not quantised yet.*model.to\(device\)"),
        ("embedding", "table.weight.*Embedding4bit.*llm_int8_skip_modules"),
        ("floating", "layers.1.outer.weight.*has_fp16_weights=False"),
        ("packed", r"layers.1.outer.weight.*inference.*state_dict\(\)"),
        ("trains", r"layers.1.outer.weight.*requires_grad_\(False\)"),
        ("rounded", "layers.1.outer.weight.*act_quant_kwargs.*Int8WeightOnlyConfig"),
    ],
)
def test_refused_by_a_sentence(case: str, said: str) -> None:
    model = getattr(Refused, case)()
    with pytest.raises(csc.CscError, match=said):
        csc.compile(model, cache=False).train_step(words())
