"""Which functions are compiled, and what happens with those that cannot be. Nothing here runs Inductor."""

from __future__ import annotations

import linecache
import sys
import textwrap
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from csc.errors import DifferenceError
from csc.runtime import compiled_function, fusing
from csc.runtime.flat_tensors import layouts_of
from csc.runtime.weight_names import under

CPU = torch.device("cpu")
LAYER = """
import torch

calls = []

def forward(x, w):
    return torch.mm(x, w["weight"]) + w["bias"]

def backward_input(saved, w):
    return saved * sum(w.values())

def backward_weight(kept):
    if kept.sum() > 100:  # no full graph
        return {}
    return {"bias": kept.sum(0)}
"""


@pytest.fixture
def layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A layer file of a program `written`, imported."""
    monkeypatch.setattr(compiled_function, "vector_sets_are_proven", lambda _: False)
    file = tmp_path / "linear.py"
    file.write_text(textwrap.dedent(LAYER))
    module = ModuleType("written.layers.linear")
    module.__file__ = str(file)
    exec(compile(LAYER, str(file), "exec"), module.__dict__)
    sys.modules["written.layers.linear"] = module
    yield module
    del sys.modules["written.layers.linear"]


def test_without_a_compiler_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing.shutil, "which", lambda name: None)
    assert "there is no C++ compiler on this machine; install g++ or clang" in fusing.lacks(CPU)
    assert not fusing.lacks(torch.device("meta"))


def test_what_reads_all_of_w_runs_as_it_is(layer: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = layer.backward_input
    fusing.fused_functions("written", tmp_path)
    assert layer.backward_input is before
    assert isinstance(layer.forward.__self__, fusing.Fused)
    assert "fuse: linear.backward_input runs as it is: it uses w otherwise" in caplog.text


def test_what_is_no_full_graph_is_not_made(layer: ModuleType, tmp_path: Path) -> None:
    fusing.fused_functions("written", tmp_path)
    kept = torch.ones(3, 2)
    order = layer.backward_weight.__self__.order([None], layouts_of([kept]))
    with pytest.raises(Exception, match="data-dependent"):
        layer.backward_weight.__self__.make(order, wait=True)
    assert layer.backward_weight.__self__.take(order, fusing.COMPILED) == "what was compiled is not to be read"
    layer.backward_weight.__self__.on = True
    for _ in range(2):
        assert torch.equal(layer.backward_weight(kept)["bias"], kept.sum(0))


OUTSIDE = {
    "global calls": "    global calls\n    calls = [*calls, 1]",
    "import time": "    import time",
    "calls": "    hidden = x * len(calls)",
    "print": "    print(x)",
    "open": "    x = x * len(helper())",
}


def rewrite(layer: ModuleType, text: str) -> None:
    """The layer file, and the module that was made of it."""
    file = Path(str(layer.__file__))
    file.write_text(text)
    linecache.checkcache(str(file))
    exec(compile(text, str(file), "exec"), layer.__dict__)


@pytest.mark.parametrize("what", OUTSIDE)
def test_what_uses_more_than_its_arguments_runs_as_it_is(
    layer: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    """It would be compiled as that was once."""
    text = f"{LAYER}\ndef helper():\n    return open('x').read()\n\ndef backward(x):\n{OUTSIDE[what]}\n    return x\n"
    rewrite(layer, text)
    plain = layer.backward
    fusing.fused_functions("written", tmp_path)
    assert layer.backward is plain and isinstance(layer.forward.__self__, fusing.Fused)
    assert f"linear.backward runs as it is: it uses {what}, and is compiled for" in caplog.text


def test_constants_and_functions_of_the_file_are_its_text(layer: ModuleType, tmp_path: Path) -> None:
    text = "    return scaled(x) + sum(len(SCALE) for _ in range(2))\n"
    rewrite(layer, f"{LAYER}\nSCALE = (2.0, 3)\n\ndef scaled(x):\n    return x * SCALE[0]\n\ndef backward(x):\n{text}")
    fusing.fused_functions("written", tmp_path)
    assert isinstance(layer.backward.__self__, fusing.Fused)


def taken(layer: ModuleType, monkeypatch: pytest.MonkeyPatch, *given: torch.Tensor) -> list[list[int]]:
    """forward is compiled for these, and on; the sizes of what is given to what stands for it."""
    called: list[list[int]] = []

    def near(*tensors: torch.Tensor) -> list[torch.Tensor]:
        called.append([one.numel() for one in tensors])
        return [(tensors[0] + 1) * (1 + 1e-6)]

    monkeypatch.setattr(fusing.KeptFunction, "read", lambda self: fusing.CompiledFunction(near, None, 2.0))
    for one in given:
        layouts = layouts_of([one, torch.ones(2), torch.eye(2)])
        assert not layer.forward.__self__.take(
            layer.forward.__self__.order([None, {"bias": None, "weight": None}], layouts), "compiled"
        )
    layer.forward.__self__.on = True
    return called


def test_parameters_are_handed_on_by_the_names_in_the_text(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `w` is, and whatever else it holds."""
    fusing.fused_functions("written", tmp_path)
    called = taken(layer, monkeypatch, torch.ones(1, 2))
    w = {"weight": torch.eye(2), "bias": torch.ones(2), "other": torch.ones(9)}
    layer.forward(torch.ones(1, 2), w)
    assert called == [[2, 2, 4]]


def test_functions_run_compiled_once_they_are_on(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For what they were taken for, and not where another rank cannot."""
    fusing.fused_functions("written", tmp_path)
    x, w = torch.ones(3, 2), {"weight": torch.eye(2), "bias": torch.ones(2)}
    called = taken(layer, monkeypatch, x, torch.ones(5, 2))
    layer.forward.__self__.on = False
    assert torch.equal(layer.forward(x, w), x + 1) and not called
    refused = list(layer.forward.__self__._taken)[1]
    assert layer.forward.__self__.refuse(refused, "why") and not layer.forward.__self__.refuse(refused, "why")
    layer.forward.__self__.on = True
    for rows in (1, 3, 3, 4, 5):
        found = layer.forward(torch.ones(rows, 2), w)
        assert bool((found > 2).all()) is (rows == 3), "the first time, too"
    assert called == [[6, 2, 4]] * 2
    told = [(row.name, row.how, row.seconds, row.why) for row in layer.forward.__self__.rows]
    assert told[:2] == [("linear.forward", "compiled", 2.0, ""), ("linear.forward", "runs as it is", 0.0, "why")]
    assert {row[3] for row in told[2:]} == {"other layouts of its arguments came"}


@pytest.mark.parametrize("sizes", ["", "x [3, 2]"])
def test_a_function_that_is_compiled_wrongly_is_never_used(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sizes: str
) -> None:
    """Each layout is compared, once; after a difference every call is refused, also one that would not differ."""
    fusing.fused_functions("written", tmp_path, sizes)
    w = {"weight": torch.eye(2), "bias": torch.ones(2)}

    def wrong(x: torch.Tensor, *_: torch.Tensor) -> list[torch.Tensor]:
        called.append(len(x))
        result = x + 1
        result[-1, -1] += float(len(x) == 3) * x[0, 0]
        return [result]

    called: list[int] = []
    taken(layer, monkeypatch, torch.ones(5, 2), torch.ones(3, 2))
    layer.forward.__self__._taken = dict.fromkeys(layer.forward.__self__._taken, fusing.CompiledFunction(wrong, None))
    layer.forward(torch.ones(5, 2), w)
    for x in (torch.ones(3, 2), torch.zeros(3, 2)):
        with pytest.raises(DifferenceError) as raised:
            layer.forward(x, w)
        of_sizes = f" for microbatches of {sizes}" if sizes else ""
        assert raised.value.what == (
            f"linear.forward, compiled by Inductor, does not compute what the layer file says{of_sizes}: result 0 "
            "differs by 2.0e-01, more than 1.0e-05"
        )
        assert raised.value.where == f"{layer.__file__}:6" and "fuse=False" in raised.value.remedy
    layer.forward(torch.ones(5, 2), w)
    assert called == [5, 3, 5]


def test_the_short_way_is_for_the_same_layouts_alone(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once what wraps Inductor's code is known to do nothing. Parameters come below a prefix, as in rank files, or as
    any mapping; who is watched or refused goes no short way.
    """
    fusing.fused_functions("written", tmp_path)
    x, owned = torch.ones(3, 2), {"a.weight": torch.eye(2), "bias": torch.ones(2)}
    called = taken(layer, monkeypatch, x)
    short: list[int] = []

    def code(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        short.append(len(tensors))
        return [tensors[0] + 1]

    (compiled,) = layer.forward.__self__._taken.values()
    compiled.unwrapped.code = code
    w = under(owned, "a.")
    for given in (w, w, {"weight": torch.eye(2), "bias": torch.ones(2)}):
        assert torch.equal(layer.forward(x, given), x + 1)
    assert short == [3, 3, 3] and not called and len(layer.forward.__self__._short) == 1
    others = [torch.ones(4, 2), torch.ones(2, 3).t(), torch.ones(3, 2, dtype=torch.float64)]
    for other in others:
        wide = {name: one.to(other.dtype) for name, one in owned.items()}
        assert torch.equal(layer.forward(other, under(wide, "a.")), other + 1)
    assert short == [3, 3, 3]
    layer.forward.__self__.watch(True)
    layer.forward(x, w)
    assert short == [3, 3, 3] and layer.forward.__self__.watched()
    layer.forward(x, w)
    (form,) = (form for form, one in layer.forward.__self__._taken.items() if one is compiled)
    assert short == [3] * 4 and layer.forward.__self__.refuse(form, "why")
    assert torch.equal(layer.forward(x, w), x + 1) and short == [3] * 4


def test_what_is_handed_on_is_freed_as_soon_as_it_is_read(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As what F kept is, in the midst of B."""
    fusing.fused_functions("written", tmp_path)
    taken(layer, monkeypatch, torch.ones(3, 2))
    kept, gone = list[torch.Tensor](), list[bool]()

    def code(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        result = [tensors[0] + 1]
        tensors.clear()
        gone.append(handed_on() is None)
        return result

    (compiled,) = layer.forward.__self__._taken.values()
    compiled.unwrapped.code = code
    w = under({"a.weight": torch.eye(2), "a.bias": torch.ones(2)}, "a.")
    for _ in range(4):
        kept.append(torch.ones(3, 2))
        handed_on = weakref.ref(kept[0])
        found = layer.forward(kept.pop(), w)  # not in an assert, which would hold it
        assert torch.equal(found, torch.full((3, 2), 2.0))
    assert gone == [False, True, True, True], "by the short way"


def test_what_is_watched_is_noted_once_and_run_as_it_is(layer: ModuleType, tmp_path: Path) -> None:
    """In a real step every call runs; in a rehearsal one of each kind. A dimension with one place has no stride."""
    fusing.fused_functions("written", tmp_path)
    w = {"weight": torch.eye(2), "bias": torch.ones(2)}
    for repeats in (True, False):
        layer.forward.__self__.watch(repeats)
        first, second = layer.forward(torch.ones(1, 2), w), layer.forward(torch.zeros(1, 2), w)
        other = layer.forward(torch.ones(4, 2).t()[:2, :1].t(), w)
        assert torch.equal(first, other) and torch.equal(second, torch.ones(1, 2)) == repeats
        orders = {one.key: one for one in layer.forward.__self__.watched()}
        assert [(one.name, one.shown, one.is_kept) for one in orders.values()] == [("forward", "linear.forward", False)]
        assert fusing.FunctionOrder.read(next(iter(orders.values())).line()) == next(iter(orders.values()))


def test_other_layouts_run_as_they_are(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is compiled for one layout would read another one wrongly, and nothing was compared with it."""
    fusing.fused_functions("written", tmp_path)
    called = taken(layer, monkeypatch, torch.ones(2, 2))
    w = {"weight": torch.eye(2), "bias": torch.ones(2)}
    others = [torch.ones(rows, 2) for rows in range(3, 90)] + [torch.ones(2, 2).t(), torch.ones(1, 2).expand(2, 2)] * 2
    for x in (*others, torch.ones(2, 2, dtype=torch.float64)):
        given = w if x.dtype == torch.float32 else {name: one.double() for name, one in w.items()}
        assert torch.equal(layer.forward(x, given), x + 1)
    assert not called and len(layer.forward.__self__.rows) <= fusing.SEEN + 1
    assert "linear.forward runs as it is with layouts that it was not compiled for" in caplog.text
    layer.forward(torch.ones(2, 2), w)
    assert not called, "so many that none is looked up any more"
    with pytest.raises(TypeError):
        layer.forward(None, w)


def test_what_is_refused_whole_says_so_once(
    layer: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fusing.fused_functions("written", tmp_path)
    caplog.clear()
    layer.forward.__self__.refuse(fusing.ALL, "no compiler")
    layer.forward.__self__.on = True
    x, w = torch.ones(2, 2), {"weight": torch.eye(2), "bias": torch.ones(2)}
    assert torch.equal(layer.forward(x, w), x + 1) and not caplog.messages
    assert [row.why for row in layer.forward.__self__.rows] == ["no compiler"]


def test_a_program_is_fused_once(layer: ModuleType, tmp_path: Path) -> None:
    fusing.fused_functions("written", tmp_path)
    first = layer.forward
    fusing.fused_functions("written", tmp_path)
    assert layer.forward is first
