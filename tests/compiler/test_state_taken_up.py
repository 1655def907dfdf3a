"""State of optimizers, schedulers and loaders: in its own dtype, for whom it was saved, all of it or nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import csc
from csc.errors import InputError
from tests.compiler import small

pytestmark = pytest.mark.usefixtures("traces")

BATCH = small.text_batch(2)


@pytest.fixture(scope="module")
def compiled() -> csc.CompiledModel:
    return csc.compile(small.text(1), example=BATCH, check=False, cache=False)


def groups(compiled: csc.CompiledModel) -> list[dict[str, Any]]:
    """Norms decay, and the rest does not."""
    parameters = list(compiled.parameters())
    decaying = {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.1}
    return [decaying, {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.0}]


def step(compiled: csc.CompiledModel, optimizer: Any, batch: Any = BATCH) -> float:
    loss = float(compiled.train_step(batch))
    optimizer.step()
    optimizer.zero_grad()
    return loss


class WideMomentum(torch.optim.Optimizer):
    """Weights in bfloat16 with float32 ones beside them, as mixed precision has it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    wide = state.setdefault("wide", parameter.detach().float().clone())
                    parameter.copy_(wide.add_(parameter.grad.float(), alpha=-group["lr"]))


def test_state_wider_than_its_parameter(tmp_path: Path) -> None:
    """torch's load_state_dict rounds it to bfloat16."""
    batch = {name: t.bfloat16() if t.is_floating_point() else t for name, t in small.mixed_batch().items()}
    compiled = csc.compile(small.mixed().bfloat16(), example=batch, check=False, cache=False)
    optimizer = compiled.optimizer(WideMomentum)
    manager = csc.CheckpointManager(tmp_path / "run", compiled, optimizer=optimizer)
    step(compiled, optimizer, batch)
    manager.save(1)
    compiled.save(tmp_path / "weights", optimizer=optimizer)
    saved = [state["wide"].clone() for state in optimizer.state.values()]
    later = [step(compiled, optimizer, batch) for _ in range(2)]
    for load in (manager.load, lambda: compiled.load(tmp_path / "weights", optimizer=optimizer)):
        load()
        for state, wide in zip(optimizer.state.values(), saved):
            assert state["wide"].dtype == torch.float32 and torch.equal(state["wide"], wide)
        assert [step(compiled, optimizer, batch) for _ in range(2)] == later


def test_options_of_groups(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    """A parameter keeps its group, with a state or without; what a scheduler left in a group is there for the next."""
    optimizer = compiled.optimizer(torch.optim.SGD, groups(compiled), lr=0.1)
    lr_scheduler.StepLR(optimizer, 2)
    csc.CheckpointManager(tmp_path, compiled, optimizer=optimizer).save(1)
    turned = compiled.optimizer(torch.optim.SGD, groups(compiled)[::-1], lr=0.1)
    with pytest.raises(InputError, match=r"is in group 1 there, and in group 0 here"):
        csc.CheckpointManager(tmp_path, compiled, optimizer=turned).load()
    again = compiled.optimizer(torch.optim.SGD, groups(compiled), lr=0.2)
    csc.CheckpointManager(tmp_path, compiled, optimizer=again).load()
    assert again.param_groups[0]["initial_lr"] == again.param_groups[0]["lr"] == 0.1
    assert lr_scheduler.StepLR(again, 2, last_epoch=1).last_epoch == 2


def test_state_of_no_parameter(compiled: csc.CompiledModel, tmp_path: Path) -> None:
    """torch keeps such keys in a state_dict; without their name they would be gone."""
    optimizer = compiled.optimizer(torch.optim.SGD, lr=0.1)
    optimizer.state["steps"] = {"count": 3}
    with pytest.raises(InputError, match=r"the optimizer keeps 'steps', which is of no parameter"):
        csc.CheckpointManager(tmp_path, compiled, optimizer=optimizer).save(1)
    assert not any(tmp_path.iterdir())


class Position:
    """Of a schedule or a loader; refuses to go back."""

    def __init__(self, at: int, latest: int = 100) -> None:
        self.at, self.latest = at, latest

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if state["at"] > self.latest:
            raise KeyError("at")
        self.at = state["at"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda one: {"scheduler": lr_scheduler.StepLR(one, 3)}, "CosineAnnealingLR, and the scheduler is a StepL"),
        (lambda one: {"scheduler": lr_scheduler.CosineAnnealingLR(one, 7), "loader": Position(1, 2)},
         r"the Position does not take its state: KeyError: .at.\. make it as it was"),
    ],
)  # fmt: skip
def test_one_that_refuses_changes_nothing(
    compiled: csc.CompiledModel, tmp_path: Path, make: Callable[[Any], dict[str, Any]], message: str
) -> None:
    """torch's schedulers take the state of any other without a word, or raise KeyError."""
    optimizer = compiled.optimizer(torch.optim.AdamW)
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 8)
    step(compiled, optimizer)
    csc.CheckpointManager(tmp_path, compiled, optimizer=optimizer, scheduler=scheduler, loader=Position(9)).save(1)
    step(compiled, optimizer)
    weights = [parameter.detach().clone() for parameter in compiled.parameters()]
    other = make(optimizer)
    before = {name: one.state_dict() for name, one in other.items()}
    with pytest.raises(InputError, match=message):
        csc.CheckpointManager(tmp_path, compiled, optimizer=optimizer, **other).load()
    assert {name: one.state_dict() for name, one in other.items()} == before
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert all(torch.equal(now, then) for now, then in zip(compiled.parameters(), weights))


def test_another_configuration_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With other heads in the same shapes it would go on as another model, in silence."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 64}
    batch = {"input_ids": torch.arange(16).view(2, 8), "labels": torch.arange(16).view(2, 8)}

    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
    manager = csc.CheckpointManager(tmp_path, csc.compile(LlamaForCausalLM(config), example=batch, check=False))
    file = manager.save(1).folder / "config.json"
    with caplog.at_level("INFO", "csc"):
        manager.load()
        assert "another config.json" not in caplog.text
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_attention_heads": 2}))
        manager.load()
    told = "step-00000001 was saved with another config.json: num_attention_heads is 2 there, and 4 in the model"
    assert told in caplog.text
