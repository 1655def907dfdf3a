"""A start after something was changed that the model's code looks at indirectly: in processes of their own, through the
cache of the one before, its gradients are those of a fresh compilation, or the log says why nothing was kept.
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
from pathlib import Path

import pytest
import torch

import csc
from tests import launching
from tests.exactness import FLOAT32
from tests.models.indirections import CASES, NET, SIDE

# What is set differently before the model is made, as a script or a library would: case -> the line that sets it.
CHANGES = {
    "package.package.module.CONST": "import PKG.sub.deep as deep; deep.C = 3.0",
    "a method of a global object": "import PKG.side as side; side.SCALE = 3.0",
    "a closure": "import PKG.net as net; net.act.__closure__[0].cell_contents = 3.0",
    "os.environ": "import os; os.environ['CSC_TEST_SCALE'] = '3'",
    "a hook of all modules": "import PKG.patches as p; p.hook()",  # the last: it would be one of the others too
}
PATCHES = """
import torch
def tripled(module, given, result): return result * 3
def hook(): torch.nn.modules.module.register_module_forward_hook(tripled)
"""
LOSS = """
from .net import Net
class Loss(Net):
    def forward(self, x): return super().forward(x).square().mean()
"""


def started(folder: str, models: list[tuple[str, str]]) -> None:
    """Each model compiled and stepped, after its line has run: captures, loss, distance to eager; and the log."""
    sys.path.insert(0, folder)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout)
    found = []
    for package, change in models:
        made = importlib.import_module(f"{package}.loss").Loss
        exec(change)
        torch.manual_seed(0)
        model, x = made(), torch.linspace(-1, 1, 8).view(2, 4)
        print(package)
        compiled = csc.compile(model, example={"x": x})
        loss = compiled.train_step({"x": x})
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        expected = model(x)
        expected.backward()
        apart = [float((g - p.grad).norm() / p.grad.norm()) for g, p in zip(gradients, model.parameters(), strict=True)]
        captures = len(compiled.compiler.captures)
        found.append([captures, float(loss), max(*apart, abs(float(loss - expected)) / float(expected))])
    print(json.dumps(found))


def written(folder: Path, name: str) -> str:
    """A package of the case's model with a loss."""
    case, package = CASES[name], f"stale_{list(CHANGES).index(name)}"
    files = {
        "__init__": "", "net": NET.format(top=case.top, init=case.init, forward=case.forward), "side": SIDE,
        "sub/__init__": "", "sub/deep": "C = 2.0\n", "loss": LOSS, "patches": PATCHES,
    }  # fmt: skip
    for file, text in files.items():
        path = folder / package / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PKG", package))
    return package


@pytest.mark.slow
def test_a_start_after_a_change_is_a_fresh_one(tmp_path: Path) -> None:
    packages = {name: written(tmp_path, name) for name in CHANGES}
    environment = {"CSC_CACHE": "1", "CSC_CACHE_DIR": str(tmp_path / "cache")}

    def start(models: list[tuple[str, str]]) -> tuple[list[list[float]], str]:
        said = launching.alone(started, str(tmp_path), models, **environment)
        return json.loads(said.splitlines()[-1]), said

    first, _ = start([(package, "") for package in packages.values()])
    changes = {name: change.replace("PKG", packages[name]) for name, change in CHANGES.items()}
    later, log = start([(packages[name], change) for name in CHANGES for change in ("", changes[name])])
    for name, before, same, changed in zip(CHANGES, first, later[::2], later[1::2], strict=True):
        told = CASES[name].told
        assert (before[0], same[0], changed[0]) == (1, int(not told), 1), f"{name}: what is told is found again"
        assert same[1] == before[1] != changed[1], name
        assert max(before[2], same[2], changed[2]) <= FLOAT32, f"{name}: as eager is now"
        assert told or "is not cached: net.py:" in log.split(packages[name])[1], name
