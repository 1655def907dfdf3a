"""The tutorial's rehearsal of two nodes: two launchers on one machine, each with its own folder and its own cache."""

from __future__ import annotations

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT, script

pytestmark = [pytest.mark.gloo, pytest.mark.slow]
LOSS = re.compile(r"step \d: loss ([\d.]+)")
PATIENCE = 600  # seconds, after which each process says where it stands, and ends
AT_START = f"import faulthandler\nfaulthandler.dump_traceback_later({PATIENCE}, exit=True)\n"


def _node(rank: int, port: int, folder: Path, *command: str) -> subprocess.Popen[str]:
    folder.mkdir()
    for name, text in script("tutorial/first-model.md").files.items():
        (folder / name).write_text(text)
    (folder / "sitecustomize.py").write_text(AT_START)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(rank), *rendezvous]
    caches = {"CSC_CACHE": "1", "CSC_CACHE_DIR": str(folder / "cache")}
    environment = {**os.environ, **caches, "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.Popen(
        [*agent, *command], cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def _two(tmp_path: Path, *command: str) -> list[tuple[int, str, str]]:
    port = _free_port()
    nodes = [_node(rank, port, tmp_path / f"node{rank}", *command) for rank in range(2)]
    heard = [node.communicate(timeout=2 * PATIENCE) for node in nodes]
    for rank, (out, err) in enumerate(heard):  # shown where an assertion fails
        print(f"node {rank}, which ended with {nodes[rank].returncode}:", out, err, sep="\n", file=sys.stderr)
    return [(node.returncode, *said) for node, said in zip(nodes, heard, strict=True)]


def test_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = _two(tmp_path, "--nproc-per-node", "1", "train.py")
    assert [code for code, _, _ in nodes] == [0, 0]
    losses = [LOSS.findall(out) for _, out, _ in nodes]
    speaking = [found for found in losses if found]
    assert len(speaking) == 1 and len(speaking[0]) == 3  # the first rank alone
    held = [[*(tmp_path / f"node{rank}" / "cache").rglob("program.json")] for rank in range(2)]
    assert sorted(map(bool, held)) == [False, True]  # that of rank 0's node alone

    monkeypatch.setenv("CSC_CACHE", "1")
    monkeypatch.setenv("CSC_CACHE_DIR", str(tmp_path / f"node{int(bool(held[1]))}" / "cache"))
    monkeypatch.chdir(tmp_path / "node0")
    monkeypatch.syspath_prepend(str(tmp_path / "node0"))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    runpy.run_path("train.py", run_name="__main__")
    monkeypatch.delitem(sys.modules, "model")
    assert LOSS.findall(capsys.readouterr().out) == speaking[0]


def test_a_world_that_does_not_fit_is_said_last(tmp_path: Path) -> None:
    """Where torchrun's own block stands behind the traceback, its last line is the sentence."""
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "train.py").write_text(
        "import csc, torch\n"
        "def batch(): return {'x': torch.zeros(2, 4)}\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.a, self.b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        "    def forward(self, x): return self.b(self.a(x)).sum()\n"
        "csc.compile(Model(), mesh='pp=3', example=batch, loss_weight='sum').parameters()\n"
    )
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    found = subprocess.run(launcher, cwd=folder, env=environment, text=True, capture_output=True, timeout=PATIENCE)
    said = "2 processes were started and the mesh has 3 ranks (pp=3)"
    assert found.returncode == 1
    assert found.stderr.count(f"csc.errors.InputError: mesh: {said}") == 1  # one rank's sentence, not two
    own = [line for line in found.stderr.splitlines() if line.startswith("[rank")]
    assert len(own) <= 5 and not any("/csc/" in line for line in own)  # the user's line, and the sentence
    assert "NO_OTHER_FAILURES" in found.stderr  # ranks that waited for it are no failures
    assert said in found.stderr.rpartition("Root Cause")[2]


def test_the_page_names_what_csc_compile_prints() -> None:
    from csc.runtime.launch import command

    said = command(1024, 8, "-m csc.run build/70b")
    assert f"run it, {said}" in (DOCS / "tutorial" / "many-machines.md").read_text()
