"""When a program's functions are compiled, and when it switches to them. Nothing here runs Inductor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from csc.commands.tables import fused_table
from csc.runtime import fusing
from csc.runtime.fusing import (
    AS_IT_IS,
    COMPILED,
    MET,
    FusedProgram,
    FusedRow,
    FusedWord,
    KeptProgram,
    rows_of,
)
from csc.runtime.meeting import StepVote

CPU = torch.device("cpu")
NOTHING, PREPARES = StepVote(), StepVote(prepares=True)


class Function:
    """In place of a fused one."""

    name = "layer.forward"

    def __init__(self, orders: list[Any]) -> None:
        self.on, self._orders = False, orders
        self.rows: list[FusedRow] = []
        self.watches: list[bool] = []
        self.refused: dict[str, str] = {}
        self.there = True

    def watch(self, repeats: bool) -> None:
        self.watches.append(repeats)

    def watched(self) -> list[Any]:
        return self._orders

    def take(self, order: Any, how: str) -> str:
        return "" if self.there else "what was compiled is not to be read"

    def refuse(self, form: str, why: str) -> bool:
        new = form not in self.refused
        self.refused.setdefault(form, why)
        return new


@pytest.fixture(autouse=True)
def built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "settings", lambda folder, on_cpu: {})


class Order:
    shown, is_kept = "layer.forward", False
    structure, layouts = None, ()

    def __init__(self, key: str) -> None:
        self.key, self.form = key, f"form {key}"


@pytest.fixture
def orders() -> list[Any]:
    return [Order("a"), Order("b")]


def later(function: Any, **given: Any) -> FusedProgram:
    return FusedProgram(1, [function], Path("nowhere"), None, CPU, later=True, **given)


def first(functions: list[Any], kept: KeptProgram | None = None, **given: Any) -> FusedProgram:
    return FusedProgram(0, functions, Path("nowhere"), kept, CPU, **given)


def step(
    program: FusedProgram, others: StepVote = NOTHING, words: list[FusedWord] | None = None, calls: Any = None
) -> None:
    """others: what other ranks say of the step; words: of what they know of the program."""
    speaks = program.vote.prepares
    if speaks or others.prepares:
        if speaks:
            program.before(lambda: calls or [])
        program.settle([*([program.word()] if speaks else []), *(words or [])], speaks)
    program.after()


@pytest.mark.usefixtures("rehearsed")
def test_sizes_that_come_later_are_compiled_in_the_fifth_step_with_them(orders: list[Any]) -> None:
    """Whatever other ranks say before."""
    function = Function(orders)
    program = later(function)
    for others in (NOTHING, PREPARES, NOTHING, NOTHING)[:MET]:
        step(program, others, [FusedWord(0, (0,))])
    assert not function.watches and not function.on and not program.is_settled
    step(program, calls=CALLS)
    assert function.on and function.watches == [False] and program.vote == NOTHING


@pytest.mark.usefixtures("rehearsed")
def test_a_rank_that_does_not_step_with_a_program_does_not_switch(orders: list[Any]) -> None:
    """It remembers what the others have said for when it does."""
    function = Function(orders)
    program = later(function)
    program.settle([FusedWord(1, (0,), refused={"layer.forward": "OSError: no space left"})], is_stepped=False)
    assert not program.is_settled
    for _ in range(MET + 1):
        step(program, calls=CALLS)
    assert function.on and set(function.refused.values()) == {"OSError: no space left"}


@pytest.mark.usefixtures("rehearsed")
def test_a_step_that_fails_is_no_step_with_a_size(orders: list[Any]) -> None:
    """What was prepared in it is not prepared again."""
    function = Function(orders)
    program = later(function)
    for _ in range(MET):
        step(program)
    program.before(lambda: CALLS)  # and fails
    step(program, calls=CALLS)
    assert function.on and function.watches == [False]


def test_what_is_kept_is_not_made_again(orders: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged is."""
    made: list[Any] = []
    monkeypatch.setattr(fusing, "rehearse", lambda *_: None)
    monkeypatch.setattr(fusing, "make_side_by_side", lambda left, *_: made.append(left))
    for there in (True, False):
        function = Function(orders)
        function.there = there
        function.make = lambda order, wait, function=function: setattr(function, "there", True)  # type: ignore[attr-defined]
        for order in orders:
            order.is_kept = True
        step(first([function]), calls=CALLS)
        assert function.on and made.pop() == ([] if there else orders)


def no(*_: Any) -> None:
    raise RuntimeError("data-dependent")


CALLS = [(None, {}, {})]


def test_where_a_rehearsal_fails_the_first_step_runs_as_it_is(
    orders: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one compiles what it called, and takes it; a step that failed notes nothing."""
    caplog.set_level("INFO", "csc")
    monkeypatch.setattr(fusing, "rehearse", no)
    made: list[Any] = []
    monkeypatch.setattr(fusing, "make_side_by_side", lambda left, *_: made.extend(left))
    function = Function(orders)
    program = first([function])
    program.before(lambda: CALLS)  # and fails
    step(program, calls=CALLS)
    assert caplog.text.count("the next step runs as it is") == 1 and "RuntimeError: data-dependent" in caplog.text
    assert function.watches == [False, True, True] and not made and not function.on
    step(program)
    assert function.on and made == orders and program.vote == NOTHING


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "rehearse", lambda *_: None)
    monkeypatch.setattr(fusing, "make_side_by_side", lambda *_: None)


@pytest.mark.usefixtures("rehearsed")
def test_what_another_rank_notes_this_one_notes_too(orders: list[Any]) -> None:
    """If it has the same stages."""
    for positions, same in ((0,), True), ((1,), False):
        function = Function(orders)
        program = first([function])
        step(program, PREPARES, [FusedWord(0, positions, notes=True)], CALLS)
        assert function.on is not same and function.watches == [False, True][: 1 + same]


@pytest.mark.usefixtures("rehearsed")
def test_what_another_rank_cannot_compile_runs_as_it_is(orders: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A function, whatever its form, or all."""
    function, other = Function(orders), Function(orders)
    step(
        first([function]), words=[FusedWord(0, (0,), refused={"layer.forward": "OSError: no space left"})], calls=CALLS
    )
    assert function.on and function.refused == dict.fromkeys(("form a", "form b"), "OSError: no space left")
    assert "layer.forward runs as it is, as on another rank: OSError: no space left" in caplog.text
    step(first([other]), words=[FusedWord(0, (1,), "", "there is no C++ compiler")], calls=CALLS)
    assert not other.on and "all functions run as they are, as there is no C++ compiler" in caplog.text
    unlike = Function(orders)
    step(first([unlike]), words=[FusedWord(0, (0,), "other")], calls=CALLS)
    assert not unlike.on and "not all ranks' CPUs and C++ compilers have the same vector instructions" in caplog.text
    alone = Function(orders)
    step(first([alone], without="there is none"), calls=CALLS)
    assert not alone.on and not alone.watches


@pytest.mark.usefixtures("rehearsed")
def test_what_a_process_beside_cannot_make_is_made_here(orders: list[Any]) -> None:
    """And what is neither runs as it is."""

    class Made(Function):
        there = False

        def __init__(self, orders: list[Any], error: Exception | None) -> None:
            super().__init__(orders)
            self.error, self.there = error, False

        def make(self, order: Any, wait: bool) -> None:
            assert wait
            if self.error is not None:
                raise self.error
            self.there = True

    good, bad = Made(orders, None), Made(orders, RuntimeError("no\nmore"))
    step(first([good]), calls=CALLS)
    assert good.on and not good.refused
    step(first([bad]), calls=CALLS)
    assert bad.on and bad.refused == dict.fromkeys(("form a", "form b"), "RuntimeError: no")


def test_without_a_compiler_no_later_size_is_compiled(orders: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """Of which the warning of the first size has told."""
    function = Function(orders)
    program = later(function, without="none")
    for _ in range(MET + 1):
        step(program)
    assert program.is_settled and not function.on and not function.watches and not caplog.messages


def test_no_function_stays_watched(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One left behind would give a real step tensors without values."""

    class Failing(Function):
        watched_now = False

        def watch(self, repeats: bool) -> None:
            self.watched_now = True

        def watched(self) -> list[Any]:
            self.watched_now = False
            raise RuntimeError("no working C++ compiler")

    monkeypatch.setattr(fusing, "rehearse", lambda *_: None)
    monkeypatch.setattr(fusing, "settings", no)
    functions = [Failing([]), Failing([])]
    program = first(functions)
    step(program, calls=CALLS)
    assert not any(one.watched_now for one in functions)
    assert caplog.messages == 2 * ["fuse: layer.forward runs as it is: RuntimeError: no working C++ compiler"]


@pytest.mark.usefixtures("rehearsed")
def test_a_step_does_without_a_folder_for_what_was_compiled(tmp_path: Path) -> None:
    """There is none where no C++ compiler is, or once somebody has cleared the cache."""
    for functions in ([], [Function([])]):
        for function in functions:
            function.rows = [FusedRow("layer.forward", COMPILED, 1.5)]
        step(first(functions, KeptProgram(tmp_path, "a-b")), calls=CALLS)
    assert not any(tmp_path.iterdir())


@pytest.mark.usefixtures("rehearsed")
def test_what_a_start_has_compiled_is_told_to_later_ones(tmp_path: Path) -> None:
    """Of the same program alone; its first step writes it. What is damaged is nobody's error."""
    (tmp_path / "functions").mkdir()
    function = Function([])
    function.rows = [FusedRow("layer.forward", COMPILED, 1.5), FusedRow("head.forward", AS_IT_IS, 0.0, "no compiler")]
    fingerprint = "a" * 64
    kept = KeptProgram(tmp_path, f"{fingerprint[:32]}-b")
    assert rows_of(tmp_path, fingerprint) == [] and kept.forms() is None
    step(first([function], kept), calls=CALLS)
    assert rows_of(tmp_path, fingerprint) == function.rows and kept.forms() == []
    assert rows_of(tmp_path, "c" * 64) == []
    assert [cells[0] for cells, _ in fused_table(function.rows)._rows] == ["layer.forward", "head.forward", "all"]
    assert "products by oneDNN" not in fused_table(function.rows).headings
    function.rows[0] = FusedRow("layer.forward", COMPILED, 1.5, products=7)
    assert [cells[2] for cells, _ in fused_table(function.rows)._rows] == ["7", "", "7"]
    (file,) = (tmp_path / "functions").iterdir()
    for text in (file.read_text()[:-9], "[]", "{}", '{"rows": [{"x": 1}], "forms": [3]}', "\0"):
        file.write_text(text)
        assert rows_of(tmp_path, fingerprint) == [] and kept.forms() is None


def test_what_an_earlier_start_was_called_with_is_not_rehearsed(
    orders: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fusing, "make_side_by_side", lambda *_: None)
    monkeypatch.setattr(fusing, "rehearse", lambda *_: None)
    (tmp_path / "functions").mkdir()
    kept = KeptProgram(tmp_path, "a-b")
    function = Function(orders)
    function.rows = [FusedRow("layer.forward", COMPILED, 1.5)]
    step(first([function], kept), calls=CALLS)
    monkeypatch.setattr(fusing, "rehearse", no)
    again = Function(orders)
    again.order = lambda structure, layouts: orders[0]  # type: ignore[attr-defined]
    step(first([again], kept), calls=CALLS)
    assert again.on and not again.watches
