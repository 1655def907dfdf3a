"""Which tests run when: `make test` leaves out the long tier, more cases of kinds that it has one or two of."""

from __future__ import annotations

from typing import Any

import pytest


def long(*case: Any) -> Any:
    """A case of a parametrised test, for the long tier (`make test-long`)."""
    return pytest.param(*case, marks=pytest.mark.long)
