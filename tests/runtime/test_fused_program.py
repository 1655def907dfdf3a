"""When a program's functions are compiled, and when it switches to them. Nothing here runs Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from csc.commands.fused_table import fused_table
from csc.runtime import fused_program
from csc.runtime.fused_program import MET, FusedProgram
from csc.runtime.inductor import AS_IT_IS, COMPILED, FusedRow

CPU = torch.device("cpu")


class Function:
    """In place of a fused one."""

    def __init__(self, orders: list[Any]) -> None:
        self.on, self._orders, self.ordered = False, orders, set[str]()
        self.rows: list[FusedRow] = []
        self.differs: list[str] = []
        self.tried: list[bool] = []

    def tries(self, tries: bool) -> None:
        self.tried.append(tries)

    def watch(self, repeats: bool) -> None:
        assert repeats

    def watched(self) -> list[Any]:
        return self._orders


class Order:
    shown, is_kept = "layer.forward", False

    def __init__(self, key: str) -> None:
        self.key = key


class Background:
    """What it was asked for, and whom to answer."""

    def __init__(self) -> None:
        self.orders: list[Any] = []

    def make(self, orders: list[Any], made: Callable[[Any, str], None]) -> None:
        self.orders, self.made = orders, made


@pytest.fixture
def orders() -> list[Any]:
    return [Order("a"), Order("b")]


def later(function: Any, background: Any) -> FusedProgram:
    return FusedProgram([function], Path("nowhere"), "", CPU, background)


def step(program: FusedProgram, hold: bool = False) -> None:
    program.before(hold or program.busy)
    program.after()


def test_a_size_is_compiled_once_it_was_met_and_waits_for_every_rank(orders: list[Any]) -> None:
    function, background = Function(orders), Background()
    program = later(function, background)
    for _ in range(MET - 1):
        step(program)
    assert not background.orders and not program.busy
    step(program)
    assert background.orders == orders and program.busy
    background.made(orders[0], "")
    step(program)
    assert program.busy and not function.on
    background.made(orders[1], "")
    assert not function.tried
    step(program, hold=True)  # another rank is not done
    assert not program.busy and not function.on and function.tried == [True, False]
    step(program, hold=True)
    assert not program.busy and not function.on
    step(program)
    assert function.on and function.tried == [True, False]


def test_what_differs_is_used_on_no_rank(orders: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A rank that has found one is busy from then on, and a step that failed in its middle is tried again."""
    function, background = Function([]), Background()
    program = later(function, background)
    for _ in range(MET):
        step(program)
    program.before(hold=program.busy)  # and fails
    assert program.busy
    function.differs = ["layer.forward: result 0 differs by 1.0e+00, more than 1.0e-05"]
    for _ in range(3):
        step(program)
        assert program.busy and not function.on
    assert function.tried == [True, True, False]
    assert caplog.messages == [
        "fuse: all functions run as they are for sizes that came later, as layer.forward: result 0 differs by 1.0e+00, "
        "more than 1.0e-05"
    ]


def test_what_fails_in_the_background_is_a_line_of_the_log(orders: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    function, background = Function(orders), Background()
    program = later(function, background)
    for _ in range(MET):
        step(program)
    background.made(orders[0], "CppCompileError: no\nmore")
    background.made(orders[1], "")
    for _ in range(2):
        step(program)
    assert function.on
    assert caplog.messages == ["fuse: layer.forward runs as it is for sizes that came later: CppCompileError: no"]


def test_what_is_kept_already_is_switched_to_without_a_process() -> None:
    function, background = Function([]), Background()
    program = later(function, background)
    for _ in range(MET + 2):
        step(program)
    assert function.on and not background.orders


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_the_same_steps_switch_from_run_to_run_where_that_is_wanted(
    orders: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, background = Function(orders), Background()
    program = later(function, background)
    for _ in range(MET):
        step(program)
    waited = []

    def wait() -> None:
        waited.append(1)
        for one in orders:
            background.made(one, "")

    monkeypatch.setattr(program._made, "wait", wait)
    step(program)
    assert waited and not function.on
    step(program)
    assert function.on


def test_a_rehearsal_that_fails_leaves_functions_to_their_first_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def no(*_: Any) -> None:
        raise RuntimeError("data-dependent")

    asked: list[int] = []
    monkeypatch.setattr(fused_program, "rehearse", no)
    monkeypatch.setattr(fused_program, "make_side_by_side", lambda *_: asked.append(1))

    class Called(Function):
        def watch(self, repeats: bool) -> None:
            assert not repeats

    program = FusedProgram([Called([])], Path("nowhere"), "", CPU, None)  # type: ignore[list-item]
    program.prepare(lambda: [(None, {}, {})])  # type: ignore[list-item]
    assert not asked


def test_no_function_stays_watched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One left behind would give a real step tensors without values."""

    class Failing(Function):
        name, watched_now = "layer.forward", False

        def watch(self, repeats: bool) -> None:
            self.watched_now = True

        def watched(self) -> list[Any]:
            self.watched_now = False
            raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(fused_program, "rehearse", lambda *_: None)
    functions = [Failing([]), Failing([])]
    FusedProgram(functions, Path("nowhere"), "", CPU, None).prepare(lambda: [(None, {}, {})])  # type: ignore
    assert not any(one.watched_now for one in functions) and not caplog.messages
    program = later(functions[0], Background())
    for _ in range(MET + 2):
        step(program)
    assert caplog.messages == ["fuse: layer.forward runs as it is: RuntimeError: no working C++ compiler"]


def test_a_step_does_without_a_folder_for_what_was_compiled(tmp_path: Path) -> None:
    """There is none where no C++ compiler is, or once somebody has cleared the cache."""
    for functions in ([], [Function([])]):
        for function in functions:
            function.rows = [FusedRow("layer.forward", COMPILED, 1.5)]
        program = FusedProgram(functions, tmp_path, "a-b", CPU, None)  # type: ignore[arg-type]
        program.prepare(list)
        program.before(hold=False)
        program.after()
    assert not any(tmp_path.iterdir())


def test_what_a_start_has_compiled_is_told_to_later_ones(tmp_path: Path) -> None:
    """Of the same program alone; its first step writes it."""
    (tmp_path / "functions").mkdir()
    function = Function([])
    function.rows = [FusedRow("layer.forward", COMPILED, 1.5), FusedRow("head.forward", AS_IT_IS, 0.0, "no compiler")]
    fingerprint = "a" * 64
    program = FusedProgram([function], tmp_path, f"{fingerprint[:32]}-b", CPU, None)  # type: ignore[list-item]
    assert fused_program.rows_of(tmp_path, fingerprint) == []
    program.prepare(list)
    program.before(hold=False)
    program.after()
    assert fused_program.rows_of(tmp_path, fingerprint) == function.rows
    assert fused_program.rows_of(tmp_path, "c" * 64) == []
    assert [cells[0] for cells, _ in fused_table(function.rows)._rows] == ["layer.forward", "head.forward", "all"]
