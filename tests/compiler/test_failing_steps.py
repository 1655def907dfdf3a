"""Steps of a compiled model that fail on one rank of four, over gloo, with context parallelism and dropout."""

from __future__ import annotations

from pathlib import Path

import pytest

from csc.runtime.weights import INDEX
from tests import launching
from tests.compiler import failing_worker

pytestmark = [pytest.mark.gloo, pytest.mark.slow, pytest.mark.usefixtures("traces")]


def test_the_step_after_one_that_failed_is_that_of_an_undisturbed_run(tmp_path: Path) -> None:
    launching.ranks(failing_worker.main, 4, tmp_path)
    assert (tmp_path / "out" / INDEX).is_file()
