"""Options of the whole suite."""

from __future__ import annotations

import os

# The models are tiny and the workers are many: a second thread costs more than it gives. Subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["CSC_CACHE"] = "0"  # tests leave the user's cache alone; those of the cache have their own

import hypothesis
import pytest
import torch

torch.set_num_threads(1)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what the compiler does now"
    )
