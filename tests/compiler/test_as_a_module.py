"""What a user of nn.Module tries on a compiled model: it does what is expected, or says what to call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import csc
from csc.driver.compiled import CompiledModel
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
    ("trian_step", "did you mean 'train_step'"), ("nothing_like_it", "has no 'nothing_like_it'$"),
])  # fmt: skip
def test_what_is_not_there_says_what_is(compiled: CompiledModel, name: str, said: str) -> None:
    assert not hasattr(compiled, name)
    with pytest.raises(AttributeError, match=said):
        getattr(compiled, name)


def test_modes(compiled: CompiledModel) -> None:
    compiled.train_step(BATCH)
    assert compiled.eval() is compiled and not compiled.model.training
    with pytest.raises(InputError, match=r"eval mode.*call compiled\.train\(\)"):
        compiled.train_step(BATCH)
    assert compiled.train() is compiled and compiled.model.training
    compiled.train_step(BATCH)


def test_an_option_that_is_misspelt_is_guessed(compiled: CompiledModel) -> None:
    for call in (lambda **given: csc.compile(Net(), **given), compiled.with_options):
        with pytest.raises(InputError, match=r"there is no option microbatch.*did you mean microbatches"):
            call(microbatch=2)


def test_a_model_in_torch_compile_is_refused() -> None:
    with pytest.raises(InputError, match=r"is in torch\.compile already.*pass the model itself"):
        csc.compile(torch.compile(Net()), example=BATCH)


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
