"""What is changed in a model after it was compiled: taken up before the next step, or refused."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from tqdm.asyncio import tqdm_asyncio
from tqdm.std import TqdmDefaultWriteLock, tqdm

import csc
from csc.capture.model_guards import ModelGuards
from csc.check.eager import eager_step
from csc.driver.compiled import CompiledModel
from csc.errors import InputError
from tests.compiler import small
from tests.compiler.eager import together
from tests.models import hf


class Settings:
    """As a configuration of Hugging Face: attributes, some of them objects with attributes."""

    def __init__(self) -> None:
        self.factor, self.table = 1.0, {"a": [1.0, 2.0]}
        self.by_layer = {1: {"factor": 1.0}}
        self.inner = None


class Slotted:
    """An object without a dict."""

    __slots__ = ("factor", "table")

    def __init__(self) -> None:
        self.factor, self.table = 1.0, torch.ones(16)


class Shared:
    """What all models of this file read."""

    factor = 1.0


REMEMBERED = {"factor": 1.0}
FACTOR, FACTORS, TABLES, SETTINGS = 1.0, [1.0], [torch.ones(16)], Settings()


def from_elsewhere() -> torch.Tensor:
    return FACTOR * FACTORS[0] * TABLES[0] * Shared.factor * SETTINGS.factor * remembered()


@functools.lru_cache
def remembered() -> float:
    return REMEMBERED["factor"]


class Tuned(nn.Module):
    """Reads all kinds of state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.BatchNorm1d(16, track_running_stats=False)
        self.mix, self.head = nn.Linear(16, 16), nn.Linear(16, 32)
        self.drop = nn.Dropout(0.0)
        self.register_buffer("scale", torch.ones(16))
        self.config, self.config.inner = Settings(), Settings()
        self.gain, self.gains = 1.0, [1.0, 1.0]
        self.switches, self.ordered = {"on": 1.0}, {"first": 1.0, "second": 2.0}
        self.plain, self.deep = torch.ones(16), {"a": {"b": 1.0}}
        self.slotted, self.objects, self.tensors = Slotted(), [Settings()], [torch.ones(16)]

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) * self.plain * self.deep["a"]["b"] * self.scale * self.gain * self.gains[0]
        hidden = hidden * self.slotted.factor * self.slotted.table * self.objects[0].factor * self.tensors[0]
        hidden = hidden * from_elsewhere()
        hidden = self.drop(self.mix(hidden)) * self.config.inner.factor + self.config.table["a"][0]
        hidden = hidden * self.config.by_layer[1]["factor"]
        hidden = hidden * (2.0 if "on" in self.switches else 1.0) * next(iter(self.ordered.values()))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def compiled(**options: object) -> CompiledModel:
    torch.manual_seed(0)
    options = {"mesh": "pp=2", **options}
    return csc.compile(Tuned(), example=small.text_batch(2), cache=False, check=False, **options)


def is_eagers(model: CompiledModel) -> bool:
    """Whether the next step has eager's loss and gradients."""
    own = dict(model.model.named_parameters())
    frozen = model.options.freeze or ()
    names = {name for name, p in own.items() if p.requires_grad and name.split(".")[0] not in frozen}
    right = eager_step(model.model, small.text_batch(2), names)
    model.zero_grad()
    model.model.zero_grad()
    loss = float(model.train_step(small.text_batch(2)))
    found = {name: p.grad for name, p in own.items() if p.grad is not None}
    assert found.keys() == right.gradients.keys()
    return loss == pytest.approx(right.loss, rel=1e-6) and all(
        torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7) for name, gradient in right.gradients.items()
    )


def _loaded(model: Tuned, assign: bool) -> None:
    torch.manual_seed(1)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()}, assign=assign)


def _hooked(model: Tuned) -> None:
    model.mix.register_forward_hook(lambda module, given, result: 2 * result)


def _replaced(model: Tuned) -> None:
    model.mix = nn.Linear(16, 16)


def _patched(model: Tuned) -> None:
    forward = model.mix.forward
    model.mix.forward = lambda x: forward(x) * 2


def _remembered(_: nn.Module) -> None:
    REMEMBERED["factor"] /= 2
    remembered.cache_clear()


CHANGES: dict[str, Callable[[Tuned], object]] = {
    "buffer filled": lambda m: m.scale.fill_(3.0),
    "buffer replaced": lambda m: setattr(m, "scale", torch.full((16,), 2.0)),
    "buffer's data": lambda m: m._buffers.update(scale=torch.full((16,), 2.0)),
    "weights in place": lambda m: nn.init.ones_(m.mix.weight),
    "loaded": lambda m: _loaded(m, assign=False),
    "loaded, assigned": lambda m: _loaded(m, assign=True),
    "parameter replaced": lambda m: setattr(m.mix, "weight", nn.Parameter(torch.eye(16))),
    "frozen": lambda m: m.mix.weight.requires_grad_(False),
    "all but the head frozen": lambda m: [
        p.requires_grad_(False) for p in (*m.embed.parameters(), *m.mix.parameters())
    ],
    "attribute": lambda m: setattr(m, "gain", 0.5),
    "tensor that is an attribute": lambda m: m.plain.fill_(3.0),
    "mapping in a mapping": lambda m: m.deep["a"].update(b=2.0),
    "list": lambda m: m.gains.__setitem__(0, 0.5),
    "name in a mapping": lambda m: m.switches.update(off=m.switches.pop("on")),
    "order in a mapping": lambda m: m.ordered.update(first=m.ordered.pop("first")),
    "configuration": lambda m: setattr(m.config.inner, "factor", 0.5),
    "mapping in a configuration": lambda m: m.config.table.update(a=[0.5, 2.0]),
    "attribute of an object with slots": lambda m: setattr(m.slotted, "factor", 2.0),
    "tensor of an object with slots": lambda m: m.slotted.table.mul_(2),
    "object in a list": lambda m: setattr(m.objects[0], "factor", 2.0),
    "tensor in a list": lambda m: m.tensors[0].mul_(2),
    "global": lambda m: globals().update(FACTOR=FACTOR / 2),
    "global list": lambda m: FACTORS.__setitem__(0, FACTORS[0] / 2),
    "global list of tensors": lambda m: TABLES[0].mul_(0.5),
    "attribute of a class": lambda m: setattr(Shared, "factor", Shared.factor / 2),
    "attribute of a global object": lambda m: setattr(SETTINGS, "factor", SETTINGS.factor / 2),
    "mapping by number": lambda m: m.config.by_layer[1].update(factor=0.5),
    "forward hook": _hooked,
    "module replaced": _replaced,
    "forward of an object": _patched,
    "behind a cache": _remembered,
    "tied": lambda m: setattr(m.head, "weight", m.embed.weight),
}


@pytest.mark.parametrize("changes", together(CHANGES, 6))
def test_a_change_is_taken_up_by_the_next_step(changes: list[str]) -> None:
    model = compiled()
    assert is_eagers(model)
    for change in changes:
        CHANGES[change](model.model)
        assert is_eagers(model) and is_eagers(model), change


class Asking(small.TextModel):
    """Reads the environment."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return super().forward(tokens, labels) * float(os.environ.get("CSC_TEST_FACTOR", "1"))


def test_an_environment_variable_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = small.text_batch(2)
    model = csc.compile(Asking(1), example=batch, cache=False)
    before = model.train_step(batch)
    monkeypatch.setenv("CSC_TEST_FACTOR", "3")
    torch.testing.assert_close(model.train_step(batch), 3 * before)


CALLS: list[int] = []
loss = None  # of the script; the model's code has an attribute of that name


class Counted(small.TextModel):
    """Counts its calls in a global."""

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        CALLS.append(1)
        result = Settings()
        result.loss = super().forward(tokens, labels)
        return result.loss


def test_globals_that_forward_only_writes_compile_nothing_anew(caplog: pytest.LogCaptureFixture) -> None:
    global loss
    model = csc.compile(Counted(1), example=small.text_batch(2), cache=False)
    with caplog.at_level(logging.INFO, "csc"):
        for _ in range(3):
            loss = model.train_step(small.text_batch(2))
            model.model(**small.text_batch(2))
    assert not [record for record in caplog.records if "has changed" in record.message]


def test_other_options_of_a_model_that_has_changed() -> None:
    model = compiled()
    other = model.with_options(mesh="pp=1")
    model.model.gain = 0.5
    assert is_eagers(other) and is_eagers(model.with_options(freeze=["embed"])) and is_eagers(model)


def test_a_parameter_that_trains_again(caplog: pytest.LogCaptureFixture) -> None:
    """An optimizer of before lacks it, which is said."""
    model = compiled()
    model.model.mix.weight.requires_grad_(False)
    assert is_eagers(model) and "trains now" not in caplog.text
    model.model.mix.weight.requires_grad_(True)
    assert is_eagers(model)
    assert "mix.weight trains now: an optimizer that was made from compiled.parameters() before" in caplog.text


@pytest.mark.parametrize("change", ["loaded, assigned", "parameter replaced", "frozen"])
def test_an_optimizer_has_the_parameters_that_the_model_has_now(change: str) -> None:
    model = compiled()
    assert is_eagers(model)
    CHANGES[change](model.model)
    optimizer = model.optimizer(torch.optim.SGD, lr=0.1)
    own, named = dict(model.model.named_parameters()), dict(model.named_parameters())
    assert named and all(own[name] is parameter and parameter.requires_grad for name, parameter in named.items())
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    assert list(map(id, stepped)) == list(map(id, named.values())) == list(map(id, model.parameters()))


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_hook_on_a_parameters_gradient_comes_later(kind: str) -> None:
    model = compiled()
    assert is_eagers(model)
    parameter = model.model.mix.weight
    hook = getattr(parameter, kind)(lambda _: None)
    parameter.grad = None
    with pytest.raises(InputError, match=r"mix\.weight: the parameter has a hook on its gradient"):
        model.train_step(small.text_batch(2))
    assert parameter.grad is None
    hook.remove()
    assert is_eagers(model)


def test_dropout_that_is_switched_off_by_its_mode() -> None:
    model = compiled()
    model.model.drop.p = 0.5
    torch.manual_seed(1)
    one = float(model.train_step(small.text_batch(2)))
    model.model.drop.eval()
    assert is_eagers(model)
    model.model.drop.train()
    torch.manual_seed(1)
    assert float(model.train_step(small.text_batch(2))) == one


def test_eval_mode_is_no_mode_to_train_in() -> None:
    model = compiled()
    model.train_step(small.text_batch(2))
    model.model.eval()
    with pytest.raises(InputError, match=r"call compiled\.train\(\)"):
        model.train_step(small.text_batch(2))
    model.model.train()
    assert is_eagers(model)


def test_a_model_that_was_compiled_in_eval_mode_trains_all_the_same() -> None:
    model = compiled()
    model.model.eval()
    assert is_eagers(model)
    model.model.train()
    assert is_eagers(model)


def test_nothing_is_compiled_again_where_nothing_changed(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled()
    model.train_step(small.text_batch(2))
    programs, own = model._programs, model.model
    own.load_state_dict({name: value.clone() for name, value in own.state_dict().items() if "scale" not in name}, False)
    own.gain, own.gains, own.config.table = 1.0, [1.0, 1.0], {"a": own.config.table["a"]}
    own.eval()
    with torch.no_grad():
        own(**small.text_batch(2))
    own.train()
    with caplog.at_level(logging.INFO, "csc"):
        assert is_eagers(model)
    assert model._programs is programs and "has changed" not in caplog.text


def test_a_changed_model_of_the_cache_is_not_taken_for_the_old_one(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path))
    torch.manual_seed(0)
    model = csc.compile(Tuned(), mesh="pp=2", example=small.text_batch(2), check=False)
    assert is_eagers(model)
    for factor in (0.5, 1.0, 0.5):
        model.model.config.inner.factor = factor
        with caplog.at_level(logging.INFO, "csc"):
            caplog.clear()
            assert is_eagers(model)
    assert "from the cache" in caplog.text


def test_state_of_a_model_says_what_changed() -> None:
    model = Tuned()
    state = ModelGuards(model)
    assert state.holds() and not state.changed()
    model.config.inner.factor = 2.0
    model.scale.add_(1)
    assert not state.holds()
    assert str(state.changed()) == "attribute config.inner.factor; buffer scale"
    written, ignoring = ModelGuards(model, {("", "gain")}), ModelGuards(model, ignored={"attribute gain"})
    model.gain = 7.0
    assert not ignoring.changed() and written.by_itself(written.changed())
    model.gains[0] = 7.0
    assert not written.by_itself(written.changed())


def test_a_progress_bar_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that Qwen2-VL under PEFT reaches refers to tqdm, which makes locks with the first bar: on one rank alone."""
    from examples.trainer import make_model

    for kind, name in ((tqdm, "_lock"), (tqdm_asyncio, "_lock"), (TqdmDefaultWriteLock, "mp_lock")):
        monkeypatch.setattr(kind, name, None, raising=False)  # to be put back
        monkeypatch.delattr(kind, name)
    state = ModelGuards(make_model())
    tqdm_asyncio.get_lock()
    assert not state.changed(), state.changed()


def test_what_save_pretrained_notes_in_a_configuration_is_no_change(tmp_path: Path) -> None:
    """One rank saves: its model would be another than those of the others."""
    model = hf.llava()
    state = ModelGuards(model)
    model.save_pretrained(tmp_path)
    assert model.config.architectures and model.config.dtype == "float32"
    assert not state.holds() and not state.changed()
    for same in (torch.float32, "float32", torch.float32):
        model.config.text_config.dtype = same
        assert not state.changed()
    model.config.dtype = "bfloat16"
    assert str(state.changed()) == "attribute config.dtype"
    model.config.dtype, model.config.use_cache = "float32", False
    assert str(state.changed()) == "attribute config.use_cache"
    plain = Tuned()  # whose configuration is of no library
    plain.config.dtype = None
    state = ModelGuards(plain)
    plain.config.dtype = "float32"
    assert str(state.changed()) == "attribute config.dtype"
