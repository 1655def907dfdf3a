"""What is given to users: an sdist with tests and documents, and a wheel that compiles a model on its own."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "corpus")
BUILD = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"

TRAIN = """
import csc, torch
from pathlib import Path
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        return self.head(x).square().mean()

compiled = csc.compile(Net(), mesh="pp=2", example={"x": torch.randn(4, 8)}, microbatches=2)
loss = compiled.train_step({"x": torch.randn(4, 8)})
assert bool(loss.isfinite()) and compiled.model.head.weight.grad is not None
print(Path(csc.__file__).parent)
"""


def run(*command: str, where: Path, **environment: str) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=where, env=clean | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The sdist and the wheel, built from a copy so that nothing is left in the sources."""
    source = tmp_path_factory.mktemp("source") / "csc"
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    output = tmp_path_factory.mktemp("dist")
    found = {}
    for kind in ("sdist", "wheel"):
        name = run(sys.executable, "-c", BUILD, f"build_{kind}", str(output), where=source).split()[-1]
        found[kind] = output / name
    return found


@pytest.mark.slow
def test_the_sdist_holds_what_one_builds_and_tests_with(built: dict[str, Path]) -> None:
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "csc/py.typed",
        "csc/analysis/profiles/h100.toml", "passes/prune.py", "tests/golden/regions.txt", "docs/architecture.md",
        "examples/llava.py", "benchmarks/judge.py",
    }  # fmt: skip
    assert wanted - names == set()


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as archive:
        names = set(archive.namelist())
        [metadata] = (name for name in names if name.endswith("/METADATA"))
        about = email.message_from_bytes(archive.read(metadata))
    sources = {"csc": "csc", "passes": "csc/passes", "codegen": "csc/codegen", "kernels": "csc/kernels"}
    expected = {
        f"{package}/{file.relative_to(ROOT / folder)}"
        for folder, package in sources.items()
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and file.suffix in (".py", ".typed", ".toml", ".css", ".js")
    }
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert (about["Name"], about["License-Expression"]) == ("csc-compiler", "Apache-2.0")
    assert not [one for one in about.get_all("Requires-Dist") if one.startswith("triton") and "extra ==" not in one]


@pytest.mark.slow
def test_the_wheel_compiles_a_model_in_an_environment_of_its_own(built: dict[str, Path], tmp_path: Path) -> None:
    """Its own site-packages has the wheel alone; what csc depends on is looked up in this environment's."""
    venv.create(tmp_path / "env", with_pip=False)
    [packages] = (tmp_path / "env").glob("lib/python*/site-packages")
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(packages)
    (packages / "dependencies.pth").write_text("\n".join(one for one in sys.path if one.endswith("site-packages")))
    python = str(tmp_path / "env/bin/python")
    (tmp_path / "train.py").write_text(TRAIN)
    said = run(python, "train.py", where=tmp_path, CSC_CACHE_DIR=str(tmp_path / "cache"))
    assert said.split()[-1] == str(packages / "csc")
