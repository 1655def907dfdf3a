"""Traces that the processes of one run of the tests share: a model that one of them has traced is not traced again.

FOLDER                 where they are while the tests run; made by the first process, inherited by the others
kept_traces()          within it csc keeps what it traces there, and takes what is there
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

STARTED_HERE = "CSC_TEST_TRACES" not in os.environ  # not in pytest-xdist's workers, which inherit it
FOLDER = os.environ.setdefault("CSC_TEST_TRACES", tempfile.mkdtemp(prefix="csc-traces-") if STARTED_HERE else "")


@contextmanager
def kept_traces() -> Iterator[None]:
    """For what is made of a trace, not for tracing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CSC_CACHE", "1")
        patch.setenv("CSC_CACHE_DIR", FOLDER)
        yield
