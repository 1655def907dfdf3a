"""Which functions are compiled, and what happens with those that cannot be. Nothing here runs Inductor."""

from __future__ import annotations

import linecache
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from csc.runtime import compiled_function, inductor

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
    monkeypatch.setattr(compiled_function, "vector_sets_are_proven", lambda: False)
    file = tmp_path / "linear.py"
    file.write_text(textwrap.dedent(LAYER))
    module = ModuleType("written.layers.linear")
    module.__file__ = str(file)
    exec(compile(LAYER, str(file), "exec"), module.__dict__)
    sys.modules["written.layers.linear"] = module
    yield module
    del sys.modules["written.layers.linear"]


def test_without_a_compiler_functions_run_as_they_are(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inductor.shutil, "which", lambda name: None)
    before = layer.forward
    inductor.fused_functions("written", CPU, tmp_path)
    assert layer.forward is before
    assert "there is no C++ compiler on this machine; install g++ or clang" in caplog.text


def test_what_reads_all_of_w_runs_as_it_is(layer: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = layer.backward_input
    inductor.fused_functions("written", CPU, tmp_path)
    assert layer.backward_input is before
    assert isinstance(layer.forward, inductor.Fused)
    assert "fuse: linear.backward_input runs as it is: it uses w otherwise" in caplog.text


def test_what_is_no_full_graph_runs_as_it_is(
    layer: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inductor.fused_functions("written", CPU, tmp_path)
    kept = torch.ones(3, 2)
    for _ in range(2):
        assert torch.equal(layer.backward_weight(kept)["bias"], kept.sum(0))
    assert len([one for one in caplog.records if "linear.backward_weight runs as it is" in one.message]) == 1


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
    inductor.fused_functions("written", CPU, tmp_path)
    assert layer.backward is plain and isinstance(layer.forward, inductor.Fused)
    assert f"linear.backward runs as it is: it uses {what}, and is compiled for" in caplog.text


def test_constants_and_functions_of_the_file_are_its_text(layer: ModuleType, tmp_path: Path) -> None:
    text = "    return scaled(x) + sum(len(SCALE) for _ in range(2))\n"
    rewrite(layer, f"{LAYER}\nSCALE = (2.0, 3)\n\ndef scaled(x):\n    return x * SCALE[0]\n\ndef backward(x):\n{text}")
    inductor.fused_functions("written", CPU, tmp_path)
    assert isinstance(layer.backward, inductor.Fused)


def test_parameters_are_handed_on_by_the_names_in_the_text(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever `w` is, and whatever else it holds."""
    inductor.fused_functions("written", CPU, tmp_path)
    seen = []
    monkeypatch.setattr(layer.forward, "_first", lambda given, _: seen.append(given[1]) or (lambda tensors: tensors[0]))
    w = {"weight": torch.eye(2), "bias": torch.ones(2), "other": torch.ones(9)}
    layer.forward(torch.ones(1, 2), w)
    assert [sorted(one) for one in seen] == [["bias", "weight"]]


def test_later_sizes_are_compiled_by_no_call(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run as they are until they are switched on, and from then on wherever nothing was tried."""
    inductor.fused_functions("written", CPU, tmp_path, later=True)
    x, w = torch.ones(1, 2), {"weight": torch.eye(2), "bias": torch.ones(2)}
    called: list[int] = []

    def near(*tensors: torch.Tensor) -> list[torch.Tensor]:
        called.append(len(tensors[0]))
        return [(tensors[0] + 1) * (1 + 1e-6)]

    kept: list[object] = [inductor.MISSING, inductor.CompiledFunction(near, None, 2.0)]
    monkeypatch.setattr(inductor.KeptFunction, "read", lambda self: kept.pop(0))
    assert torch.equal(layer.forward(x, w), x + 1) and len(kept) == 2
    layer.forward.tries(True)
    for rows in (1, 3, 3):
        assert torch.equal(layer.forward(torch.ones(rows, 2), w), torch.full((rows, 2), 2.0)), "as it is"
    layer.forward.tries(False)
    assert called == [3] and not layer.forward.differs
    layer.forward.on = True
    for rows in (1, 3, 4):
        layer.forward(torch.ones(rows, 2), w)
    assert called == [3, 3]
    assert [(row.name, row.how, row.seconds) for row in layer.forward.rows] == [
        ("linear.forward", "found in the cache", 2.0)
    ]


def test_what_is_watched_is_noted_once_and_run_as_it_is(layer: ModuleType, tmp_path: Path) -> None:
    """In a real step every call runs; in a rehearsal one of each kind. A dimension with one place has no stride."""
    inductor.fused_functions("written", CPU, tmp_path)
    w = {"weight": torch.eye(2), "bias": torch.ones(2)}
    for repeats in (True, False):
        layer.forward.watch(repeats)
        first, second = layer.forward(torch.ones(1, 2), w), layer.forward(torch.zeros(1, 2), w)
        other = layer.forward(torch.ones(4, 2).t()[:2, :1].t(), w)
        assert torch.equal(first, other) and torch.equal(second, torch.ones(1, 2)) == repeats
        orders = {one.key: one for one in layer.forward.watched()}
        assert [(one.name, one.shown, one.is_kept) for one in orders.values()] == [("forward", "linear.forward", False)]
        assert inductor.FunctionOrder.read(next(iter(orders.values())).line()) == next(iter(orders.values()))


def test_other_layouts_are_compiled_apart_and_not_without_end(
    layer: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled for one layout would read another one wrongly; what is no tensor is not compiled for."""
    inductor.fused_functions("written", CPU, tmp_path)
    made = []
    monkeypatch.setattr(layer.forward, "_first", lambda given, _: made.append(given[0].stride()))
    w = {"weight": torch.eye(2), "bias": torch.ones(2)}
    layouts = [torch.ones(rows, 2) for rows in range(1, 20)] + [torch.ones(2, 3).t()] * 2
    for x in layouts:
        assert torch.equal(layer.forward(x, w), x + 1)
    assert len(made) == inductor.LAYOUTS
    with pytest.raises(TypeError):
        layer.forward(None, w)


def test_a_program_is_fused_once(layer: ModuleType, tmp_path: Path) -> None:
    inductor.fused_functions("written", CPU, tmp_path)
    first = layer.forward
    inductor.fused_functions("written", CPU, tmp_path, later=True)
    assert layer.forward is first
