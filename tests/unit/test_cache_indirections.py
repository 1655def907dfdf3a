"""What a model's code looks at, however indirectly, is in its key: when it changes, what is computed changes, and so
does the key; or the model has no key, with the place.

A case is a model's source, and a change that is made afterwards. That the model then computes something else is part
of the test: a key that stayed the same would give the program of before.
"""

from __future__ import annotations

import importlib
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from csc.cache.keys import Opaque, model_key, tracing_switches
from csc.capture.model_guards import ModelGuards
from csc.errors import InputError
from tests.models.indirections import CASES, NET, SIDE, Case


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """What a case changes outside of its own package is as it was afterwards."""
    import builtins
    import math

    monkeypatch.syspath_prepend(tmp_path)
    for owner, name in (
        (torch, "tanh"), (F, "relu"), (F, "linear"), (nn.Linear, "forward"), (nn.Module, "__call__"),
        (math, "sqrt"), (math, "tau"), (builtins, "abs"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, getattr(owner, name))
    tensor = dict(vars(torch.Tensor))
    monkeypatch.delenv("CSC_TEST_SCALE", raising=False)
    modules, dtype = dict(sys.modules), torch.get_default_dtype()
    before = [dict(hooks) for hooks in GLOBAL_HOOKS]
    yield tmp_path
    os.environ.pop("CSC_TEST_SCALE", None)
    for name, value in list(vars(torch.Tensor).items()):
        if name not in tensor:
            delattr(torch.Tensor, name)
        elif tensor[name] is not value:
            setattr(torch.Tensor, name, tensor[name])
    torch.set_default_dtype(dtype)
    for hooks, old in zip(GLOBAL_HOOKS, before, strict=True):
        hooks.clear()
        hooks.update(old)
    for name in set(sys.modules) - set(modules):
        if name.startswith("indirect_"):
            del sys.modules[name]


TOLD_TO_GUARDS = {  # and to no key
    "a context variable", "what belongs to a thread", "os.environ", "os.getenv by name", "os imported in forward",
    "environ by name, in a function", "a function by class of its argument", "a tuple in a set",
    "the environment in a method by a name that is computed", "the processes' rank", "globals()", "sys.modules",
    "importlib", "eval",
}  # fmt: skip
REFUSED = {"__import__": "asks `__import__` for", "a generator": "asks `f_locals` for"}
GLOBAL_HOOKS = [nn.modules.module._global_forward_hooks, nn.modules.module._global_forward_pre_hooks]


def built(folder: Path, case: Case) -> tuple[ModuleType, nn.Module]:
    """The case's file and model, in a new package."""
    package = f"indirect_{list(CASES.values()).index(case)}"
    net = NET.format(top=case.top, init=case.init, forward=case.forward)
    files = {"__init__": "", "net": net, "side": SIDE, "sub/__init__": "", "sub/deep": "C = 2.0\n"}
    files |= {"sub2/__init__": "", "sub2/deep": "C = 2.0\n", "late": "SCALE = 2.0\n"}
    for name, text in files.items():
        file = folder / package / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("PKG", package))
    module = importlib.import_module(f"{package}.net")
    torch.manual_seed(0)
    return module, module.Net()


def key(model: nn.Module) -> str | None:
    try:
        return model_key(model, {})
    except Opaque as reason:
        assert "net.py" in str(reason) or ".net." in str(reason), "the place is said"
        return None


@pytest.mark.parametrize("name", CASES)
def test_what_code_looks_at_indirectly(name: str, untouched: Path) -> None:
    case = CASES[name]
    net, model = built(untouched, case)
    package = net.__name__.rpartition(".")[0]
    x = torch.linspace(-1, 1, 8).view(2, 4)
    before, computed = key(model), model(x)
    assert (before is not None) == case.told
    assert before is None or key(model) == before, "looking at it is no change, nor is running it"
    if name in REFUSED:
        with pytest.raises(InputError, match=f"net.py:.*{REFUSED[name]}"):
            ModelGuards(model, world=tracing_switches)
        return
    guards = ModelGuards(model, world=tracing_switches)
    assert not guards.changed()
    known = {"os": os, "time": time, "random": random, "torch": torch, "F": F, "np": sys.modules["numpy"]}
    known |= {"FILE": Path(f"{net.__file__}.txt"), "nn": nn, "net": net, "model": model}
    from functools import partial

    known["partial"] = partial
    for short, path in (("side", "side"), ("deep", "sub.deep"), ("deep2", "sub2.deep")):
        known[short] = importlib.import_module(f"{package}.{path}")
    changing = Path(net.__file__ or "").with_name("change.py")
    changing.write_text(case.change)
    exec(compile(case.change, changing, "exec"), known)
    after = model(x)
    assert after.shape != computed.shape or after.dtype != computed.dtype or not torch.equal(after, computed)
    assert before is None or key(model) != before
    seen = not guards.holds() and bool(guards.changed())
    assert seen == (case.told or name in TOLD_TO_GUARDS), "guards see what keys see, and state of this process"
