"""Starts the worker files of this directory under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def launch(worker: str, case: dict[str, Any], directory: Path, ranks: int = 2) -> None:
    """`worker` on so many processes, with the case and the directory as arguments. AssertionError if it fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(ROOT / "tests/compiler" / worker), json.dumps(case), str(directory)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-4000:]
