"""A start after something was changed that the model's code looks at indirectly: in processes of their own, through the
cache of the one before, its gradients are those of a fresh compilation, or the log says why nothing was kept.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.exactness import FLOAT32
from tests.models.indirections import CASES, NET, SIDE

# What is set differently before the model is made, as a script or a library would: case -> the line that sets it.
STARTS = {
    "package.package.module.CONST": "import PKG.sub.deep as deep; deep.C = 3.0",
    "a method of a global object": "import PKG.side as side; side.SCALE = 3.0",
    "a hook of all modules": "import PKG.patches as p; p.hook()",
    "os.environ": "import os; os.environ['CSC_TEST_SCALE'] = '3'",
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
START = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
import torch
import csc
from PKG.loss import Loss
found = []
for change in json.loads(sys.argv[1]):
    exec(change)
    torch.manual_seed(0)
    model, x = Loss(), torch.linspace(-1, 1, 8).view(2, 4)
    compiled = csc.compile(model, example={"x": x})
    loss = compiled.train_step({"x": x})
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    expected = model(x)
    expected.backward()
    apart = max(float((g - p.grad).norm() / p.grad.norm()) for g, p in zip(gradients, model.parameters()))
    captures = sum(map(len, compiled.compiler.captures.values()))
    found.append([captures, float(loss), max(apart, abs(float(loss - expected)) / float(expected))])
print(json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_a_start_after_a_change_is_a_fresh_one(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    files = {
        "__init__": "", "net": NET.format(top=case.top, init=case.init, forward=case.forward), "side": SIDE,
        "sub/__init__": "", "sub/deep": "C = 2.0\n", "loss": LOSS, "patches": PATCHES,
    }  # fmt: skip
    for file, text in files.items():
        path = tmp_path / "stale" / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PKG", "stale"))
    environment = {
        **os.environ,
        "CSC_CACHE": "1",
        "CSC_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path),
    }
    environment.pop("CSC_TEST_SCALE", None)

    def start(*changes: str) -> tuple[list[list[float]], str]:
        command = [sys.executable, "-c", START.replace("PKG", "stale"), json.dumps(changes)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout), done.stderr

    ((captures, before, apart),), log = start("")
    assert (captures, apart <= FLOAT32) == (1, True)
    change = STARTS[name].replace("PKG", "stale")
    (same, changed), log = start("", change)
    assert same[0] == int(not case.told), "what is told is found again"
    assert changed[0] == 1 and changed[1] != before and max(same[2], changed[2]) <= FLOAT32
    assert case.told or "is not cached: net.py:" in log
