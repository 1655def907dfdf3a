"""Exactness does not depend on the processor: tests that assert it run again as older processors compute.

MKL, oneDNN and ATen choose their kernels by what a processor can do, and each can be told that it can do less. What
bits rest on is in docs/check.md; where they are not asserted, how near results have to be in tests/exactness.py.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import long

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "any": {"MKL_CBWR": "COMPATIBLE", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "AVX2": {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
}
CHOSEN = [
    "compiler/test_parity.py::test_llava_has_eager_gradients_bit_for_bit[all trainable-3]",
    "compiler/test_parity.py::test_bfloat16_is_bit_equal[3]",
    "compiler/test_precision.py::test_the_casts_are_those_written_by_hand",
    "composition/test_model.py::test_the_class_token_can_stay",
]
ANOTHER = "compiler/test_one_sample.py::test_models_that_start_with_one_sample[SmolVLM]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "tests"), [long("any", CHOSEN), long("any", [ANOTHER]), long("AVX2", [ANOTHER, *CHOSEN[:2]])],
    ids=["any", "any, another model", "AVX2, between any and most machines"],
)  # fmt: skip
def test_exactness_as_other_processors_compute(name: str, tests: list[str]) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | SETTINGS[name]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short"]
    command += [f"tests/{test}" for test in tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
