"""When a program's functions are compiled, and when it switches to them. Nothing here runs Inductor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
NOTHING, BUSY, READY, PREPARES = StepVote(), StepVote(busy=True), StepVote(ready=True), StepVote(prepares=True)


class Function:
    """In place of a fused one."""

    name = "layer.forward"

    def __init__(self, orders: list[Any]) -> None:
        self.on, self._orders = False, orders
        self.rows: list[FusedRow] = []
        self.differs: list[str] = []
        self.untried: list[str] = []
        self.tried: list[bool] = []
        self.watches: list[bool] = []
        self.refused: dict[str, str] = {}
        self.there = True

    def tries(self, tries: bool) -> None:
        self.tried.append(tries)

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
    return FusedProgram(1, [function], Path("nowhere"), None, CPU, background, later=True)


def first(functions: list[Any], kept: KeptProgram | None = None, **given: Any) -> FusedProgram:
    return FusedProgram(0, functions, Path("nowhere"), kept, CPU, Background(), **given)  # type: ignore[arg-type]


def step(
    program: FusedProgram, others: StepVote = NOTHING, words: list[FusedWord] | None = None, calls: Any = None
) -> None:
    """others: what other ranks say of the step; words: of what they know of the program."""
    vote = StepVote.of_any([program.vote, others])
    program.before(lambda: calls or [], vote.busy)
    if vote.prepares or (vote.ready and not vote.busy):
        word = program.word(vote.busy)
        program.settle([*([] if word is None else [word]), *(words or [])], vote.busy)
    program.after()


def test_a_size_is_compiled_once_it_was_met_and_waits_for_every_rank(orders: list[Any]) -> None:
    function, background = Function(orders), Background()
    program = later(function, background)
    for _ in range(MET - 1):
        step(program)
    assert not background.orders and program.vote == NOTHING
    step(program)
    assert background.orders == orders and program.vote == BUSY and function.watches == [True]
    background.made(orders[0], "")
    step(program)
    assert program.vote == BUSY and not function.on
    background.made(orders[1], "")
    assert not function.tried
    step(program, BUSY)  # another rank is not done
    assert program.vote == READY and not function.on and function.tried == [True, False]
    step(program, BUSY)
    assert program.vote == READY and not function.on
    step(program)
    assert function.on and function.tried == [True, False] and program.vote == NOTHING


def test_what_differs_is_used_on_no_rank(orders: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """A step that failed in its middle is tried again. The rank that has found it, and one that has not."""
    functions = [Function([]), Function([])]
    programs = [later(function, Background()) for function in functions]
    for program in programs:
        for _ in range(MET):
            step(program)
    programs[0].before(list, hold=True)  # and fails
    assert programs[0].vote == BUSY
    functions[0].differs = ["layer.forward: result 0 differs by 1.0e+00, more than 1.0e-05"]
    for program in programs:
        step(program)
        assert program.vote == READY
    assert functions[0].tried == [True, True, False]
    word = programs[0].word(hold=False)
    assert word is not None
    step(programs[0])
    step(programs[1], words=[word])
    assert not functions[0].on and not functions[1].on and programs[0].vote == programs[1].vote == NOTHING
    assert caplog.messages == 2 * [
        "fuse: all functions run as they are for sizes that came later, as layer.forward: result 0 differs by 1.0e+00, "
        "more than 1.0e-05"
    ]


def test_what_fails_in_the_background_is_a_line_of_the_log(orders: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """And runs as it is on every rank."""
    function, other = Function(orders), Function([])
    background = Background()
    program = later(function, background)
    for _ in range(MET):
        step(program)
    background.made(orders[0], "CppCompileError: no\nmore")
    background.made(orders[1], "")
    step(program)
    word = program.word(hold=False)
    assert word is not None and word.refused == {"layer.forward form a": "CppCompileError: no"}
    step(program)
    assert function.on and function.refused == {"form a": "CppCompileError: no"}
    assert caplog.messages == ["fuse: layer.forward runs as it is for sizes that came later: CppCompileError: no"]
    there = later(Function(orders), background)
    for _ in range(MET):
        step(there)
    for order in orders:
        background.made(order, "")
    step(there)
    step(there, words=[word])
    (function,) = there._functions  # type: ignore[assignment]
    assert function.on and function.refused == {"form a": "CppCompileError: no"} and not other.on
    assert caplog.messages[1:] == [
        "fuse: layer.forward runs as it is for sizes that came later, as on another rank: CppCompileError: no"
    ]


def test_what_is_not_called_in_the_step_that_tries_it_is_not_used(orders: list[Any]) -> None:
    function, background = Function(orders), Background()
    program = later(function, background)
    for _ in range(MET):
        step(program)
    for order in orders:
        background.made(order, "")
    function.untried = ["form b"]
    for _ in range(2):
        step(program)
    assert function.on and function.refused == {"form b": "it was not called in the step that tries it"}


def test_what_is_kept_already_is_switched_to_without_a_process(orders: list[Any]) -> None:
    """What is damaged is compiled again."""
    for there in (True, False):
        function, background = Function(orders), Background()
        function.there = there
        for order in orders:
            order.is_kept = True
        program = later(function, background)
        for _ in range(MET):
            step(program)
        assert background.orders == ([] if there else orders)
        function.there = True
        for order in background.orders:
            background.made(order, "")
        for _ in range(2):
            step(program)
        assert function.on


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


def no(*_: Any) -> None:
    raise RuntimeError("data-dependent")


CALLS = [(None, {}, {})]


def test_where_a_rehearsal_fails_the_first_step_runs_as_it_is(
    orders: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second one waits for the compiler and tries what it made; the third one takes it."""
    caplog.set_level("INFO", "csc")
    monkeypatch.setattr(fusing, "rehearse", no)
    function = Function(orders)
    program = first([function])
    background: Any = program._background
    step(program, calls=CALLS)
    assert "the first step runs as it is" in caplog.text and "RuntimeError: data-dependent" in caplog.text
    assert function.watches == [False, True] and background.orders == orders and not function.on
    monkeypatch.setattr(program._made, "wait", lambda: [background.made(one, "") for one in orders])
    step(program)
    assert function.tried == [True, False] and not function.on
    step(program)
    assert function.on and program.vote == NOTHING


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


def test_without_a_compiler_no_later_size_is_compiled(orders: list[Any]) -> None:
    function, background = Function(orders), Background()
    program = FusedProgram(1, [function], Path("nowhere"), None, CPU, background, without="none", later=True)  # type: ignore
    for _ in range(MET + 3):
        step(program)
    assert not background.orders and not function.watches and program.vote == NOTHING
    assert program.word(hold=False) is not None, "for ranks that have one"


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
