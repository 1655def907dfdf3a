"""Runs triton_interpreted.py in a process of its own: interpreted and compiled kernels cannot share one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch.torch_version import TorchVersion

from tests.tiers import long

CASES = Path(__file__).with_name("triton_interpreted.py")


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["not long", long("long")])
def test_the_kernels_in_the_interpreter(tier: str) -> None:
    triton = pytest.importorskip("triton", reason="Triton is for Linux")
    if TorchVersion(triton.__version__) < "3.7" and TorchVersion(np.__version__) >= "2.4":
        pytest.skip("Triton 3.6 interprets no loop with this NumPy: findings/")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", tier, str(CASES)]
    done = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=CASES.parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-2000:]
