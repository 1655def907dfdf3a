"""Which tests run when: `make test` leaves out the long tier, more cases of kinds that it has one or two of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.torch_version import TorchVersion

BEFORE_2_13 = TorchVersion(torch.__version__) < "2.13"  # some models are refused there that later torch traces


def long(*case: Any) -> Any:
    """A case of a parametrised test, for the long tier (`make test-long`)."""
    return pytest.param(*case, marks=pytest.mark.long)


def in_turn(rows: Iterable[Any], columns: Sequence[Any]) -> list[Any]:
    """Cases (row, column) of a parametrised test: each row with one of the columns in turn, so that each column has a
    case too, if there are as many rows. The other pairs are for the long tier.
    """
    pairs = product(enumerate(rows), enumerate(columns))
    return [
        pytest.param(row, column) if place % len(columns) == turn else long(row, column)
        for (place, row), (turn, column) in pairs
    ]
