"""A contract for each private name of torch in csc/torch_private: a release that changes one fails here, by name."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import sympy
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from csc import cores, devices
from csc.errors import InputError
from csc.torch_private import artifacts as private_artifacts
from csc.torch_private import autograd as private_autograd
from csc.torch_private import distributed_checkpoint as private_checkpoints
from csc.torch_private import dropped_attention as private_attention
from csc.torch_private import exported as private_exported
from csc.torch_private import fast_guards as private_layouts
from csc.torch_private import fast_guards as private_lists
from csc.torch_private import fast_guards as private_versions
from csc.torch_private import hooks as private_hooks
from csc.torch_private import process_state as private_processes
from csc.torch_private import process_state as private_state
from csc.torch_private import real_layouts as private_real_layouts
from csc.torch_private import symbolic_sizes as private_sizes
from csc.torch_private import traces as private_traces
from tests import launching

ROOMS = (
    private_artifacts, private_attention, private_autograd, private_checkpoints, private_exported, private_hooks,
    private_layouts, private_lists, private_processes, private_real_layouts, private_sizes, private_state,
    private_traces, private_versions,
)  # fmt: skip


def test_every_name_has_a_contract_here() -> None:
    """Each function and class of these files, and what they hand on as it is."""
    tested = {name.removeprefix("test_").replace("_", "") for name in globals() if name.startswith("test_")}
    own = {
        name for room in ROOMS for name, one in vars(room).items() if getattr(one, "__module__", "") == room.__name__
    }
    names = {name for name in own if not name.startswith("_")}.union(*(getattr(room, "__all__", ()) for room in ROOMS))
    assert len(names) > 40
    assert [name for name in sorted(names) if name.lower().replace("_", "") not in tested] == []


def test_op_overload() -> None:
    """What torch.ops.NAMESPACE.OP.OVERLOAD is; it has a schema with names, defaults and mutability."""
    op = torch.ops.aten.add.Tensor
    assert isinstance(op, private_exported.OpOverload)
    assert not isinstance(torch.ops.aten.add, private_exported.OpOverload)
    assert op._schema.name == "aten::add"
    assert op._overloadname == "Tensor"
    assert op.namespace == "aten"
    assert [a.name for a in op._schema.arguments] == ["self", "other", "alpha"]
    assert [a.kwarg_only for a in op._schema.arguments] == [False, False, True]
    assert op._schema.arguments[2].default_value == 1
    assert (op._schema.is_mutable, torch.ops.aten.add_.Tensor._schema.is_mutable) == (False, True)
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten.bernoulli.default.tags
    assert op.overloadpacket is torch.ops.aten.add


def test_fake_tensor_mode() -> None:
    """Ops on fake tensors give shapes, strides and dtypes and no numbers; real constants are let in."""
    mode = private_traces.FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        product = torch.empty(3, 4) @ torch.empty(4, 5)
        strided = torch.empty_strided((2, 3), (1, 2))
    assert isinstance(product, private_traces.FakeTensor)
    assert product.shape == (3, 5)
    assert product.fake_mode is mode
    with mode:
        assert torch.ops.aten.add.Tensor(strided, torch.ones(2, 3)).shape == (2, 3)
    assert strided.stride() == (1, 2)


def _laid_out(layout: str) -> torch.Tensor:
    """(2, 3, 4) between 0 and 1, in memory as the name says."""
    x = torch.rand(2, 3, 4) * 0.8 + 0.1
    return {
        "rows": x,
        "columns": x.mT.contiguous().mT,
        "expanded": x[:, :1].expand(2, 3, 4),
    }[layout]


def _called(operation: Any) -> list[tuple[list[Any], Any]]:
    """Calls of it on tensors of all layouts: (operands, real result)."""
    numbers = {"number": 0.5, "float": 0.5, "int": 1, "bool": False}
    named = {"input_dtype": torch.float32, "training": True}
    arguments = [one for one in operation._schema.arguments if not (one.kwarg_only and one.has_default_value())]
    places = [place for place, one in enumerate(arguments) if str(one.type) in ("Tensor", "Optional[Tensor]")]
    places = [place for place in places if not arguments[place].has_default_value() or "clamp" in str(operation)]
    calls = []
    known = ("rows", "columns") if len(places) > 2 else ("rows", "columns", "expanded")
    for layouts in itertools.product(known, repeat=len(places)):
        operands = [
            named.get(one.name, one.default_value if one.has_default_value() else numbers.get(str(one.type)))
            for one in arguments
        ]
        for place, layout in zip(places, layouts):
            operands[place] = _laid_out(layout)
        if "_weight_norm" in str(operation):
            operands[1] = torch.rand(2, 1, 1)
        calls.append((operands, operation(*operands)))
    return calls


@pytest.mark.parametrize("operation", {**private_real_layouts.LAYOUTS, **private_real_layouts.OF_CPU}, ids=str)
def test_real_layouts(operation: Any) -> None:
    """Fake tensors have the strides of real ones, where torch alone would have others."""
    with torch.random.fork_rng():
        calls = _called(operation)
    of_csc, of_torch = private_traces.FakeTensorMode(), FakeTensorMode()
    for operands, real in calls:
        real = real if isinstance(real, torch.Tensor) else real[0]
        for context, mode in ((contextlib.nullcontext(), of_csc), (private_real_layouts.real_layouts(), of_torch)):
            with context, mode:
                fake = operation(*[mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in operands])
            fake = fake if isinstance(fake, torch.Tensor) else fake[0]
            assert (fake.shape, fake.stride(), fake.dtype) == (real.shape, real.stride(), real.dtype)


@pytest.mark.parametrize("layout", ["rows", "columns", "expanded"])
def test_real_layouts_beside_a_number(layout: str) -> None:
    operation, x = torch.ops.aten.floor_divide.default, _laid_out(layout)
    assert operation in private_real_layouts.LAYOUTS
    with private_traces.FakeTensorMode() as mode:
        fake = operation(mode.from_tensor(x), 2)
    assert (fake.shape, fake.stride()) == (operation(x, 2).shape, operation(x, 2).stride())


@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_real_layouts_without_an_operand(layout: str) -> None:
    x, most = _laid_out(layout), _laid_out("rows")
    with private_traces.FakeTensorMode() as mode:
        fake = torch.ops.aten.clamp.Tensor(mode.from_tensor(x), None, mode.from_tensor(most))
    assert fake.stride() == torch.clamp(x, None, most).stride()


def test_fake_tensor() -> None:
    mode = private_traces.FakeTensorMode()
    fake = mode.from_tensor(torch.zeros(2, 2, dtype=torch.bfloat16))
    assert isinstance(fake, private_traces.FakeTensor)
    assert (fake.dtype, fake.device.type) == (torch.bfloat16, "cpu")


def test_make_fx() -> None:
    """Traces forward and torch.autograd.grad to ATen calls; arguments may be lists; each call has a `val`."""

    def step(values: list[torch.Tensor], seeds: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x = values[0].detach().requires_grad_(True)
        with torch.enable_grad():
            y = torch.ops.aten.sin.default(x)
        return (y, *torch.autograd.grad([y], [x], seeds))

    mode = private_traces.FakeTensorMode()
    with mode:
        graph = private_traces.make_fx(step, tracing_mode="real")([torch.empty(3)], [torch.empty(3)]).graph
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert "aten.sin.default" in targets
    assert "aten.cos.default" in targets
    assert sum(node.op == "placeholder" for node in graph.nodes) == 2
    assert all("val" in node.meta for node in graph.nodes if node.op == "call_function")


def test_unwatched() -> None:
    seen: list[str] = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Mode(), private_traces.unwatched():
        assert torch.zeros(2).shape == (2,)
    assert seen == []


def test_replaying() -> None:
    """Code takes itself for exported, its tensors have no data, and sizes are plain; values become symbols."""
    real = torch.arange(6.0)
    with private_traces.replaying() as fake:
        assert torch.compiler.is_exporting()
        tensor = fake(real)
        assert isinstance(tensor, private_traces.FakeTensor) and type(tensor.shape[0]) is int
        assert (tensor + real).shape == (6,)
        assert isinstance(tensor.sum().item(), torch.SymFloat)
    assert not torch.compiler.is_compiling()


class Alone(nn.Module):
    """Its own code asks whether there is one row of x; within operations torch asks the same of y."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        doubled = x * 2 if x.shape[0] == 1 else x
        return doubled.sum() + y[:, 1:].contiguous().view(-1).sum()


def test_one_is_no_special_size() -> None:
    """A size of 1 gets a symbol that may be any number; without, it is the number."""

    def sizes() -> list[Any]:
        rows = {0: torch.export.Dim.AUTO}
        model = nn.Linear(2, 2)
        exported = torch.export.export(model, (torch.zeros(1, 2),), dynamic_shapes=(rows,), strict=False)
        return [node.meta["val"].shape[0] for node in exported.graph.nodes if node.op == "placeholder"]

    with private_sizes.one_is_no_special_size():
        (symbolic,) = (size for size in sizes() if isinstance(size, torch.SymInt))
    assert symbolic.node.shape_env.var_to_range[symbolic.node.expr].lower == 0
    assert not any(isinstance(size, torch.SymInt) for size in sizes())


def test_conditions_of_models() -> None:
    """Those of the model's own code are told from those that torch makes within an operation."""
    rows = {0: torch.export.Dim.AUTO}
    found: dict[Any, dict[Any, int]] = {}
    with (
        private_sizes.one_is_no_special_size(),
        private_sizes.conditions_of_models(found.__setitem__),
    ):
        exported = torch.export.export(
            Alone(), (torch.zeros(3, 2), torch.zeros(4, 5)), dynamic_shapes=(rows, rows),
            strict=False, prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    x, y = (value.shape[0].node.expr for value in values)
    _, relations = private_sizes.assumed_of_sizes(values[0].fake_mode)
    assert {sympy.Ne(x, 1), sympy.Ne(y, 1)} <= set(relations)
    assert found[sympy.Ne(x, 1)] == {x: 3} and sympy.Ne(y, 1) not in found


def test_each_computed() -> None:
    """Of modes that are made in it, not of others."""
    with private_traces.each_computed():
        within = private_traces.FakeTensorMode()
    assert (within.cache_enabled, private_traces.FakeTensorMode().cache_enabled) == (False, True)


def test_python_kernels() -> None:
    """Where sizes are symbols, operations that are made of others run as torch's Python code for them."""
    environment = ShapeEnv()
    with private_traces.FakeTensorMode(shape_env=environment) as mode:
        fake = mode.from_tensor(torch.ones(6, 4))
        with private_traces.python_kernels():
            graph = private_traces.make_fx(lambda x: x.t().reshape(-1), tracing_mode="real")(fake).graph
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert names[0] == "aten.t.default"
    assert "aten.reshape.default" not in names


def test_is_taken_apart() -> None:
    """Those that may give their argument or a view of it; not those that always compute."""
    aten = torch.ops.aten
    apart = (aten.reshape.default, aten.to.dtype, aten.contiguous.default, aten.dropout.default, aten.chunk.default)
    kept = (aten.linear.default, aten.layer_norm.default, aten.view.default, aten.upsample_bilinear2d.vec)
    assert [private_exported.is_taken_apart(one) for one in apart] == [True] * 5
    assert [private_exported.is_taken_apart(one) for one in kept] == [False] * 4


def test_parts_of() -> None:
    """The same while export has what it gives in its own table, and what the operation gives."""
    aten = torch.ops.aten
    x = torch.linspace(-1, 1, 3)

    class Calls(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.logsigmoid(x)

    operation = aten.log_sigmoid.default
    assert torch.equal(private_exported.parts_of(operation)(x), nn.functional.logsigmoid(x))
    program = torch.export.export(Calls(), (x,)).run_decompositions({operation: private_exported.parts_of(operation)})
    assert "aten.log_sigmoid_forward.default" in [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


def test_unchanged_modules() -> None:
    """A module that is as asked for stays as it is, in a trace too; another dtype, device or layout is a change."""

    class Casting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inner = self.inner.to(x.device).to(torch.float32).float().to(x)
            return self.inner(x)

    x, conv, linear = torch.ones(1, 2), nn.Conv2d(1, 1, 1), nn.Linear(2, 2)
    with private_traces.unchanged_modules():
        torch.export.export(Casting(), (x,), strict=False)
        weight = linear.weight
        assert linear.half().weight.dtype == torch.float16 and linear.float().weight.dtype == torch.float32
        assert linear.weight is weight and nn.Linear(2, 2).to("meta").weight.is_meta
        assert conv.to(memory_format=torch.channels_last) is conv


def test_fx_traceback() -> None:
    """`current_meta` set while tracing: its entry "custom" is copied to the nodes that are made."""

    def step(x: torch.Tensor) -> torch.Tensor:
        with private_traces.fx_traceback.preserve_node_meta():
            before = private_traces.fx_traceback.current_meta
            private_traces.fx_traceback.current_meta = {"custom": {"csc": {"name": "marked"}}}
            y = torch.sin(x)
            private_traces.fx_traceback.current_meta = before
            return torch.cos(y)

    with private_traces.FakeTensorMode():
        graph = private_traces.make_fx(step, tracing_mode="real")(torch.empty(3)).graph
    marks = {str(n.target): n.meta.get("custom", {}).get("csc") for n in graph.nodes if n.op == "call_function"}
    assert marks["aten.sin.default"] == {"name": "marked"}
    assert not marks["aten.cos.default"]


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


def test_hint() -> None:
    """Asking for it makes no guard: the size stays symbolic."""
    seen = []

    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(private_sizes.hint(x.shape[0]))
            return x + 1

    shapes = {"x": {0: torch.export.Dim.AUTO}}
    exported = torch.export.export(Sized(), (torch.ones(3, 2),), dynamic_shapes=shapes, strict=False)
    assert seen == [3] and private_sizes.hint(3) is None
    (node,) = [n for n in exported.graph.nodes if n.op == "placeholder"]
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)


def test_symbols_of() -> None:
    """Of what is computed from two sizes both; of numbers none."""
    found: list[frozenset[str]] = []

    class Sized(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            both = x.shape[0] * y.shape[0] + 1
            found.extend(map(private_sizes.symbols_of, (x.shape[0], y.shape[0], both, x.shape[1], 7, x)))
            return x.sum() + y.sum()

    dims = {"x": {0: torch.export.Dim.AUTO}, "y": {0: torch.export.Dim.AUTO}}
    torch.export.export(Sized(), (torch.zeros(5, 3), torch.zeros(4, 3)), dynamic_shapes=dims, strict=False)
    one, other, both, *none = found[:6]
    assert len(one) == len(other) == 1 and both == one | other and one != other
    assert none == [frozenset()] * 3


def test_as_hinted() -> None:
    """A plain number is itself; a symbol what it is in the batch; one that only values tell, nothing."""
    found = []

    class Selecting(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            selected = x[x > 0]
            found.extend(private_sizes.as_hinted(size) for size in (7, x.shape[0], selected.shape[0]))
            return selected.sum()

    shapes = {"x": {0: torch.export.Dim.AUTO}}
    torch.export.export(Selecting(), (torch.ones(3),), dynamic_shapes=shapes, strict=False)
    assert found == [7, 3, None]


def test_lists_from() -> None:
    """Inside, `tolist()` of a traced tensor is ours; that of real tensors, and afterwards, is torch's."""
    with private_traces.FakeTensorMode():
        fake, other = torch.empty(2, dtype=torch.int64), torch.empty(2, dtype=torch.int64)
    with private_traces.lists_from(lambda tensor, own: [7, 8] if tensor is fake else own()):
        assert fake.tolist() == [7, 8]
        assert torch.arange(2).tolist() == [0, 1]
        with pytest.raises(Exception, match="_local_scalar_dense"):
            other.tolist()
    with pytest.raises(Exception, match="_local_scalar_dense"):
        fake.tolist()


def test_without_messages(caplog: pytest.LogCaptureFixture) -> None:
    """What a fake tensor cannot do is logged outside, and not inside."""
    with private_traces.FakeTensorMode():
        one, other = torch.empty(2), torch.empty(3)
        with private_traces.without_messages(), pytest.raises(RuntimeError):
            torch.ops.aten.add.Tensor(one, other)
        assert not caplog.records
        with pytest.raises(RuntimeError):
            torch.ops.aten.add.Tensor(one, other)
    assert any("failed while attempting to run meta" in record.getMessage() for record in caplog.records)


def test_parameter_reads() -> None:
    """Sees parameters among the arguments of operations, also when no gradient is asked for."""
    linear = nn.Linear(2, 2)
    with private_traces.outside_tracing(), private_traces.ParameterReads() as reads:
        assert torch.equal(torch.arange(3) + 1, torch.tensor([1, 2, 3]))
        assert not reads.any
        with pytest.raises(RuntimeError, match="a parameter is read"):
            linear(torch.ones(1, 2))
    assert reads.any


def test_guard_on_data_dependent_sym_node() -> None:
    """What export raises, somewhere in the chain of causes, for a Python branch on a tensor's values."""
    with pytest.raises(Exception) as caught, private_hooks.no_new_registration_hooks():
        torch.export.export(Branch(), (torch.ones(3),), strict=False)
    chain: list[BaseException] = []
    error: BaseException | None = caught.value
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    assert any(
        isinstance(e, private_sizes.GuardOnDataDependentSymNode) or "data-dependent" in str(e).lower() for e in chain
    )


class NoGrad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
        return x + y


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept and read again, with inputs that are handed on; nothing where nothing is fused; errors of what is there."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    x, file = torch.linspace(-1, 1, 6).view(2, 3), tmp_path / "kept"
    made = private_artifacts.artifact(lambda x: [x.sin() + 1, x], [x], {"cpp.simdlen": 0}, file)
    read = private_artifacts.artifact_of(file, {"cpp.simdlen": 0})
    for one in (made, read):
        assert one is not None
        result, given = one(x)
        assert torch.allclose(result, x.sin() + 1) and given is x
    written = [text for one in (tmp_path / "made").rglob("*.py") if "def call(" in (text := one.read_text())]
    assert written and not any("assert_size_stride(" in text for text in written), "arguments are asked by the caller"
    for alone in (lambda x: [x], lambda x: [x.t() * 2], lambda x: [(x @ x.t()) @ x, x[:1].view(3).exp()]):
        assert private_artifacts.artifact(alone, [x], {}, None) is None
    gains = (torch.ops.aten.mm.default,)
    assert private_artifacts.artifact(lambda x: [x.t() @ x], [x], {}, tmp_path / "product", gains) is not None
    with pytest.raises(RuntimeError):
        private_artifacts.artifact(lambda x: [x] if bool(x.sum() > 0) else [x + 1], [x], {}, None)


def made_and_read(file: Path) -> None:
    """In a process of its own: kept, if it is not there, and read, with a word when it goes through headers."""
    from torch._inductor import codecache

    own = codecache._precompile_header

    def searched(*given: Any, **named: Any) -> Any:
        print("headers", flush=True)
        return own(*given, **named)

    x = torch.linspace(-1, 1, 64)
    if not file.exists():
        private_artifacts.artifact(lambda x: [x.sin() + 1], [x], {"cpp.vec_isa_ok": True}, file)
    codecache._precompile_header = searched
    read = private_artifacts.artifact_of(file, {"cpp.vec_isa_ok": True})
    assert read is not None and torch.allclose(read(x)[0], x.sin() + 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_an_artifact_is_read_with_the_kernels_that_were_compiled_for_it(tmp_path: Path) -> None:
    """Whoever reads it compiles nothing, and goes through the headers once for all processes; what is gone is made."""
    folder = tmp_path / "made"

    def run() -> tuple[bool, set[Path]]:
        said = launching.alone(made_and_read, tmp_path / "kept", TORCHINDUCTOR_CACHE_DIR=str(folder))
        return "headers" in said, set(folder.rglob("*.so"))

    _, made = run()
    assert made and run() == (False, made)
    for file in made:
        file.unlink()
    assert run() == (False, made)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_unwrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own code after one call, with the same bits, also of inputs that are handed on; not of what returns
    views, which torch's wrapper makes, nor while another thread finds out.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "made"))
    x = torch.linspace(-1, 1, 6).view(2, 3)
    functions: dict[str, Callable[..., Any]] = {
        "own": lambda x: [x.sin() + 1, x],
        "view": lambda x: [x.sin() + 1, x.t()],
    }
    for name, function in functions.items():
        made = private_artifacts.artifact(function, [x], {}, tmp_path / name)
        read = private_artifacts.artifact_of(tmp_path / name, {})
        for one in (made, read):
            assert one is not None
            wanted, unwrapped = list(one(x)), private_artifacts.Unwrapped(one)
            with private_artifacts.ASKING:
                assert all(map(torch.equal, unwrapped([x]), wanted)) and unwrapped.code is None
            for _ in range(3):
                given = [x]
                found = unwrapped(given)
                assert all(map(torch.equal, found, wanted))
            assert (unwrapped.code is not None) == (name == "own") and (not given) == (name == "own")
            assert name != "own" or found[1] is x
    plain = private_artifacts.Unwrapped(lambda *given: [given[0] + 1])
    assert torch.equal(plain([x])[0], x + 1) and torch.equal(plain([x])[0], x + 1) and plain.code is None


def test_same_layouts() -> None:
    """What tells tensors apart whose sizes, strides, dtypes, places or gradients differ; nothing else does."""
    given = [torch.ones(2, 3), torch.ones(4)]
    holds = private_layouts.same_layouts(given)
    assert holds(*given) and holds(torch.zeros(2, 3), torch.zeros(4)) and holds(torch.zeros(9)[:6].view(2, 3), given[1])
    others: list[Any] = [
        torch.ones(3, 2), torch.ones(3, 2).t(), torch.ones(2, 3).double(), torch.ones(2, 3, requires_grad=True),
        torch.ones(2, 3, device="meta"), nn.Parameter(torch.ones(2, 3)), (given[0],), {"a": given[0]}, None,
    ]  # fmt: skip
    for other in others:
        assert not holds(other, given[1])
    with private_autograd.below_autograd():
        assert private_layouts.same_layouts(given)(*given)
    with pytest.raises(TypeError, match="length"):
        holds(*given, given[0])
    one = torch.ones(2)
    gone, holds = weakref.ref(one), private_layouts.same_layouts([one])
    del one
    assert gone() is None and holds(torch.ones(2)), "no tensor is held"


def test_artifact_of(tmp_path: Path) -> None:
    """None for what is damaged or not there."""
    file = tmp_path / "kept"
    assert private_artifacts.artifact_of(file, {}) is None
    file.write_bytes(b"something else")
    assert private_artifacts.artifact_of(file, {}) is None


def test_inductor_settings() -> None:
    from torch._inductor import config

    before = private_artifacts.inductor_settings()
    with config.patch({"cpp.simdlen": 0}):
        assert private_artifacts.inductor_settings() != before
    assert private_artifacts.inductor_settings() == before


def imported_without_templates() -> None:
    """In an interpreter of its own: bitsandbytes, which PEFT imports where it is installed, imports Inductor."""
    import copy

    import jinja2

    parsed: list[str] = []
    own = jinja2.Environment.from_string

    def from_string(self: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        parsed.append(source)
        return own(self, source, *args, **kwargs)

    jinja2.Environment.from_string = from_string  # type: ignore[method-assign]
    private_artifacts.inductor_is_imported()
    private_artifacts.inductor_is_imported()
    from torch._inductor.codegen.common import KernelTemplate
    from torch._inductor.kernel.mm import mm_template

    late = copy.copy(mm_template.template)
    assert not parsed and mm_template.template
    assert callable(late.render) and len(parsed) == 1
    assert KernelTemplate._template_from_string("{{ a }}").render(a=3) == "3", "as it was"
    assert isinstance(vars(KernelTemplate)["_template_from_string"], staticmethod)


def test_inductor_is_imported() -> None:
    """Templates are parsed when they are used."""
    code = "from tests.unit.test_torch_private import imported_without_templates; imported_without_templates()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=cores.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_vector_sets_are_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a function for the widest set that the CPU names; not where another set is asked for, nor where it fails."""
    from torch._inductor import cpu_vec_isa

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert private_artifacts.vector_sets_are_proven({})
    named = set(cpu_vec_isa.x86_isa_checker())
    widest = next(one for one in cpu_vec_isa.supported_vec_isa_list if named.issuperset(str(one).split()))
    written = [file.read_text() for file in tmp_path.rglob("*.cpp")]  # torch's own tests of vector sets, too
    (kernel,) = [text for text in written if "tmp0.exp()" in text]
    assert f"x0+=static_cast<int64_t>({widest.nelements()}L)" in kernel
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert not private_artifacts.vector_sets_are_proven({})
    monkeypatch.delenv("ATEN_CPU_CAPABILITY")

    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("does not compile")

    monkeypatch.setattr(private_artifacts, "artifact", broken)
    assert not private_artifacts.vector_sets_are_proven({})


def test_is_no_grad_region() -> None:
    """Export writes the block as a higher-order op: (enabled, body, *operands)."""
    exported = torch.export.export(NoGrad(), (torch.ones(3),), strict=False)
    (node,) = [n for n in exported.graph.nodes if private_exported.is_no_grad_region(n.target)]
    assert node.args[0] is False
    assert hasattr(exported.graph_module, node.args[1].target)
    assert not any(private_exported.is_no_grad_region(n.target) for n in exported.graph.nodes if n is not node)


class Autocast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            y = x * 2
        return x + y


def test_is_autocast_region() -> None:
    """Likewise: (device, dtype, enabled, cache, body, *operands)."""
    exported = torch.export.export(Autocast(), (torch.ones(3),), strict=False)
    (node,) = [n for n in exported.graph.nodes if private_exported.is_autocast_region(n.target)]
    assert node.args[0] == "cpu"
    assert node.args[2] is False
    assert hasattr(exported.graph_module, node.args[4].target)


def test_in_functorch_transform() -> None:
    seen = []
    torch.vmap(lambda x: seen.append(private_traces.in_functorch_transform()) or x)(torch.zeros(2))
    assert seen == [True]
    assert not private_traces.in_functorch_transform()


def test_outside_tracing() -> None:
    """Inside an export, real tensors are computed with for real, and nothing of it is in the graph."""
    seen = []

    class Asks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with private_traces.outside_tracing():
                seen.append((torch.arange(4) * 2).tolist())
            return x + 1

    exported = torch.export.export(Asks(), (torch.zeros(3),), strict=False)
    assert seen == [[0, 2, 4, 6]]
    assert sum(node.op == "call_function" for node in exported.graph.nodes) == 1


def test_modules_called_untraced() -> None:
    """What a module raises inside of it leaves nothing in an export."""

    class Raises(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("refused")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Raises()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with private_traces.modules_called_untraced(), pytest.raises(ValueError, match="refused"):
                self.inner(x)
            return x + 1

    assert torch.export.export(Tries(), (torch.zeros(3),), strict=False).graph is not None


def test_assumed_of_sizes() -> None:
    """`list(x)` specialises x to its rows; equal lengths of two inputs are a condition."""

    class Counts(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return torch.cat(list(x)).sum() + (y + z).sum()

    auto = {0: torch.export.Dim.AUTO}
    exported = torch.export.export(
        Counts(), (torch.zeros(3, 2), torch.zeros(5), torch.zeros(5)), dynamic_shapes=(auto, auto, auto),
        strict=False, prefer_deferred_runtime_asserts_over_guards=True,
    )  # fmt: skip
    values = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"]
    rows, one, other = (str(value.shape[0]) for value in values)
    mode = values[0].fake_mode
    ranges, relations = private_sizes.assumed_of_sizes(mode)
    assert ranges[rows] == (3, 3) and ranges[one][1] is None
    assert one == other or {one, other} in [set(map(str, relation.free_symbols)) for relation in relations]


def test_size_functions() -> None:
    """Functions of sympy numbers, by the names that their classes have."""
    assert all(function.__name__ == name for name, function in private_sizes.SIZE_FUNCTIONS.items())
    size = sympy.Symbol("s", integer=True, positive=True)
    divided = private_sizes.SIZE_FUNCTIONS["FloorDiv"](size, sympy.Integer(4))
    assert divided.subs({size: 11}) == 2 and type(divided).__name__ == "FloorDiv"


def test_below_autograd() -> None:
    """Operators run as they do, and nobody notes what a gradient would need; a write is counted all the same."""
    x = torch.ones(3, requires_grad=True)
    with private_autograd.below_autograd(), torch.no_grad():
        total = (x * 2).sum()
        own = torch.zeros(3).add_(1)
    assert float(total) == 6 and not total.requires_grad and own._version == 1
    assert (x * 2).requires_grad


def test_under_autograd() -> None:
    """Within an operator's kernel, where autograd is off, gradients can be asked for."""

    @torch.library.custom_op("csc_contract::squared_gradient", mutates_args=())
    def gradient(x: torch.Tensor) -> torch.Tensor:
        with private_autograd.under_autograd():
            own = x.detach().requires_grad_(True)
            (found,) = torch.autograd.grad((own * own).sum(), [own])
        return found.clone()

    assert gradient(torch.tensor([1.0, 3.0])).tolist() == [2.0, 6.0]


def test_pytree() -> None:
    leaves, structure = private_traces.pytree.tree_flatten(({"a": 1, "b": [2, None]}, 3))
    assert private_traces.pytree.tree_unflatten([10, 20, None, 30], structure) == ({"a": 10, "b": [20, None]}, 30)
    assert leaves == [1, 2, None, 3]
    assert private_traces.pytree.tree_leaves([1, (2,)]) == [1, 2]
    assert private_traces.pytree.tree_map_only(int, str, [1, "x", 2.0]) == ["1", "x", 2.0]


def test_torch_dispatch_mode() -> None:
    """It sees what a dropout is made of, also in backward."""

    class Names(private_traces.TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    x = torch.ones(3, requires_grad=True)
    with Names() as names:
        torch.nn.functional.dropout(x, 0.5).exp().sum().backward()
    assert "aten::bernoulli_" in names.seen and names.seen.count("aten::mul") >= 2


def test_assume_several() -> None:
    """A view of selected rows asks whether there are none; without the assumption the trace ends there."""

    class Selects(nn.Module):
        def __init__(self, assuming: bool) -> None:
            super().__init__()
            self.assuming = assuming

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x[x.sum(1) > 0]
            if self.assuming:
                private_sizes.assume_several(rows.shape[0])
            return rows.sum() if rows.shape[0] == 0 else rows.sum() * 2

    torch.export.export(Selects(True), (torch.ones(3, 2),), strict=False)
    with pytest.raises(private_sizes.GuardOnDataDependentSymNode), private_hooks.no_new_registration_hooks():
        torch.export.export(Selects(False), (torch.ones(3, 2),), strict=False)
    private_sizes.assume_several(0)  # a number is what it is


def test_assume_as_many() -> None:
    """A choice by whether two masks select as many is made for the case that they do; else the run ends."""

    class Compares(nn.Module):
        def __init__(self, assuming: bool) -> None:
            super().__init__()
            self.assuming = assuming

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            left, right = x[x > 0], y[y > 0]
            if self.assuming:
                private_sizes.assume_as_many(left.shape[0], right.shape[0])
            return left * 2 if left.shape[0] == right.shape[0] else left

    batch = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([3.0, 4.0, -1.0])
    program = torch.export.export(Compares(True), batch, strict=False).module()
    assert torch.equal(program(*batch), torch.tensor([2.0, 4.0]))
    with pytest.raises(RuntimeError):
        program(batch[0], torch.ones(3))
    with pytest.raises(private_sizes.GuardOnDataDependentSymNode), private_hooks.no_new_registration_hooks():
        torch.export.export(Compares(False), batch, strict=False)
    private_sizes.assume_as_many(2, 3)  # numbers are what they are


def test_hooks_of_all_modules() -> None:
    def double(module: nn.Module, given: Any, result: torch.Tensor) -> torch.Tensor:
        return 2 * result

    nn.modules.module.register_module_full_backward_hook(lambda module, d_in, d_out: None).remove()
    before = private_hooks.hooks_of_all_modules()
    assert len(before) >= 4 and not any(hooks for _, hooks in before)
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        found = [list(hooks.values()) for _, hooks in private_hooks.hooks_of_all_modules() if hooks]
    finally:
        handle.remove()
    assert found == [[double]] and private_hooks.hooks_of_all_modules() == before


def test_no_new_registration_hooks() -> None:
    def told(module: nn.Module, name: str, buffer: torch.Tensor) -> None: ...

    with nn.modules.module.register_module_buffer_registration_hook(told):
        before = [list(hooks.values()) for _, hooks in private_hooks.hooks_of_all_modules()]
        with pytest.raises(ValueError, match="fails"), private_hooks.no_new_registration_hooks():
            nn.modules.module.register_module_buffer_registration_hook(lambda module, name, buffer: None)
            raise ValueError("fails")
        assert [told] in before == [list(hooks.values()) for _, hooks in private_hooks.hooks_of_all_modules()]


def test_hooks_of_tensor() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert private_hooks.hooks_of_tensor(parameter) == []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        return 2 * gradient

    def told(tensor: torch.Tensor) -> None:
        pass

    parameter.register_hook(double)
    parameter.register_post_accumulate_grad_hook(told)
    assert private_hooks.hooks_of_tensor(parameter) == [double, told]


def test_modes_that_are_on() -> None:
    class Function(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    assert private_traces.modes_that_are_on() == []
    with Function() as one, Dispatch() as other:
        assert private_traces.modes_that_are_on() == [one, other]
    assert private_traces.modes_that_are_on() == []


class Halved(torch.autograd.Function):
    """In the older style, its backward under the other name."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x / 2

    @staticmethod
    def vjp(ctx: Any, d_out: torch.Tensor) -> torch.Tensor:
        return d_out / 2


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, times: int = 2) -> torch.Tensor:
        return x * times

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.times = inputs[1]

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        return d_out * ctx.times, None


bound, bound_halved = Doubled.apply, Halved.apply


def test_applied_functions() -> None:
    """Every apply is seen, one that was bound before too, with default arguments filled in; then all is as before."""
    seen: list[Any] = []

    def applied(cls: Any, own: Any, args: Any, kwargs: Any) -> Any:
        seen.append((cls, args[1:]))
        return own(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with private_autograd.applied_functions(applied):
        (Halved.apply(x) + bound(x)).sum().backward()
    assert seen == [(Halved, ()), (Doubled, (2,))]
    assert x.grad is not None and x.grad.tolist() == [2.5, 2.5]
    bound(x)
    assert len(seen) == 2


@pytest.mark.parametrize("apply", [bound, bound_halved, lambda x: Doubled.apply(x), lambda x: Halved.apply(x)])
def test_applied_functions_give_what_they_are_told(apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Whether gradients are recorded is seen as it is where the function is applied."""
    recorded: list[bool] = []

    def applied(cls: Any, own: Any, args: Any, kwargs: Any) -> Any:
        recorded.append(torch.is_grad_enabled())
        return args[0] * 10

    x = torch.ones(2, requires_grad=True)
    with private_autograd.applied_functions(applied):
        given = apply(x)
        with torch.no_grad():
            assert apply(x).tolist() == [10, 10]
    assert given.tolist() == [10, 10] and given.requires_grad and recorded == [True, False]
    if apply in (bound, bound_halved) and not private_autograd._APPLY_IS_PYTHON:
        with pytest.raises(InputError, match=r"differentiates in its forward through .*call .*\.apply"):
            given.sum().backward()
    else:
        given.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [10, 10]
    assert apply(x).tolist() != [10, 10]


@pytest.mark.parametrize("apply", [bound, bound_halved, lambda x: Doubled.apply(x)])
def test_applied_functions_leave_no_switch_of_gradients_in_a_trace(apply: Callable[..., torch.Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return apply(x).sin()

    for applied in (lambda cls, own, args, _: own(*args)), (lambda cls, own, args, _: args[0] * 10):
        with private_autograd.applied_functions(applied):
            graph = torch.export.export(Model(), (torch.ones(3),), strict=False).graph
        called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        assert called[-1] == "aten.sin.default" and not [name for name in called if "grad" in name], called


def test_has_setup() -> None:
    assert private_autograd.has_setup(Doubled) and not private_autograd.has_setup(Halved)


def test_backward_of() -> None:
    assert (
        private_autograd.backward_of(Halved) is Halved.vjp and private_autograd.backward_of(Doubled) is Doubled.backward
    )


def test_function_ctx() -> None:
    """What a function notes in its context is found there."""
    context: Any = private_autograd.FunctionCtx()
    x = torch.ones(2)
    context.save_for_backward(x, None)
    context.mark_dirty(x)
    context.mark_non_differentiable(x)
    context.set_materialize_grads(False)
    assert context.to_save == (x, None) and context.dirty_tensors == (x,)
    assert context.non_differentiable == (x,) and context.materialize_grads is False


def test_is_reentrant_checkpoint() -> None:
    """It is applied to what it runs, whether random numbers are kept, and the arguments."""
    seen: list[Any] = []

    def applied(cls: Any, own: Any, args: Any, kwargs: Any) -> Any:
        seen.append((private_autograd.is_reentrant_checkpoint(cls), args))
        return own(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with private_autograd.applied_functions(applied):
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True)
    ((found, (run, preserve, given)),) = seen
    assert found and run is torch.sin and preserve is True and given is x


@torch.library.custom_op("csc_contracts::doubled", mutates_args=())
def _doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_is_of_torch() -> None:
    """What torch applies for a custom operator; not a function of the model's, nor what is made of one for vmap."""
    seen: list[bool] = []

    def applied(cls: Any, own: Any, args: Any, kwargs: Any) -> Any:
        seen.append(private_autograd.is_of_torch(cls))
        return own(*args, **kwargs)

    x = torch.ones(2, 2, requires_grad=True)
    with private_autograd.applied_functions(applied):
        torch.ops.csc_contracts.doubled(x)
        Doubled.apply(x)
    assert seen == [True, False]


def test_gradient_hooks() -> None:
    parameter = nn.Parameter(torch.ones(2))
    assert private_hooks.gradient_hooks(parameter) == []
    first, second = (lambda gradient: None), (lambda parameter: None)
    parameter.register_hook(first)
    parameter.register_post_accumulate_grad_hook(second)
    assert private_hooks.gradient_hooks(parameter) == [first, second]


def test_backward_hooks() -> None:
    module = nn.Linear(2, 2)
    assert private_hooks.backward_hooks(module) == []
    before, after = (lambda module, d_out: None), (lambda module, d_in, d_out: None)
    module.register_full_backward_hook(after)
    module.register_full_backward_pre_hook(before)
    assert private_hooks.backward_hooks(module) == [before, after]


def test_global_backward_hooks() -> None:
    hook = lambda module, d_in, d_out: None  # noqa: E731
    handle = nn.modules.module.register_module_full_backward_hook(hook)
    assert private_hooks.global_backward_hooks() == [hook]
    handle.remove()
    assert private_hooks.global_backward_hooks() == []


def test_address_of_storage() -> None:
    with private_traces.FakeTensorMode():
        x = torch.ones(2, 3)
        assert private_traces.address_of_storage(x) == private_traces.address_of_storage(x[1:].detach())
        assert private_traces.address_of_storage(x) != private_traces.address_of_storage(x.clone())


def test_plain_checkpoints() -> None:
    """Export takes what follows a checkpoint inside another for computed without gradients."""

    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda y: checkpoint(torch.tanh, y, use_reentrant=False) * 2, x, use_reentrant=False)

    with private_traces.plain_checkpoints():
        found = torch.export.export(Nested(), (torch.ones(3),), strict=False)
    assert not any(private_exported.is_no_grad_region(node.target) for node in found.graph.nodes)
    x = torch.ones(3, requires_grad=True)
    Nested()(x).sum().backward()
    assert x.grad is not None


def test_tensors_of_data() -> None:
    class Legacy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.Tensor(numpy.arange(3))

    with private_traces.tensors_of_data():
        program = torch.export.export(Legacy(), (torch.ones(3),), strict=False)
    assert program.module()(torch.ones(3)).tolist() == [1, 2, 3]
    made = torch.Tensor([1, 2])
    assert type(made) is torch.Tensor and made.dtype == torch.float32 and torch.Tensor(2, 3).shape == (2, 3)


def test_random_state() -> None:
    before = private_traces.random_state()
    assert private_traces.random_state() == before
    torch.rand(1)
    assert private_traces.random_state() != before


def test_is_profiled() -> None:
    assert not private_processes.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private_processes.is_profiled()
    assert not private_processes.is_profiled()
    everywhere = torch.profiler._ExperimentalConfig(profile_all_threads=True)  # docs/data.md tells of it
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], experimental_config=everywhere
    ) as profile:
        assert private_processes.is_profiled()
        thread = threading.Thread(target=lambda: torch.ones(2).exp())
        thread.start()
        thread.join()
    assert not private_processes.is_profiled() and "aten::exp" in [event.name for event in profile.events()]


class _Ending(torch.utils.data.Dataset[int]):
    """Whose worker ends itself once it has handed out a batch."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_unattended_workers() -> None:
    """They are missed where a batch is waited for."""
    batches = private_processes.unattended_workers(iter(torch.utils.data.DataLoader(_Ending(), num_workers=1)))
    assert next(batches) == 0
    time.sleep(1)  # while torch's own handler would raise
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(batches)
    del batches  # ends what is left without an error
    without = iter(torch.utils.data.DataLoader(_Ending()))
    assert private_processes.unattended_workers(without) is without


def test_storage_info() -> None:
    """Where an entry of a DCP directory is; a field that is not given stays out of the pickle."""
    one = private_checkpoints.StorageInfo("__0_0.distcp", 3, 5)
    assert (one.relative_path, one.offset, one.length) == ("__0_0.distcp", 3, 5)


def test_allowed(tmp_path: Path) -> None:
    """Everything that torch writes into `.metadata`, and nothing that runs: names are told by the pickle itself."""
    dcp.save({"a": torch.ones(2, dtype=torch.bfloat16), "b": {"c": [1]}}, checkpoint_id=tmp_path, no_dist=True)
    named: set[tuple[str, str]] = set()

    class Tells(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.add((module, name))
            return super().find_class(module, name)

    Tells(io.BytesIO((tmp_path / ".metadata").read_bytes())).load()
    assert {name for _, name in named} >= {"Metadata", "_StorageInfo", "Size", "bfloat16"}
    assert named <= private_checkpoints.allowed().keys()


def test_attention_that_drops() -> None:
    """It is F.scaled_dot_product_attention with those weights dropped that the mask says; the rest is scaled."""
    query, key, value = torch.randn(3, 2, 4, 5, 8).unbind()
    key, value, mask = key[:, :2], value[:, :2], torch.ones(5, 5, dtype=torch.bool).tril()
    kept = torch.rand(2, 4, 5, 5) > 0.4
    found = private_attention.attention_that_drops(query, key, value, kept, 0.4, mask, False, 0.5, True)
    weights = (query @ key.repeat_interleave(2, 1).mT * 0.5).masked_fill(~mask, -torch.inf).softmax(-1)
    right = (weights * kept / 0.6) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, right)
    all_kept = torch.ones_like(kept)
    for causal in (True, False):
        plain = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=causal, enable_gqa=True)
        found = private_attention.attention_that_drops(query, key, value, all_kept, 0.5, None, causal, None, True)
        torch.testing.assert_close(found / 2, plain)


def test_varlen_attention() -> None:
    """The operator's arguments come by name; what it gives is put in its place, and the operator is back afterwards."""
    from torch.nn.attention.varlen import varlen_attn

    own, given = torch.ops.torch_attn._varlen_attn, {}

    def computed(**arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.update(arguments)
        return arguments["query"] + 1, arguments["query"].sum(-1).T

    query, ends = torch.zeros(6, 2, 4), torch.tensor([0, 2, 6])
    with private_traces.varlen_attention(computed):
        out = varlen_attn(query, query, query, ends, ends, 4, 4, scale=0.5, window_size=(-1, 0))
    assert bool((out == 1).all()) and given["cu_seq_q"] is given["cu_seq_k"] is ends
    assert given["is_causal"] is True and given["scale"] == 0.5 and list(given["window_size"]) == [-1, 0]
    assert torch.ops.torch_attn._varlen_attn is own


def test_norms() -> None:
    tensors = [torch.randn(3, 4), torch.tensor(-2.0), torch.zeros(0)]
    assert private_lists.norms([]) == []
    assert private_lists.norms(tensors) == [float(torch.linalg.vector_norm(one)) for one in tensors]


def test_norms_of_differences() -> None:
    ones, others = [torch.randn(3, 4), torch.tensor(2.0)], [torch.randn(3, 4), torch.tensor(-1.0)]
    right = [float(torch.linalg.vector_norm(one - other)) for one, other in zip(ones, others)]
    assert private_lists.norms_of_differences(ones, others) == right
    assert private_lists.norms_of_differences([], []) == []


def test_any_gradient_hooks() -> None:
    one, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    assert not private_hooks.any_gradient_hooks([one, other])
    for register in (other.register_hook, other.register_post_accumulate_grad_hook):
        handle = register(lambda *given: None)
        assert private_hooks.any_gradient_hooks([one, other])
        handle.remove()
        assert not private_hooks.any_gradient_hooks([one, other])


class _Plain:
    def write(self, value: Any) -> None:
        self.one = value


WRITES: dict[str, Callable[[_Plain, dict[str, Any]], Any]] = {
    "entry": lambda one, own: own.update(one=2.5),
    "name": lambda one, own: own.update(three=own.pop("two")),
    "default": lambda one, own: own.setdefault("three", 1),
    "joined": lambda one, own: own.__ior__({"one": 3}),
    "taken": lambda one, own: own.popitem(),
    "emptied": lambda one, own: own.clear(),
    "attribute": lambda one, own: one.write(3),
    "attribute that is gone": lambda one, own: delattr(one, "two"),
    "attribute of any object": lambda one, own: object.__setattr__(one, "one", 3),
    "class": lambda one, own: setattr(_Plain, "more", 1),
    "class without": lambda one, own: delattr(_Plain, "more"),
}


def test_dict_version() -> None:
    """Each kind of write makes another number, attributes that a loop of Python writes and classes included; reading
    makes none.
    """
    for name, write in WRITES.items():
        one = _Plain()
        for value in range(100):  # until the interpreter has a short way of its own
            one.write(value)
        one.two = 2  # type: ignore[attr-defined]
        own = gc.get_referents(vars(_Plain))[0] if name.startswith("class") else vars(one)
        before = private_versions.dict_version(own)
        assert own.get("one", 0) is not None and [*own, *own.items()] and private_versions.dict_version(own) == before
        write(one, vars(one))
        assert private_versions.dict_version(own) != before, name


HELD: list[Any] = []  # modes that would end with the last reference to them
LEFT_ON: dict[str, Callable[[], Any]] = {
    "levels of torch.func": lambda: torch._C._functorch._jvp_increment_nesting(),
    "inference mode": lambda: HELD.append(torch.inference_mode()) or HELD[-1].__enter__(),
    "function modes": lambda: BaseTorchFunctionMode().__enter__(),
    "dispatch modes": lambda: private_traces.FakeTensorMode().__enter__(),
    "dispatch keys": lambda: torch._C._dispatch_tls_set_dispatch_key_excluded("CPU", True),
    "nested autocasts": lambda: torch.autocast("cpu", torch.bfloat16).__enter__(),
    "hooks of saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(id, id).__enter__(),
    "saved tensors without hooks": lambda: torch._C._autograd._saved_tensors_hooks_disable("not here"),
    "hooks of all modules": lambda: torch.nn.modules.module.register_module_forward_hook(print),
    "gradients": lambda: torch.set_grad_enabled(False),
    "levels of forward gradients": lambda: torch.autograd.forward_ad.enter_dual_level(),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "float32 products": lambda: torch.set_float32_matmul_precision("high"),
    "attention by flash": lambda: torch.backends.cuda.enable_flash_sdp(False),
}


@pytest.mark.parametrize("name", LEFT_ON)
def test_process_state(name: str) -> None:
    """It has what was left on, under its name."""
    before = private_state.process_state()
    with private_state.process_state_kept():
        LEFT_ON[name]()
        now = private_state.process_state()
        assert now[name] != before[name]
    assert private_state.process_state() == before


@pytest.mark.parametrize("name", [name for name in LEFT_ON if name not in ("levels of torch.func", "dispatch keys")])
def test_thread_state(name: str) -> None:
    """Another thread has it on, and nothing else that the process has is another afterwards."""
    before, told = private_state.process_state(), list[Any]()
    with private_state.process_state_kept():
        LEFT_ON[name]()
        state = private_state.ThreadState()

        def look() -> None:
            with state.on():
                told.append(private_state.process_state())

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert told[0][name] == private_state.process_state()[name] != before[name]
    assert private_state.process_state() == before


def test_dispatch_modes_of_threads_that_take_turns() -> None:
    """The first to enter a mode is the first to leave: torch notes for good that one is on."""
    before, state = private_state.process_state(), private_state.ThreadState()
    entered = [threading.Event() for _ in range(2)]
    left = threading.Event()

    def first() -> None:
        with state.on():
            with private_traces.FakeTensorMode():
                entered[0].set()
                entered[1].wait(9)
            left.set()

    def second() -> None:
        with state.on():
            entered[0].wait(9)
            with private_traces.FakeTensorMode():
                entered[1].set()
                left.wait(9)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert private_state.process_state() == before


def test_half_a_level_of_forward_gradients() -> None:
    """A trace that refuses torch.func.jvp leaves torch's C++ part in a level that its Python part does not know of."""
    before = private_state.process_state()
    with private_state.process_state_kept():
        torch._C._enter_dual_level()
        assert private_state.process_state() != before
    assert private_state.process_state() == before
    with torch.autograd.forward_ad.dual_level():  # raises in a second level
        pass


def test_process_state_kept() -> None:
    """All of it at once, however the block ends; and torch works as it did."""
    before, numbers = (
        private_state.process_state(),
        (torch.get_rng_state(), random.getstate(), numpy.random.get_state()),
    )
    cpu = torch.device("cpu")
    with pytest.raises(KeyboardInterrupt), private_state.process_state_kept(), devices.forked(cpu):
        for draw in (torch.rand, lambda _: random.random(), numpy.random.rand):
            draw(2)
        for name, left_on in LEFT_ON.items():
            if name != "saved tensors without hooks":  # there are some
                left_on()
        raise KeyboardInterrupt
    assert private_state.process_state() == before
    assert torch.equal(torch.get_rng_state(), numbers[0]) and random.getstate() == numbers[1]
    assert numpy.array_equal(numpy.random.get_state()[1], numbers[2][1])
    layer = nn.Linear(2, 1).double()
    layer(torch.ones(3, 2, dtype=torch.float64)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.full((1, 2), 3.0, dtype=torch.float64))
    with torch.no_grad(), BaseTorchFunctionMode(), torch.autocast("cpu"):  # what was on stays on
        inside = private_state.process_state()
        with private_state.process_state_kept():
            assert private_state.process_state() == inside
        assert private_state.process_state() == inside
