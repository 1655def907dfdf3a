"""What a user of nn.Module tries on a compiled model: it does what is expected, or says what to call."""

from __future__ import annotations

import copy
import datetime
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import csc
from csc.driver.compiled import CompiledModel
from csc.driver.options import OTHERS, OTHERS_SAY, READERS
from csc.errors import InputError, ProgramError
from csc.runtime.loaded_program import load


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return x.square().mean()


BATCH = {"x": torch.ones(2, 4)}


@pytest.fixture
def compiled() -> CompiledModel:
    made: CompiledModel = csc.compile(Net(), example=BATCH, check=False)
    return made


def test_a_call_says_what_a_step_is(compiled: CompiledModel) -> None:
    with pytest.raises(
        InputError, match=r"is not called.*compiled\.train_step\(batch\).*compiled\.gather\(\)\(\*\*batch\)"
    ):
        compiled(**BATCH)
    assert float(compiled.gather()(**BATCH)) > 0


@pytest.mark.parametrize(("name", "said"), [
    ("generate", r"compiled\.gather\(\)\.generate"), ("cuda", "before csc.compile"), ("to", "before csc.compile"),
    ("save_pretrained", r"compiled\.save\(directory\)"), ("forward", "train_step"), ("modules", r"compiled\.model"),
    ("load_state_dict", r"compiled\.load\(directory\).*compiled\.model\.load_state_dict"),
    ("buffers", r"its eager model has: compiled\.model\.buffers"),
    ("type", "before csc.compile"), ("no_sync", "adds to the gradients"), ("step", "the optimizer steps"),
    ("gradient_checkpointing_enable", "recompute="),
    ("trian_step", "did you mean 'train_step'"), ("nothing_like_it", "has no 'nothing_like_it'$"),
])  # fmt: skip
def test_what_is_not_there_says_what_is(compiled: CompiledModel, name: str, said: str) -> None:
    assert not hasattr(compiled, name)
    with pytest.raises(AttributeError, match=said):
        getattr(compiled, name)


def test_modes(compiled: CompiledModel) -> None:
    compiled.train_step(BATCH)
    assert compiled.training
    with pytest.raises(AttributeError):
        compiled.training = False  # type: ignore[misc]
    assert compiled.eval() is compiled and not compiled.model.training and not compiled.training
    with pytest.raises(InputError, match=r"eval mode.*call compiled\.train\(\)"):
        compiled.train_step(BATCH)
    assert compiled.train() is compiled and compiled.model.training
    compiled.train_step(BATCH)


def test_printed(compiled: CompiledModel) -> None:
    assert str(compiled) == "CompiledModel(Net, dp=1, 1 microbatch; its modules: compiled.model)"
    many = csc.compile(Net, mesh="pp=2,dp=2", microbatches=3, freeze=["layers.0"])
    assert str(many) == "CompiledModel(Net, dp=2,pp=2, 3 microbatches, frozen: layers.0; its modules: compiled.model)"


def test_copies_say_what_to_copy(compiled: CompiledModel, tmp_path: Path) -> None:
    for copying in (copy.deepcopy, pickle.dumps, torch.optim.swa_utils.AveragedModel, _saved_to(tmp_path / "whole.pt")):
        with pytest.raises(TypeError, match=r"copy\.deepcopy\(compiled\.gather\(\)\).*compiled\.save\(directory\)"):
            copying(compiled)
    compiled.train_step(BATCH)
    assert isinstance(copy.deepcopy(compiled.gather()), Net)


def _saved_to(path: Path) -> Any:
    return lambda compiled: torch.save(compiled, path)


def test_the_state_is_that_of_the_module() -> None:
    """With what the loss does not depend on, and buffers, in one process."""

    class Odd(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(4))

    compiled = csc.compile(Odd(), mesh="pp=2", example=BATCH, check=False)
    compiled.train_step(BATCH)
    torch.optim.SGD(compiled.parameters(), lr=0.1).step()
    state = compiled.state_dict()
    assert list(state) == list(compiled.model.state_dict())
    Odd().load_state_dict(state)
    assert all(torch.equal(state[name], one) for name, one in compiled.model.state_dict().items())


def test_no_model_is_compiled_twice(compiled: CompiledModel) -> None:
    with pytest.raises(InputError, match=r"compiled already.*with_options.*compiled\.model"):
        csc.compile(compiled, example=BATCH)
    with pytest.raises(InputError, match=r"the model is 'gpt2'.*pass an nn\.Module"):
        csc.compile("gpt2", example=BATCH)


@pytest.mark.parametrize(("options", "said"), [
    ({"timeout": "10"}, "timeout is '10'"), ({"timeout": 0}, "timeout is 0.*seconds above 0"),
    ({"timeout": datetime.timedelta(seconds=3)}, r"timeout is datetime.timedelta\(seconds=3\)"),
    ({"cache": "/tmp/x"}, "cache is '/tmp/x'.*CSC_CACHE_DIR"), ({"freeze": True}, "freeze is True.*pass a list"),
    ({"freeze": [Net()]}, "freeze holds a Net, which is no name.*csc explain"), ({"stages": 2}, "stages is 2"),
    ({"placement": 1}, "placement is 1"), ({"recompute": True}, "recompute is True.*selective, elementwise, full"),
    ({"dtype": torch.bfloat16}, "no option dtype.*Use precision='bf16'"),
    ({"num_microbatches": 4}, "Use microbatches=.*timeout"), ({"output": "build"}, "Use directory="),
])  # fmt: skip
def test_values_that_no_option_has(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        csc.compile(Net(), example=BATCH, **options)


def test_numbers_that_no_step_has(compiled: CompiledModel) -> None:
    for wrong in (0, -1, "2", 2.0, True):
        for step in (compiled.train_step, compiled.eval_step, compiled.compile_for):
            with pytest.raises(InputError, match=f"microbatches is {wrong!r}"):
                step(BATCH, microbatches=wrong)
    compiled.train_step(BATCH)
    before = [parameter.grad.clone() for parameter in compiled.parameters()]
    for wrong in (-1.0, float("nan")):
        with pytest.raises(InputError, match="max_norm is"):
            compiled.clip_grad_norm_(wrong)
    assert all(map(torch.equal, before, (parameter.grad for parameter in compiled.parameters())))


def test_an_option_that_is_misspelt_is_guessed(compiled: CompiledModel) -> None:
    for call in (lambda **given: csc.compile(Net(), **given), compiled.with_options):
        with pytest.raises(InputError, match=r"there is no option microbatch.*did you mean microbatches"):
            call(microbatch=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"bf16": True}, r"there is no option bf16\. Use precision='bf16'"),
        ({"fp16": True}, "Use precision='bf16'.*there is no fp16"),
        ({"mixed_precision": "bf16"}, "Use precision='bf16'"),
        ({"gradient_accumulation_steps": 4}, "Use microbatches="),
        ({"num_microbatches": 4}, "Use microbatches="),
        ({"device_map": "auto"}, r"no option device_map\. Put the model on its device before"),
        ({"fsdp": "full_shard"}, r"Use mesh='dp=2,pp=2', and zero=1"),
        ({"tp": 2}, r"Use mesh=csc\.Mesh"),
        ({"loss_fn": None}, "The model's forward returns the loss"),
        ({"gradient_checkpointing": True}, "Use recompute="),
        ({"bf16": True, "microbatch": 2}, "bf16: Use precision='bf16'.*microbatch: did you mean microbatches"),
        ({"nothing_like_it": 1}, "there is no option nothing_like_it. Options are mesh, freeze"),
    ],
)  # fmt: skip
def test_an_option_of_another_library_is_translated(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        csc.compile(Net(), example=BATCH, **options)


def test_what_is_said_of_another_librarys_option_is_an_option_of_csc() -> None:
    """Each name stands once, is none of csc's own, and what it is translated to exists."""
    names = [name for row in OTHERS_SAY for name in row.split()]
    assert len(names) == len(set(names)) and not {*READERS, *OTHERS} & set(names)
    for said in OTHERS_SAY.values():
        named = set(re.findall(r"(\w+)=", said)) - {"dp", "pp", "mode", "lr"}  # within an option's value, or torch's
        assert (named or said.startswith("none: ")) and named <= {*READERS, *OTHERS}


def test_a_model_in_torch_compile_is_refused() -> None:
    with pytest.raises(InputError, match=r"is in torch\.compile already.*pass the model itself"):
        csc.compile(torch.compile(Net()), example=BATCH)


def test_a_model_in_other_hands_is_refused() -> None:
    for wrapped, said in (
        (nn.DataParallel(Net()), r"is in DataParallel already.*model\.module"),
        (torch.jit.script(Net()), "TorchScript already"),
    ):
        with pytest.raises(InputError, match=said):
            csc.compile(wrapped, example=BATCH)


def test_a_model_whose_parameters_are_divided_is_refused(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = Net()
        fully_shard(model, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.raises(InputError, match=r"'layers\.0\.weight' is a DTensor.*zero="):
            csc.compile(model, example=BATCH)
        with pytest.raises(InputError, match="is in DistributedDataParallel already"):
            csc.compile(nn.parallel.DistributedDataParallel(Net()), example=BATCH)
    finally:
        dist.destroy_process_group()


def test_a_loss_that_depends_on_nothing() -> None:
    """Eager PyTorch's backward raises, so a step does."""

    class Detached(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).detach()

    compiled = csc.compile(Detached(), example=BATCH, mesh="pp=2")
    with pytest.raises(InputError, match=r"depends on no parameter that trains.*detach"):
        compiled.train_step(BATCH)
    assert float(compiled.eval_step(BATCH)) > 0


def test_saving_where_a_file_is(compiled: CompiledModel, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here first")
    compiled.train_step(BATCH)
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(InputError, match="a file is where a directory is to be made"):
            compiled.save(place)
    assert (tmp_path / "file").read_text() == "here first"


def test_no_program_says_how_one_is_made(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match="csc compile TARGET -o DIR"):
        load(tmp_path / "nothing")
