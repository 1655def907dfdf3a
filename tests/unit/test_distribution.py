"""What is given to users: an sdist with tests and documents, and a wheel that compiles a model on its own."""

from __future__ import annotations

import email
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

from csc.errors import EXTRAS
from csc.installation import TRIED, top_folders

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
    done = subprocess.run(command, cwd=where, env=clean | environment, capture_output=True, text=True, timeout=600)
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


@pytest.fixture(scope="module")
def python(built: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its own site-packages has the wheel alone; what csc depends on is looked up in this environment's."""
    environment = tmp_path_factory.mktemp("env")
    venv.create(environment, with_pip=False)
    [packages] = environment.glob("lib/python*/site-packages")
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(packages)
    (packages / "dependencies.pth").write_text("\n".join(one for one in sys.path if one.endswith("site-packages")))
    return str(environment / "bin/python")


@pytest.mark.slow
def test_the_wheel_compiles_a_model_in_an_environment_of_its_own(python: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    said = run(python, "train.py", where=tmp_path, CSC_CACHE_DIR=str(tmp_path / "cache"))
    [packages] = Path(python).parents[1].glob("lib/python*/site-packages")
    assert said.split()[-1] == str(packages / "csc")


PLACES = """
import importlib, multiprocessing, sys

NAMES = ("csc", "csc.errors", "csc.passes", "csc.codegen", "csc.kernels")

def places():
    return [importlib.import_module(name).__file__ for name in NAMES]

if __name__ == "__main__":
    print(*places(), sep="\\n")
    if "spawn" in sys.argv:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print(*pool.apply(places), sep="\\n")
"""


def clone(folder: Path) -> Path:
    """A copy of the sources, and in it a program that prints where csc's modules are."""
    for name in ("csc", "passes", "codegen", "kernels"):
        shutil.copytree(ROOT / name, folder / name, ignore=LEFT_OUT)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "places.py").write_text(PLACES)
    return folder


@pytest.mark.slow
def test_a_clone_beside_an_installed_wheel_is_used_whole(python: str, tmp_path: Path) -> None:
    here = clone(tmp_path / "csc")
    assert "--steps" in run(python, "-m", "csc.run", "--help", where=here)
    found = run(python, "-m", "places", "spawn", where=here).split()
    assert [Path(one).is_relative_to(here) for one in found] == [True] * 10


@pytest.mark.slow
def test_an_installed_wheel_starts_processes_of_its_own_in_a_clone(python: str, tmp_path: Path) -> None:
    here = clone(tmp_path / "csc")
    ask = "import json; from csc.installation import own_process; print(json.dumps(own_process('places', 'word')))"
    command = json.loads(run(python, "-c", ask, where=tmp_path))
    found = run(*command, where=here).split()
    assert [Path(one).is_relative_to(Path(python).parents[1]) for one in found] == [True] * 5


def test_only_a_clone_has_csc_s_folders_beside_it(tmp_path: Path) -> None:
    """A wheel has its own; what else is called `passes` beside csc is nobody's business."""
    here = clone(tmp_path / "csc")
    assert top_folders(str(here / "csc")) == [str(here)]
    for name, text in (("pyproject.toml", '[project]\nname = "another"\n'), ("kernels/__init__.py", None)):
        other = tmp_path / name.partition("/")[0]
        shutil.copytree(here, other)
        (other / name).write_text(text) if text is not None else (other / name).unlink()
        assert top_folders(str(other / "csc")) == []
    wheel = tmp_path / "site-packages"
    shutil.copytree(here, wheel)
    shutil.copytree(here / "passes", wheel / "csc" / "passes")
    assert top_folders(str(wheel / "csc")) == []
    assert top_folders(str(tmp_path / "archive.zip" / "csc")) == []


def importing(version: str, folder: Path, **environment: str) -> str:
    """What `import csc` says where that torch is installed, by its metadata."""
    (folder / "torch-9.dist-info").mkdir(parents=True)
    (folder / "torch-9.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\nimport csc"]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_a_newer_torch_is_a_warning_that_can_be_left_out(tmp_path: Path) -> None:
    first, last = (".".join(map(str, release)) for release in TRIED["torch"])
    said = importing("77.1.0+cu999", tmp_path / "newer")
    assert f"UserWarning: csc was tried with torch {first} to {last}, and 77.1.0+cu999 is newer: " in said
    assert importing("77.1.0", tmp_path / "silent", PYTHONWARNINGS="ignore:csc was tried") == ""
    assert importing("77.1.0", tmp_path / "rank", RANK="1") == ""
    assert importing(f"{last}.9", tmp_path / "patch") == ""


def test_extras_bring_what_errors_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for package, (extra, requirement) in EXTRAS.items():
        assert any(one.startswith(requirement) for one in project["optional-dependencies"][extra]), package
    torch, triton = (f"{name}>={'.'.join(map(str, TRIED[name][0]))}" for name in ("torch", "triton"))
    assert torch in project["dependencies"] and project["optional-dependencies"]["gpu"][0].startswith(f"{triton};")
