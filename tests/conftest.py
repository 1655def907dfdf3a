"""Options of the whole suite."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

# The models are tiny and the workers are many: a second thread costs more than it gives. Subprocesses inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["COLUMNS"] = "160"  # workers of pytest-xdist would have 80, and tables that fold their names
os.environ["CSC_CACHE"] = "0"  # tests leave the user's cache alone; those of the cache have their own

import hypothesis
import pytest
import torch

from csc.errors import CscError
from csc.torch_private.process_state import process_state
from tests.kept_traces import FOLDER, STARTED_HERE, kept_traces

LONG = {"examples", "benchmarks"}  # folders of tests that run whole programs

RESIDENT = pytest.StashKey[int]()  # bytes of this process when its memory was last given back
GROWN = 48 * 2**20  # by which a process has to be larger than it was then: to collect takes a tenth of a second

# Whose functions a trace replaces for a while.
SPACES = (torch, torch.nn.functional, torch.Tensor, torch.nn.Module, torch.autograd.function._SingleLevelFunction)

torch.set_num_threads(1)

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what the compiler does now"
    )
    parser.addoption(
        "--train-after-refusals", action="store_true",
        help="after each test in which csc made an error, train another model in the process, beside eager PyTorch",
    )  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that take a minute first: at the end of a run one of them would keep a single process busy. Cases that a
    test leaves to the long tier (`@pytest.mark.long_cases("pp=2-True", ...)`: their ids) are marked so.
    """
    cases_of: dict[str, set[str]] = {}
    for item in items:
        cases = item.get_closest_marker("long_cases")
        if cases is not None:
            case = item.callspec.id  # type: ignore[attr-defined]
            left_out = cases_of.setdefault(item.nodeid.partition("[")[0], set(cases.args))
            if case in left_out:
                left_out.remove(case)
                item.add_marker(pytest.mark.long)
    gone = {test: left_out for test, left_out in cases_of.items() if left_out}
    if gone and not any("::" in argument for argument in config.args):  # else not all cases are collected
        raise pytest.UsageError(f"long_cases names cases that are not there: {gone}")
    items.sort(key=lambda item: LONG.isdisjoint(item.path.parts))


def pytest_collection_finish() -> None:
    """What is imported by now stays: the collector would look through it, millions of objects, again and again, which
    took a tenth of a run. Less of it also for what tests make: they are full of small things that go by themselves.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_unconfigure() -> None:
    gc.unfreeze()  # extensions complain about what is left of them at the end
    if STARTED_HERE:
        shutil.rmtree(FOLDER, ignore_errors=True)


@pytest.fixture(autouse=True)
def process_as_it_was(request: pytest.FixtureRequest) -> Iterator[None]:
    """No test leaves anything on or replaced in the process: above all none in which csc refuses a model half-way."""
    before = _of_process()
    with _noting_errors() if request.config.getoption("--train-after-refusals") else nullcontext([]) as errors:
        yield
    if errors and not torch.distributed.is_initialized():
        from tests.compiler import eager  # which imports what only tests of models need

        with torch.random.fork_rng():
            model = eager.stack(lambda x, layer: torch.tanh(x) * layer.scale, layers=1)
            eager.assert_as_eager(model, eager.batch(), meshes=("pp=1",))
    now = _of_process()
    if before != now:  # in C, and the same objects almost always: a fifth of a millisecond for all of it
        assert _changed(before, now) == {}


@contextmanager
def _noting_errors() -> Iterator[list[str]]:
    """What errors of csc say, while it lasts."""
    said: list[str] = []
    own = CscError.__init__

    def noting(error: CscError, *args: Any, **kwargs: Any) -> None:
        own(error, *args, **kwargs)
        said.append(error.what)

    with patch.object(CscError, "__init__", noting):
        yield said


def _of_process() -> list[dict[str, Any]]:
    """What a trace switches on, registers or replaces for a while."""
    collected = {"garbage collector": gc.isenabled(), "profile": sys.getprofile()}
    return [{**collected, **process_state()}, *(dict(vars(space)) for space in SPACES)]


def _changed(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> dict[str, Any]:
    """By name: what it was and is. Not what other libraries replace for good, nor what an import adds."""
    changed = {}
    for space, (old, new) in zip(("process", *(space.__name__ for space in SPACES)), zip(before, now)):
        for name in old.keys() & new.keys():
            values = (old[name], new[name])
            of_space = space != "process"
            if of_space and not all(callable(one) and not isinstance(one, type) for one in values):
                continue
            if of_space and any(map(_of_other_library, values)):
                continue
            if values[0] is not values[1] and (of_space or values[0] != values[1]):
                changed[f"{space}.{name}"] = values
    return changed


def _of_other_library(function: Any) -> bool:
    return (
        getattr(function, "__globals__", {})
        .get("__name__", "")
        .startswith(("torch._dynamo.", "torch._compile", "lightning."))
    )


@pytest.fixture(autouse=True, scope="module")
def memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """What a file of tests has compiled is gone behind it: programs, which refer to themselves in circles, and the
    modules that csc has imported for them. What is free goes back to the system: each worker runs thousands of tests.
    """
    stash = request.config.stash
    before = stash.setdefault(RESIDENT, _resident())
    yield
    if _resident() > before + GROWN:
        for name in [name for name in sys.modules if name.startswith("_csc_program_")]:
            del sys.modules[name]
        gc.collect()
        if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
            libc.malloc_trim(0)
        stash[RESIDENT] = _resident()


def _resident() -> int:
    """Bytes of memory that this process has now; 0 where the system does not say so in a file."""
    file = Path("/proc/self/statm")
    return int(file.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if file.exists() else 0


@pytest.fixture(scope="module")
def traces() -> Iterator[None]:
    """For files that are about what is made of a trace, not about tracing: models that other tests of this run have
    traced, in any of its processes, are not traced again. Nothing is left of it after the run.
    """
    with kept_traces():
        yield
