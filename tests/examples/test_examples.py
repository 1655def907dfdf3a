"""The examples run as their docstrings say, and give the same losses on one process and on several."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def losses(*command: str) -> list[float]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(number) for number in re.findall(r"step 9: loss ([\d.]+)", done.stdout)]


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
