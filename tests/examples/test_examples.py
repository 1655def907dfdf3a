"""The examples run as their docstrings say, and give the same losses on one process and on several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def output(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def losses(*command: str, step: int = 9) -> list[float]:
    return [float(number) for number in re.findall(rf"step {step}: loss ([\d.]+)", output(*command))]


@pytest.mark.gloo
def test_llava_trains_alike_in_one_process_and_under_torchrun() -> None:
    alone = losses("examples/llava.py")
    ranks = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "examples/llava.py")
    assert len(alone) == 1 and ranks == alone * 3
    assert alone[0] < 4.6  # ten steps from log(100) = 4.605


@pytest.mark.gloo
def test_packed_documents_train_alike_in_one_process_and_under_torchrun() -> None:
    """Four context-parallel ranks, other documents in every step."""
    alone = losses("examples/packed.py")
    ranks = losses("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "examples/packed.py")
    assert len(alone) == 1 and len(ranks) == 4
    assert ranks == pytest.approx(alone * 4, abs=2e-3)  # gloo adds four gradients in an order of its own
    assert alone[0] < 3.5  # ten steps from log(100) = 4.605


@pytest.mark.gloo
def test_a_composed_model_learns_to_see_and_hear() -> None:
    said = output("examples/compose.py")
    shares = re.findall(r"held out, (\w+): digits (\d+)%, pitches (\d+)%", said)
    assert [moment for moment, _, _ in shares] == ["before", "after"]
    assert all(int(share) <= 45 for share in shares[0][1:])
    assert int(shares[1][1]) >= 70 and int(shares[1][2]) >= 95
    alone = re.findall(r"step 20: loss ([\d.]+)", said)
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    assert losses(*launcher, "examples/compose.py", "21", step=20) == [float(loss) for loss in alone] * 3
