"""The emitted program: short, editable, safe against what a model calls its parts, written whole or not at all."""

from __future__ import annotations

import ast
import builtins
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from csc.codegen import write as writing
from csc.codegen.python import FUNCTIONS, OF_SIZES
from csc.codegen.write import sources
from csc.passes.pipeline import pipeline_of
from csc.passes.runner import run
from safetensors.torch import save_file
from torch import fx, nn
from torch.nn import functional as F

import csc
from csc.analysis.operators.execution import WAYS
from csc.driver.compiled import CompiledModel
from csc.errors import InputError, ProgramError
from csc.ir import graph as g
from csc.ir.program import Program
from csc.reports.inspection import FORMATS, dump
from csc.reports.verification import verify
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from tests.compiler import small
from tests.compiler.conftest import Models
from tests.exactness import FLOAT32
from tests.kept_traces import kept_traces
from tests.launching import PATIENCE
from tests.tiers import in_turn, long

ROOT = Path(__file__).parents[2]
OF_TORCH = {f"torch.{name.removeprefix('aten::').partition('.')[0]}" for name in FUNCTIONS}
METHODS = (
    ".append", ".pop", ".clone", ".narrow", *(f".{name.removeprefix('aten::')}" for name in OF_SIZES),
    *(f".{name.removeprefix('aten::').partition('.')[0]}_" for name, way in WAYS.items() if way == g.METHOD),
)  # fmt: skip


# --- short -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=[(2, 8, 12), long((2, 8, 32))], ids=str)
def depths(request: pytest.FixtureRequest) -> dict[int, CompiledModel]:
    """The same model with so many layers."""
    with kept_traces():
        return {n: csc.compile(small.text(n), mesh="pp=2", example=small.text_batch()) for n in request.param}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "cut"),
    in_turn([None, ["embed_tokens"], ["embed_tokens", "layers.0", "layers.1"], ["layers"]], [5, 6]),
)
@pytest.mark.long_cases("(2, 8, 12)-None-5")
def test_a_rank_file_does_not_grow_with_depth(depths: dict, freeze: list[str] | None, cut: int) -> None:
    lines: dict[int, list[int]] = {}
    for layers in (8, max(depths)):
        changed = depths[layers].with_options(freeze=freeze, cuts=[f"layers.{layers * cut // 8}"], schedule="1f1b")
        files = sources(changed.program, changed.options)
        lines[layers] = [len(files[f"rank_{rank}.py"].splitlines()) for rank in range(2)]
        assert len([p for p in files if p.startswith("layers/")]) < 10
    assert lines[8] == lines[max(depths)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "least", "mesh"),
    [
        (None, 2, "pp=2"), (["layers"], 2, "pp=2,dp=2"), (["embed_tokens"], 8, "pp=2"),
        long(None, 2, "pp=2,dp=2"), long(["layers"], 2, "pp=2"), long(["embed_tokens"], 8, "pp=2,dp=2"),
    ],
)  # fmt: skip
def test_lines_do_not_grow_with_depth_at_all(depths: dict, freeze: list[str] | None, least: int, mesh: str) -> None:
    """One rank with all layers: the same number of lines in every file of 2 layers and of 12, layers/ included.

    With the embedding frozen the first layer is another function than the rest, and two layers are no loop.
    """
    lines = {}
    for layers, compiled in depths.items():
        changed = compiled.with_options(freeze=freeze, cuts=["layers.0"], schedule="1f1b")
        files = sources(changed.program, replace(changed.options, mesh=csc.Mesh.parse(mesh)))
        lines[layers] = {path: len(text.splitlines()) for path, text in files.items()}
    assert sum(count for path, count in lines[least].items() if path.startswith("layers/")) > 100
    assert lines[least] == lines[8] == lines[max(depths)]


@pytest.mark.slow
def test_the_deep_model_is_right(depths: dict) -> None:
    result = verify(depths[max(depths)].with_options(freeze=["embed_tokens"]))
    assert (result.loss_rel, result.grad_rel_max, result.params_missing) == (0, 0, ())


@pytest.mark.slow
def test_equal_layers_are_one_loop_over_one_function(depths: dict) -> None:
    half = max(depths) // 2
    compiled = depths[max(depths)].with_options(cuts=[f"layers.{half}"])
    text = sources(compiled.program, compiled.options)["rank_0.py"]
    assert f'LAYERS_0_TO_{half - 1} = [f"layers.{{i}}." for i in range(0, {half})]' in text
    assert text.count("decoder_layer.forward(") == 1
    assert text.count("decoder_layer.backward_input(") == 2  # in backward_input and in backward
    assert text.count("decoder_layer.backward_weight(") == 2


def test_a_rank_file_says_what_the_rank_holds_sends_and_receives(models: Models) -> None:
    compiled = models("llava", mesh="pp=3", freeze=["vision_tower"], chunks=1)
    for rank, stage in enumerate(compiled.program.stages):
        text = dump(compiled, "schedule", "python", rank=rank)
        docstring = ast.get_docstring(ast.parse(text))
        assert docstring is not None
        assert docstring.startswith(f"Rank {rank} of 3: stage {rank} of 3")
        for title in ("Holds", "Receives", "Sends", "Order"):
            assert f"\n{title}" in docstring
        for message in compiled.program.messages:
            if rank in (message.source, message.destination):
                assert all(value in docstring for value in message.values)
        functions = {n.name for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)}
        assert functions >= {"forward", *(["backward_weight"] if stage.has_w else [])}


# --- editable ----------------------------------------------------------------------------------------------------


def step(
    directory: Path, model: nn.Module, batch: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """(loss, gradients) of the program in a directory."""
    trainer = Trainer(load(directory), weights={n: p.detach() for n, p in model.named_parameters()})
    loss = trainer.train_step(batch)
    return loss, {name: p.grad for name, p in trainer.named_parameters()}


def test_constants_and_program_json_are_what_was_compiled(models: Models, tmp_path: Path) -> None:
    directory = models("text", mesh="pp=2").write(tmp_path / "program")
    load(directory)
    for name, said in (("constants.safetensors", "is not the one that was compiled"), ("program.json", "fingerprint")):
        before = (directory / name).read_bytes()
        (directory / name).write_bytes(before.replace(b'"tokens"', b'"mean"') if "json" in name else before[:-1] + b"!")
        with pytest.raises(ProgramError, match=said):
            load(directory)
        (directory / name).write_bytes(before)


@pytest.mark.slow
def test_a_user_may_edit_an_emitted_layer_and_run_it(models: Models, tmp_path: Path) -> None:
    compiled = models("text", mesh="pp=2")
    directory = compiled.write(tmp_path / "program")
    loss, gradients = step(directory, compiled.model, compiled.example)

    file = directory / "layers" / "lm_head.py"
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    (last,) = [i for i, line in enumerate(lines) if line.lstrip().startswith("return ") and "saved" in line]
    value = lines[last].split()[1].rstrip(",")
    lines.insert(last, f"    {value} = aten.mul.Tensor({value}, 3.0)\n")
    file.write_text("".join(lines))

    edited_loss, same_gradients = step(directory, compiled.model, compiled.example)
    assert torch.allclose(edited_loss, 3 * loss)
    assert all(torch.equal(same_gradients[name], gradient) for name, gradient in gradients.items())
    assert load(directory).edited == ("layers/lm_head.py",)


# --- safe --------------------------------------------------------------------------------------------------------

# What torch lets a module or parameter be called: anything without a dot.
INJECTION = """x\"\"\"\nimport builtins\nsetattr(builtins, "pwned", 1)\n\"\"\"\\"""
HOSTILE = ['a"; import os', INJECTION, "back\\slash", "it's", "{0} %s {x}", "new\nline", "1st", "# no", "naïve 🙂"]


class Odd(nn.Module):
    """A linear layer and a scale under given names."""

    def __init__(self, layer: str, scale: str) -> None:
        super().__init__()
        self.names = layer, scale
        self.add_module(layer, nn.Linear(8, 8))
        self.register_parameter(scale, nn.Parameter(torch.rand(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layer, scale = self._modules[self.names[0]], self._parameters[self.names[1]]
        return x + torch.tanh(layer(x)) * scale


class OddNames(nn.Module):
    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names
        for index, name in enumerate(names):
            self.add_module(name, Odd(f"{name} ", f"{index}{name}"))
        self.register_buffer("shift", torch.randn(8))
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = x + self.shift
        for name in self.names:
            x = self._modules[name](x)
        return F.cross_entropy(self.head(x), labels)


def odd_batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {"x": torch.randn(4, 8, generator=generator), "labels": torch.tensor([1, 4, 0, 2])}


def only_harmless(files: Mapping[str, str]) -> None:
    """Every Python file parses, imports only torch, csc's operators, the runtime's names and its own layers, and calls
    only operators.
    """
    for path, text in files.items():
        if not path.endswith(".py"):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert [alias.name for alias in node.names] in (["torch"], ["csc.kernels.attention"]), path
            elif isinstance(node, ast.ImportFrom):
                own = (("csc.runtime.weight_names", 0), ("csc.runtime.made_once", 0))
                shared = (("position_0", 1), ("position_1", 1))
                assert (node.module, node.level) in ((None, 1), *own, *shared), path
            elif isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                allowed = (
                    "aten.",
                    "torch.ops.csc.",
                    "torch.device",
                    "layers.",
                    "under",
                    "_common_",
                    "_fixed_",
                    "float",
                    "zip",
                    "reversed",
                    "range",
                    "w.full_names",
                )
                known = called in OF_TORCH or called.startswith(allowed) or called.endswith(METHODS)
                assert known, f"{path} calls {called}"


def renamed(program: Program, names: Mapping[str, str]) -> Program:
    """A captured Program with path components replaced everywhere, as if torch had traced a model with these names."""

    def new(path: str) -> str:
        return ".".join(names.get(part, part) for part in path.split("."))

    graph, _ = g.copy_graph(program.graph)
    for node in graph.nodes:
        if "role" in node.meta:
            kind, label = node.meta["role"]
            node.meta["role"] = (kind, new(label))
        node.meta["module"] = new(node.meta.get("module", ""))
        node.meta["source"] = INJECTION
    return replace(
        program,
        name=INJECTION,
        graph=graph,
        parameters=tuple(replace(p, name=new(p.name)) for p in program.parameters),
        constants={new(name): tensor for name, tensor in program.constants.items()},
        modules={
            new(path): replace(info, path=new(path), kind=f"{info.kind}{INJECTION}", component=new(info.component))
            for path, info in program.modules.items()
        },
        inputs=tuple(replace(item, name=new(item.name)) for item in program.inputs),
    )


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.long_cases("2")
def test_hostile_names_never_become_code(tmp_path: Path, stages: int) -> None:
    """Behind capture: all passes and the emission with such names, then the gradients."""
    plain_names = [f"part_{chr(97 + i)}" for i in range(len(HOSTILE))]
    torch.manual_seed(0)
    model = OddNames(plain_names)
    compiled = csc.compile(model, mesh={"pp": stages}, example=odd_batch())
    names = dict(zip(plain_names, HOSTILE, strict=True)) | {
        "shift": INJECTION,
        "x": 'x"]; import os; ["',
        "labels": "la\nbels",
    }
    captured = renamed(compiled.history()[0], names)
    history = run([captured], pipeline_of(compiled.options), compiled.options)
    program = history[-1]
    only_harmless(sources(program, compiled.options))
    only_harmless(sources(program, replace(compiled.options, mesh=csc.Mesh(dp=2, pp=stages))))

    def new(path: str) -> str:
        return ".".join(names.get(part, part) for part in path.split("."))

    batch = {names[name]: tensor for name, tensor in odd_batch().items()}
    directory = writing.write(program, compiled.options, tmp_path / "program", batch)
    trainer = Trainer(load(directory), weights={new(n): p.detach() for n, p in model.named_parameters()})
    trainer.train_step(batch)
    model(**odd_batch()).backward()
    found = {name: p.grad for name, p in trainer.named_parameters()}
    assert len(found) == len(list(model.parameters()))
    assert all(torch.equal(found[new(name)], p.grad) for name, p in model.named_parameters())
    assert not hasattr(builtins, "pwned")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_hostile_names_in_every_picture(form: str) -> None:
    model = OddNames(["a b; import os", "its <b>", "{0} %s"])
    compiled = csc.compile(model, mesh="pp=2", example=odd_batch())
    text = dump(compiled, "schedule", form)
    assert "<b>" not in text or form in ("text", "python")
    if form == "python":
        only_harmless(sources(compiled.program, compiled.options))


def test_names_that_torch_can_trace_are_compiled_as_they_are() -> None:
    """Spaces, digits, braces, semicolons, other scripts: no error, eager's gradients under the same names."""
    torch.manual_seed(0)
    model = OddNames(["a b; import os", "1st", "{0} %s", "# no", "naïve 🙂", "x]; import os; [", "sent", "aten"])
    result = verify(csc.compile(model, mesh="pp=3", example=odd_batch()))
    assert (result.grad_rel_max, result.params_missing, result.params_checked) == (0, (), 26)
    assert not hasattr(builtins, "pwned")


@pytest.mark.parametrize("name", ['a"; import os', "it's", "back\\slash", "new\nline", "for", INJECTION])
def test_names_that_torch_itself_would_run_are_refused(name: str) -> None:
    """torch.export writes such names unescaped into code that it executes; csc says so before it starts."""
    with pytest.raises(InputError) as caught:
        csc.compile(OddNames([name]), example=odd_batch())
    assert repr(name) in str(caught.value)
    assert "rename" in str(caught.value)
    assert not hasattr(builtins, "pwned")


@pytest.mark.parametrize("name", ['x"; import os', "x'", "x\\n", "x\ny"])
def test_batch_entries_that_torch_itself_would_run_are_refused(name: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(8, 5)

        def forward(self, labels: torch.Tensor, **entries: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(entries[name]), labels)

    with pytest.raises(InputError) as caught:
        csc.compile(Model(), example={name: torch.randn(4, 8), "labels": torch.tensor([1, 4, 0, 2])})
    assert f"a batch entry is called {name!r}" in str(caught.value)
    assert "rename it" in str(caught.value)


def test_batch_entries_keep_their_names_and_order() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, **entries: torch.Tensor) -> torch.Tensor:
            hidden = self.first(entries["Zed é"]) - entries["batch_a b;c"]
            return F.cross_entropy(self.second(hidden), entries["Labels!"])

    batch = {"Zed é": torch.randn(4, 8), "Labels!": torch.tensor([1, 4, 0, 2]), "batch_a b;c": torch.randn(4, 8)}
    compiled = csc.compile(Model(), mesh="pp=2", example=batch)
    assert [item.name for item in compiled.program.inputs] == list(batch)
    assert verify(compiled).grad_rel_max == 0


RESERVED = [
    "w",
    "saved",
    "stashed",
    "sent",
    "received",
    "weights",
    "constants",
    "batch",
    "layers",
    "under",
    "torch",
    "aten",
    "layer",
    "gradients",
    "loss",
    "tables",
    "backward_input",
    "d_head",
    "saved_head",
    "STAGE",
    "zip",
    "range",
]


class Reserved(nn.Module):
    """Parts, batch entries and arguments that bear the names of the emitted files' own variables."""

    def __init__(self, parts: list[str]) -> None:
        super().__init__()
        self.parts = parts
        for name in parts:
            self.add_module(name, ReservedPart())
        self.head = nn.Linear(8, 5)

    def forward(self, labels: torch.Tensor, **entries: torch.Tensor) -> torch.Tensor:
        x = sum(entries.values())
        for name in self.parts:
            x = self._modules[name](x, entries[name])
        return F.cross_entropy(self.head(x), labels)


class ReservedPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Linear(8, 8)
        self.aten = nn.Linear(8, 8)

    def forward(self, W: torch.Tensor, stashed: torch.Tensor) -> torch.Tensor:
        return W + self.aten(torch.tanh(self.w(W * stashed)))


@pytest.mark.slow
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.long_cases("1")
def test_names_of_the_emitted_files_own_variables(stages: int) -> None:
    torch.manual_seed(0)
    batch = {name: torch.randn(4, 8) for name in RESERVED} | {"labels": torch.tensor([1, 4, 0, 2])}
    result = verify(csc.compile(Reserved(RESERVED), mesh={"pp": stages}, example=batch))
    assert (result.params_missing, result.params_checked) == ((), 4 * len(RESERVED) + 2)
    assert result.grad_rel_max <= FLOAT32


def test_parts_named_after_files() -> None:
    """A part called `tables` has a file beside layers/tables.py, not in its place."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.Linear(8, 8)
            self.add_module("_init_", nn.Linear(8, 8))
            self.head = nn.Linear(8, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self._modules["_init_"](self.tables(x * 2).relu()).relu()), labels)

    result = verify(csc.compile(Model(), mesh="pp=2", example=odd_batch()))
    assert (result.grad_rel_max, result.params_missing, result.params_checked) == (0, (), 6)


# --- whole or not at all -----------------------------------------------------------------------------------------


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_failure_midway_leaves_nothing_behind(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    calls = []

    def disk_full(tensors: Any, file: Any, **options: Any) -> None:
        calls.append(file)
        if len(calls) == fails_at:
            raise OSError(28, "No space left on device")
        save_file(tensors, file, **options)

    compiled = models("text", mesh="pp=2")
    monkeypatch.setattr(writing, "save_file", disk_full)
    with pytest.raises(InputError, match=r"the program cannot be written .*No space left"):
        compiled.write(tmp_path / "program", with_weights=True)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_midway_leaves_the_earlier_program(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = models("text", mesh="pp=2")
    before = content(compiled.write(tmp_path / "program", with_weights=True))

    def disk_full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(writing, "save_file", disk_full)
    with pytest.raises(InputError, match=r"the program cannot be written .*No space left"):
        models("text", mesh="pp=3").write(tmp_path / "program")
    assert [p.name for p in tmp_path.iterdir()] == ["program"]
    assert content(tmp_path / "program") == before


@pytest.mark.slow
def test_a_new_program_replaces_the_old_one_whole(models: Models, tmp_path: Path) -> None:
    models("text", mesh="pp=4").write(tmp_path / "program", with_weights=True)
    models("text", mesh="pp=2").write(tmp_path / "program")
    models("text", mesh="pp=2").write(tmp_path / "fresh")
    found, fresh = content(tmp_path / "program"), content(tmp_path / "fresh")
    listed = [json.loads(files.pop("program.json")) for files in (found, fresh)]
    assert all(one.pop("timings") for one in listed)
    assert (found, listed[0]) == (fresh, listed[1])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["fresh", "program"]


@pytest.mark.parametrize("kind", ["directory with files", "file"])
def test_what_is_no_program_is_never_overwritten(models: Models, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "thesis"
    precious = target
    if kind != "file":
        target.mkdir()
        precious = target / "chapter.txt"
    precious.write_text("years of work")
    with pytest.raises(InputError) as caught:
        models("text", mesh="pp=2").write(target)
    assert str(target) in str(caught.value)
    assert "choose another directory" in str(caught.value)
    assert precious.read_text() == "years of work"


# --- on its own --------------------------------------------------------------------------------------------------

ALONE = """
import json, runpy, sys
sys.argv = ["csc.run", sys.argv[1], "--steps", "2", "--json"]
try:
    runpy.run_module("csc.run", run_name="__main__")
except SystemExit as stop:
    code = stop.code
print(json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


@pytest.mark.slow
def test_a_program_runs_without_the_compiler_and_transformers(models: Models, tmp_path: Path) -> None:
    compiled = models("llava", mesh="pp=3", freeze=["vision_tower"])
    directory = compiled.write(tmp_path / "program", with_weights=True)
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(directory)], capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    *steps, last = map(json.loads, done.stdout.splitlines())
    assert last["code"] in (0, None)
    foreign = (
        "csc.capture",
        "csc.passes",
        "csc.codegen",
        "csc.api",
        "csc.driver.compiled",
        "csc.driver.compiler",
        "csc.analysis",
        "transformers",
        "peft",
    )
    assert [m for m in last["modules"] if m.startswith(foreign)] == []
    losses = [step["loss"] for step in steps if "loss" in step]
    assert losses[0] == pytest.approx(verify(compiled).loss_eager, rel=FLOAT32)
    assert losses[1] < losses[0]


@pytest.mark.slow
def test_emitted_graphs_hold_no_fx(models: Models) -> None:
    compiled = models("plain", mesh="pp=4")
    for path, text in sources(compiled.program, compiled.options).items():
        assert fx.__name__ not in text, path
    only_harmless(sources(compiled.program, compiled.options))
