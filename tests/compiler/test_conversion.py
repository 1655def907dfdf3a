"""Checkpoints that are converted: tensor by tensor, and all of it or nothing."""

from __future__ import annotations

import json
import os
import signal
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import load_file
from torch import nn

from csc.checkpoints import dcp, files, restoring
from csc.checkpoints.writing import STAGE, alone_in
from csc.driver import checkpoint
from csc.driver.checkpoint import convert
from csc.errors import InputError
from csc.runtime import weights
from tests.compiler.peft_models import llama


class Reads:
    """Tensors that were read, as long as something keeps them."""

    def __init__(self) -> None:
        self.count = self.most = 0
        self._kept: list[Any] = []

    def of(self, read: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*arguments: Any, **options: Any) -> torch.Tensor:
            tensor = read(*arguments, **options)
            self._kept = [one for one in self._kept if one() is not None] + [weakref.ref(tensor)]
            self.count, self.most = self.count + 1, max(self.most, len(self._kept))
            return tensor

        return call


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    found = Reads()
    for owner, name in ((weights.Files, "tensor"), (restoring, "whole"), (dcp._Directory, "tensor")):
        monkeypatch.setattr(owner, name, found.of(getattr(owner, name)))
    return found


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "vocab_size": 50}
    return MixtralForCausalLM(MixtralConfig(**sizes, **heads, num_local_experts=3))


@pytest.mark.parametrize(("make", "most"), [(llama, 2), (mixtral, 7)])
def test_no_more_than_a_parameter_is_held(
    make: Callable[[], Any], most: int, reads: Reads, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From files of Hugging Face (of experts three times two make a parameter), to them, to torch's, and back."""
    model = make()
    model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    monkeypatch.setattr(checkpoint, "SHARD", 20_000)
    told: list[str] = []
    for source, out, to in (
        ("hf", "csc", "csc"),
        ("csc", "back", "hf"),
        ("csc", "dcp", "dcp"),
        ("dcp", "again", "csc"),
    ):
        reads.count = reads.most = 0
        convert(tmp_path / source, tmp_path / out, to, tell=told.append)
        assert reads.count >= len(list(model.parameters())) and reads.most <= most, (source, reads.most)
    assert "0.0 GB written" in told[-1]
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 3
    found, again = type(model).from_pretrained(tmp_path / "back"), tmp_path / "last"
    convert(tmp_path / "again", again, "hf")  # without config.json: in the model's own names
    own: dict[str, torch.Tensor] = {}
    for file in again.glob("*.safetensors"):
        own |= load_file(file)
    for name, parameter in model.named_parameters():
        assert torch.equal(found.get_parameter(name), parameter) and torch.equal(own[name], parameter), name


def test_a_conversion_that_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is there, or what a kill leaves is no checkpoint and is cleared by the next; two do not mix."""
    llama().save_pretrained(tmp_path / "hf")
    out, read = tmp_path / "out", weights.Files.tensor
    with monkeypatch.context() as patch:
        stops = iter([*[False] * 5, True])

        def stopped(*arguments: Any) -> torch.Tensor:
            if next(stops):
                raise KeyboardInterrupt
            return read(*arguments)

        patch.setattr(weights.Files, "tensor", stopped)
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "hf", out, "csc")
    assert not out.exists()
    (out / STAGE / "step-00000003").mkdir(parents=True)
    (out / STAGE / "half").write_text("")
    with alone_in(out / STAGE, wait=False), pytest.raises(InputError, match="another process is writing there"):
        convert(tmp_path / "hf", out, "csc")
    assert convert(tmp_path / "hf", out, "csc", step=3).made == out / "step-00000003"
    assert [path.name for path in out.iterdir()] == ["step-00000003"]
    [part] = (out / "step-00000003").glob("*.safetensors")
    part.write_bytes(part.read_bytes()[:-4])
    for to in ("hf", "dcp"):
        with pytest.raises(InputError, match=f"{part.name}: .* the file ends before it"):
            convert(out, tmp_path / f"to_{to}", to)
        assert not (tmp_path / f"to_{to}").exists()


def test_a_turn_ends_though_a_process_was_forked_in_it(tmp_path: Path) -> None:
    """As a loader's workers are while a thread saves: what they have inherited keeps nobody out."""
    with alone_in(tmp_path, wait=False):
        child = os.fork()
        if not child:
            time.sleep(60)
            os._exit(0)
    try:
        with alone_in(tmp_path, wait=False):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def changed(config: dict[str, Any]) -> list[tuple[str, str]]:
    """Configurations, and what is said of them."""
    remote = {"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}, "architectures": ["Own"]}
    return [
        ("{", "it is not JSON"),
        ("{}", "transformers makes no model of it: Unrecognized model"),
        (json.dumps(remote), "contains custom code"),
        (json.dumps(config | {"hidden_size": 4096}), r"has shape \[.* there, \[.* in the program"),
        (json.dumps(config | {"architectures": ["pipeline"]}), ""),
    ]


def test_what_cannot_be_converted(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf/config.json"
    for content, message in changed(json.loads(file.read_text())):
        file.write_text(content)
        if message:
            with pytest.raises(InputError, match=message):
                convert(tmp_path / "hf", tmp_path / "out", "csc")
            assert not (tmp_path / "out").exists()
        else:
            convert(tmp_path / "hf", tmp_path / "out", "csc")
    with pytest.raises(InputError, match="step is -1"):
        convert(tmp_path / "hf", tmp_path / "negative", "csc", step=-1)
    with pytest.raises(InputError, match="it cannot be made"):
        convert(tmp_path / "hf", Path("/proc/none"), "csc")


def test_what_is_left_out_is_told(tmp_path: Path) -> None:
    """Tensors of files that the model does not have; state of torch's directories that is not of entries is not."""
    model = llama()
    model.save_pretrained(tmp_path / "hf")
    whole = {key: tensor.clone() for key, tensor in model.state_dict().items()} | {"extra.bias": torch.ones(2)}
    files.write(tmp_path / "hf/model.safetensors", whole)
    assert convert(tmp_path / "hf", tmp_path / "out", "csc").left == ["extra.bias"]
    state = {"w": {"row": torch.arange(4.0), "step": torch.tensor(3.0), "m": torch.ones(4, 2)}}
    groups = {"0": {"lr": 0.5, "params": ["w"]}, "x": {"lr": 1.0}}
    torch_dcp.save(
        {"model": {"w": torch.ones(4, 2)}, "optim": {"state": state, "param_groups": groups}},
        checkpoint_id=tmp_path / "dcp", no_dist=True,
    )  # fmt: skip
    found = convert(tmp_path / "dcp", tmp_path / "own", "csc", optimizer="Adafactor")
    assert found.left == ["optim.param_groups.x.lr"]
    index = files.read(found.made)
    assert index.optimizer is not None and index.optimizer["groups"] == [{"names": ["w"], "options": {"lr": 0.5}}]
    assert index.optimizer["parameters"]["w"]["numbers"]["step"]["value"] == 3.0
    stored = {key: restoring.whole(index, one, key) for _, key, one in index.of_optimizer()}
    assert torch.equal(stored["row"], torch.arange(4.0)) and torch.equal(stored["m"], torch.ones(4, 2))
