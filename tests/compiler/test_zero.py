"""Parameters whose optimizer's state data-parallel ranks divide: what trains is what trains without."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import csc
from csc.ir.groups import Group
from csc.runtime import gradients
from csc.runtime.gradients import seen, shard_of
from csc.runtime.specs import ParameterSpec, cut
from tests import launching
from tests.compiler import zero_worker
from tests.compiler.zero_models import BATCHES
from tests.compiler.zero_worker import adamw, compiled_of, steps
from tests.exactness import FLOAT32
from tests.tiers import long

pytestmark = pytest.mark.usefixtures("traces")

MOVED = 5e-6  # AdamW makes whole steps of small gradients, whose rounding shows

OFTEN = [
    {"model": "odd", "mesh": "dp=4", "samples": 8, "microbatches": 2, "zero": 1},
    {"model": "captions", "mesh": "dp=2", "samples": 4, "microbatches": 1, "zero": 3},
]
PROJECTOR = ["vision_tower", "language_model", "lm_head"]  # what is frozen for it alone to train
LONG = [
    {"model": "llama", "mesh": "dp=2,pp=2", "samples": 8, "microbatches": 2, "zero": 3, "recompute": "full"},
    {"model": "llama", "mesh": "dp=2,pp=2", "samples": 8, "microbatches": 2, "zero": 2},
    {"model": "qwen3", "mesh": "dp=2,tp=2", "samples": 4, "microbatches": 1, "zero": 3},
    {"model": "lora", "mesh": "dp=3", "samples": 6, "microbatches": 2, "zero": 3},
    {"model": "llava", "mesh": "dp=2,cp=2", "samples": 4, "microbatches": 1, "zero": 3, "freeze": ["vision_tower"]},
    {"model": "llama", "mesh": "dp=2,cp=2,tp=2", "samples": 4, "microbatches": 1, "zero": 1},
    {"model": "captions", "mesh": "dp=2", "samples": 4, "microbatches": 1, "zero": 2},
    {"model": "qwen3", "mesh": "dp=2,tp=2", "samples": 4, "microbatches": 1, "zero": 2},
    {"model": "llava", "mesh": "dp=2,cp=2", "samples": 4, "microbatches": 1, "zero": 2, "freeze": ["vision_tower"]},
    {"model": "qwen3", "mesh": "cp=2,tp=2", "samples": 4, "microbatches": 1, "zero": 3},
    {"model": "llava_tied", "mesh": "dp=2,pp=2", "samples": 4, "microbatches": 1, "zero": 3, "clip": None},
]
SELDOM = [
    {"model": "odd", "mesh": "dp=4", "samples": 8, "microbatches": 2, "zero": 3},
    {"model": "llava", "mesh": "dp=2,pp=2", "samples": 8, "microbatches": 2, "zero": 3, "freeze": PROJECTOR},
]


@torch.no_grad()
def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def named(case: dict[str, Any]) -> str:
    return f"{case['model']}-{case['mesh']}-{case['zero']}"


@pytest.mark.gloo
@pytest.mark.parametrize(
    "case", [*OFTEN, *(pytest.param(case, marks=pytest.mark.slow) for case in SELDOM), *map(long, LONG)], ids=named
)
@pytest.mark.long_cases("captions-dp=2-3", "llava-dp=2,pp=2-3")
def test_processes_step_their_shards_alone(case: dict[str, Any], tmp_path: Path) -> None:
    """Losses, norms and parameters after three steps are those of one process in which nothing is divided."""
    mesh = csc.Mesh.of(case["mesh"])
    launching.ranks(zero_worker.main, mesh.size, case, tmp_path)
    together = compiled_of(case, zero=0)
    batch, optimizer = BATCHES[case["model"]](case["samples"]), adamw(together)
    expected = steps(together, batch, optimizer, case.get("clip", 0.5))
    trained = {name: p.detach().clone() for name, p in together.model.named_parameters()}
    everything = together.trainer().program.manifest.parameters
    specs = {spec.name: spec for spec in everything if spec.trainable}
    later = steps(together, batch, optimizer)["losses"]
    for rank in range(mesh.size):
        result = json.loads((tmp_path / f"result_{rank}.json").read_text())
        assert result["losses"] == pytest.approx(expected["losses"], rel=FLOAT32)
        assert result["norms"] == pytest.approx(expected["norms"], rel=FLOAT32)
        assert result["later"] == result["again"] == pytest.approx(later, rel=FLOAT32), (
            "what is loaded is what was saved"
        )
        assert result["evaluated"] == pytest.approx(later[0], rel=1e-5)
        group, state = mesh.group(Group.DATA, rank), 0
        own = load_file(tmp_path / f"own_{rank}.safetensors")
        held = {name for name, spec in specs.items() if mesh.coordinates(rank).pp in spec.ranks}
        assert own.keys() == held
        if own:  # a rank of frozen layers steps nothing
            check_refusals(result["refused"])
        for name, tensor in own.items():
            there = cut(trained[name], specs[name].boxes[mesh.shard(rank)]) if specs[name].boxes else trained[name]
            if there.dim():
                there = seen(there, shard_of(there.shape, len(group), group.index(rank)))
            assert tensor.shape == there.shape, name
            assert apart(tensor, there) <= MOVED, name
            state += 2 * there.numel() if name != "never" and there.dim() else 0
        assert result["state"] == state, "two moments of each entry that the rank steps"
        whole = load_file(tmp_path / f"whole_{rank}.safetensors")
        assert whole.keys() == trained.keys()
        for name, tensor in whole.items():
            assert apart(tensor, trained[name]) <= MOVED, name
        if case["zero"] == 3:
            own_shards = sum(numel(spec, mesh, rank) for spec in everything if mesh.coordinates(rank).pp in spec.ranks)
            assert result["held"] == own_shards, "frozen ones too, and nothing else"


def numel(spec: ParameterSpec, mesh: csc.Mesh, rank: int) -> int:
    """Entries of what a rank holds of a parameter."""
    group = mesh.group(Group.DATA, rank)
    whole = torch.empty(spec.local.shape)
    return seen(whole, shard_of(whole.shape, len(group), group.index(rank))).numel() if whole.dim() else 1


def check_refusals(said: list[str]) -> None:
    entrywise, whole, unproven, after = said
    assert "Adafactor steps a shard of a parameter in another way than the whole" in entrywise
    assert "was given a parameter of shape" in whole and "compiled.named_parameters()" in whole
    for one in (unproven, after):
        assert "was written to by something that is not known to work entry by entry" in one


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [2, long(3)])
def test_without_clipping_every_bit_is_that_of_whole_parameters(zero: int, tmp_path: Path) -> None:
    case = {"model": "llama", "mesh": "dp=2", "samples": 4, "microbatches": 1, "zero": zero, "clip": None}
    launching.ranks(zero_worker.main, 2, case, tmp_path)
    together = compiled_of(case, zero=0)
    expected = steps(together, BATCHES["llama"](4), adamw(together), None)
    trained = dict(together.model.named_parameters())
    for rank in range(2):
        assert json.loads((tmp_path / f"result_{rank}.json").read_text())["losses"] == expected["losses"]
        for name, tensor in load_file(tmp_path / f"whole_{rank}.safetensors").items():
            assert torch.equal(tensor, trained[name]), name


@pytest.mark.gloo
def test_shards_are_read_by_processes_that_have_no_whole_model(tmp_path: Path) -> None:
    """On the meta device; of files that differ in an entry that the other rank alone takes it is said."""
    case = {"model": "llama", "mesh": "dp=2", "samples": 4, "microbatches": 1, "zero": 3}
    together = compiled_of(case, zero=0)
    for name in ("right", "wrong"):
        together.save(tmp_path / name)
        with torch.no_grad():
            together.model.get_parameter("model.layers.0.mlp.up_proj.weight")[-1, -1] += 1
    launching.ranks(zero_worker.from_files, 2, case, tmp_path)
    loss = float(compiled_of(case, zero=0).train_step(BATCHES["llama"](4)))
    for rank in range(2):
        result = json.loads((tmp_path / f"read_{rank}.json").read_text())
        assert (
            "'model.layers.0.mlp.up_proj.weight' starts with other values on rank 1 than on rank 0" in result["refused"]
        )
        assert "parameters of LlamaForCausalLM have no values yet" in result["empty"]
        assert result["losses"][0] == pytest.approx(loss, rel=FLOAT32)
        assert result["losses"][2] < result["losses"][0]
    one = compiled_of(case, zero=0)
    one.load(tmp_path / "saved")
    assert float(one.train_step(BATCHES["llama"](4))) == pytest.approx(result["later"], rel=FLOAT32)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "others", [(("dp=2,pp=2", 3),), long((("dp=2,pp=2", 2), ("pp=2", 0), ("dp=4", 3)))], ids=["one mesh", "several"]
)
def test_a_state_is_for_every_mesh(others: Sequence[tuple[str, int]], tmp_path: Path) -> None:
    """Saved at dp=2,tp=2; gone on with on other meshes, at other levels, and in one process: the same losses."""
    case = {"model": "llama", "mesh": "dp=2,tp=2", "samples": 4, "microbatches": 1, "zero": 1}
    launching.ranks(zero_worker.main, 4, case, tmp_path)
    later = json.loads((tmp_path / "result_0.json").read_text())["later"]
    one = compiled_of(case, mesh="dp=1", zero=0)
    optimizer = adamw(one)
    one.load(tmp_path / "weights", optimizer=optimizer)
    assert steps(one, BATCHES["llama"](4), optimizer)["losses"] == pytest.approx(later, rel=FLOAT32)
    one.load(tmp_path / "weights", optimizer=optimizer)
    one.save(tmp_path / "weights", optimizer=optimizer)
    for mesh, zero in others:
        other = {**case, "mesh": mesh, "zero": zero}
        launching.ranks(zero_worker.resume, csc.Mesh.of(mesh).size, other, tmp_path)
        assert json.loads((tmp_path / "resumed_1.json").read_text()) == pytest.approx(later, rel=FLOAT32), mesh


@pytest.mark.gloo
@pytest.mark.parametrize("zero", [long(2), 3])
def test_phases_failures_and_accumulation(zero: int, tmp_path: Path) -> None:
    launching.ranks(zero_worker.phases, 2, zero, tmp_path)
    assert (tmp_path / "done_0").exists() and (tmp_path / "done_1").exists()


def test_what_is_damaged_is_a_sentence(tmp_path: Path) -> None:
    case = {"model": "odd", "mesh": "dp=1", "samples": 8, "microbatches": 1, "zero": 0}
    compiled, batch = compiled_of(case), BATCHES["odd"](8)
    optimizer = adamw(compiled)
    steps(compiled, batch, optimizer, count=1)
    compiled.save(tmp_path, optimizer=optimizer)
    index, (file,) = tmp_path / "optimizer.index.json", tmp_path.glob("optimizer-*.safetensors")
    text, content = index.read_text(), file.read_bytes()

    def refused(what: str, over: torch.optim.Optimizer = optimizer) -> None:
        with pytest.raises(csc.InputError, match=what):
            compiled.load(tmp_path, optimizer=over)

    refused("is the state of AdamW, and this is Adam", compiled.optimizer(torch.optim.Adam))
    refused("has 2 groups of parameters, and the optimizer has 1", compiled.optimizer(torch.optim.AdamW))
    turned = list(reversed(optimizer.param_groups))
    turned = [{"params": group["params"], "weight_decay": 0.0} for group in turned]
    refused("is in group 1 there, and in group 0 here", compiled.optimizer(torch.optim.AdamW, turned))
    for damaged in (
        text[:-9], text.replace('"groups"', '"gruops"'), text.replace('"box"', '"bix"'),
        text.replace('"shape"', '"shop"'), text.replace('"format": 1', '"format": 9'), "[]", "{}",
        text.replace(file.name, "../" + file.name), text.replace(file.name, "nowhere.safetensors"),
    ):  # fmt: skip
        assert damaged != text
        index.write_text(damaged)
        refused(".")
    listed = json.loads(text)
    listed["parameters"]["embed.weight"]["tensors"]["exp_avg"] = []
    index.write_text(json.dumps(listed))
    refused("'exp_avg' of 'embed.weight' is not all there")
    index.write_text(text)
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    refused("its bytes have changed")
    file.write_bytes(content)
    compiled.load(tmp_path, optimizer=optimizer)
    compiled.save(tmp_path)  # the same weights: the state belongs to them
    compiled.load(tmp_path, optimizer=optimizer)
    steps(compiled, batch, optimizer, count=1)
    compiled.save(tmp_path)
    refused("the weights beside it are of another save")


def test_plans_count_what_a_rank_holds() -> None:
    found = []
    for zero in (0, 1, 2, 3):
        case = {"model": "odd", "mesh": "dp=4", "samples": 8, "microbatches": 1, "zero": zero}
        program = compiled_of(case).program
        numbers = sum(p.numel for p in program.parameters if p.name != "never")
        assert program.plan is not None
        found.append(sum(stage["state"] for stage in program.plan.pipeline["stages"]) / numbers)
    assert found == pytest.approx([16, 8 + 8 / 4, 4 + 12 / 4, 16 / 4], rel=0.02)


def test_in_one_process_nothing_is_divided() -> None:
    """All replicas train the model's own parameters, with any optimizer that would do for processes too."""
    case = {"model": "odd", "mesh": "dp=4", "samples": 8, "microbatches": 1, "zero": 1}
    compiled, plain = compiled_of(case), compiled_of(case, zero=0)
    batch = BATCHES["odd"](8)
    assert steps(compiled, batch, adamw(compiled)) == steps(plain, batch, adamw(plain))
    assert all(p is compiled.model.get_parameter(name) for name, p in compiled.named_parameters())
    with pytest.raises(csc.InputError, match="Adafactor steps a shard"):
        compiled.optimizer(torch.optim.Adafactor)
    with pytest.raises(csc.InputError, match=r"LBFGS takes no step .* closure"):
        compiled.optimizer(torch.optim.LBFGS)


@pytest.mark.parametrize("model", ["odd", long("tied")])
def test_buckets_of_gradients_leave_one_by_one(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parameter of two regions of a stage waits for both; the sum is that of whole gradients."""
    monkeypatch.setattr(gradients, "BYTES", 1024)
    found = []
    for zero in (0, 2, 3):
        compiled = compiled_of({"model": model, "mesh": "dp=4", "samples": 16, "microbatches": 4, "zero": zero})
        compiled.train_step(BATCHES[model](16))
        found.append({name: p.grad for name, p in compiled.named_parameters()})
    for divided in found[1:]:
        assert found[0].keys() == divided.keys()
        for name, gradient in found[0].items():
            assert gradient is not None
            assert apart(divided[name], gradient) <= 1e-6, name


IN_PROCESS = [
    {"model": "llama", "mesh": "dp=2,tp=2", "microbatches": 1},
    {"model": "odd", "mesh": "dp=4", "microbatches": 1, "schedule": "gpipe", "chunks": 2},
    {"model": "tied", "mesh": "dp=2,pp=2", "microbatches": 2, "precision": "bf16"},
]
LONG_IN_PROCESS = [
    {"model": "llava", "mesh": "dp=2", "microbatches": 1, "freeze": PROJECTOR},
    {"model": "captions", "mesh": "dp=2", "microbatches": 2, "chunks": 2},
    {"model": "lora", "mesh": "dp=2,pp=2", "microbatches": 1, "recompute": "full"},
]


@pytest.mark.parametrize(
    "case", [*IN_PROCESS, *map(long, LONG_IN_PROCESS)], ids=lambda case: f"{case['model']}-{case['mesh']}"
)
@pytest.mark.long_cases("tied-dp=2,pp=2", "llama-dp=2,tp=2")
def test_gathered_parameters_are_bit_for_bit_what_they_are(case: dict[str, Any]) -> None:
    """Only data moves: in one process, too, each rank computes with what it has gathered, and with nothing after FREE.
    Sums over two replicas are the same in any order; the cut of layers in stages changes no bit.
    """
    case = {"samples": 8, **case}
    found = []
    for zero in (2, 3):
        compiled = compiled_of(case, zero=zero)
        losses = steps(compiled, BATCHES[case["model"]](case["samples"]), adamw(compiled), None)["losses"]
        assert ("GATHER" in str(compiled.program.schedule)) == (zero == 3)
        found.append((losses, dict(compiled.model.named_parameters())))
    assert found[0][0] == found[1][0]
    for name, parameter in found[0][1].items():
        assert torch.equal(parameter, found[1][1][name]), name


def test_alone_a_replica_has_nothing_to_gather() -> None:
    compiled = compiled_of({"model": "odd", "mesh": "pp=2", "samples": 4, "microbatches": 1, "zero": 3})
    assert "GATHER" not in str(compiled.program.schedule)
    compiled.train_step(BATCHES["odd"](4))


def test_levels_that_do_not_exist_are_refused() -> None:
    for level in (-1, 4, True, "1"):
        with pytest.raises(csc.InputError, match=re.escape(f"zero is {level!r}")):
            csc.compile(lambda: torch.nn.Linear(2, 2), zero=level)  # type: ignore[arg-type]
