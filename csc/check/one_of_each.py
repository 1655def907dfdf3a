"""A program that is too large to run here, beside eager PyTorch: its model with one layer of each kind."""

from __future__ import annotations

import ast
import functools
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import torch
from torch import nn

from csc.capture.batch import device_of
from csc.capture.quantised_weights import weights_of
from csc.check.compiling import Compiles
from csc.check.eager import joined
from csc.check.first import BUG, ROOM, Checked, check, room_of, step_of
from csc.errors import CscError, DifferenceError
from csc.ir.program import Options, Program
from csc.runtime.loaded_program import load
from csc.runtime.trainer import Trainer
from csc.runtime.transport import InProcess
from csc.temporary import TemporaryFolder
from csc.torch_private.traces import pytree

# --- The layer files of a large program and those of a shallow one, beside each other --------------------------------
#
# Terms
#   the same     two files that do the same: their Python is equal but for comments and for what their docstring counts
#   of a kind    two files of one name whose first region is the same: what one does, the other is to do


TABLES = "layers/tables.py"


def install_alike(files: Mapping[str, bytes], directory: Path) -> tuple[str, ...]:
    """files: by their paths in a program's directory; directory: of the shallow program."""
    replaced = []
    for name, text in _layers(files).items():
        file = directory / name
        if name == TABLES or not file.is_file():
            continue
        written = file.read_bytes()
        if _code(written) != _code(text) and _first_region(written) == _first_region(text) != "":
            file.write_bytes(text)
            replaced.append(name)
    return tuple(replaced)


def not_the_same(files: Mapping[str, bytes], directory: Path) -> tuple[str, ...]:
    """Of tables, which each stage has some of, every line is to stand in the shallow program's."""
    own = {file.relative_to(directory).as_posix(): file.read_bytes() for file in (directory / "layers").glob("*.py")}
    codes, lines = {_code(text) for text in own.values()}, _lines(own.get(TABLES, b""))
    return tuple(
        name for name, text in _layers(files).items()
        if _code(text) not in codes and not (name == TABLES and _lines(text) <= lines)
    )  # fmt: skip


def _layers(files: Mapping[str, bytes]) -> dict[str, bytes]:
    return {name: text for name, text in sorted(files.items()) if name.startswith("layers/") and name.endswith(".py")}


def _code(text: bytes) -> str:
    tree = ast.parse(text)
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    return ast.dump(tree)


def _lines(text: bytes) -> set[str]:
    """What each assignment says; one that calls a function of the file says nothing that is not said there."""
    tree = ast.parse(text)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assignments = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    return {ast.dump(node) for node in assignments if not _calls(node.value, functions)}


def _calls(value: ast.expr, functions: Set[str]) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id in functions


def _first_region(text: bytes) -> str:
    match = re.search(r"^Regions +(\S+)", ast.get_docstring(ast.parse(text)) or "", re.MULTILINE)
    return match[1].rstrip(",") if match else ""


# --- A model with one layer of each kind: the others hand on what they are given, and have no weights ----------------
#
# Terms
#   kept         a layer that runs as it is; the first of its kind
#   left out     a layer of the same kind: it returns what the kept one returned, but for each tensor of it that is like
#                one of its own arguments in shape and dtype, that argument


META = torch.device("meta")


def kinds(program: Program) -> dict[str, str]:
    """Of a planned Program: layers of which each is one region, by what they run and which gradients they need."""
    regions = [region.module for region in program.regions]
    first: dict[str, str] = {}
    kinds_found = {}
    for region in program.regions:
        info = program.modules.get(region.module)
        if info is None or info.role != "layer" or regions.count(region.module) > 1:
            continue
        kept = first.setdefault(region.variant or region.template, region.module)
        if kept != region.module:
            kinds_found[region.module] = kept
    return kinds_found


def bytes_of(model: nn.Module, left_out: Mapping[str, str]) -> int:
    """The weights of the model without these layers; tied ones count once."""
    without = _below(model, left_out)
    sizes = {id(p): p.numel() * p.element_size() for p in model.parameters() if id(p) not in without}
    return sum(sizes.values())


@contextmanager
def shallow(model: nn.Module, left_out: Mapping[str, str], trainable: Set[str]) -> Iterator[None]:
    """trainable: names of the parameters that train meanwhile. Afterwards everything is as before, weights too."""
    layers = {path: model.get_submodule(path) for path in (*left_out, *left_out.values())}
    forwards = {layer: layer.__dict__.get("forward") for layer in layers.values()}
    without = _below(model, left_out)
    held = [(m._parameters, name, p) for m in model.modules() for name, p in m._parameters.items() if p is not None]
    flags = [(p, p.requires_grad) for p in model.parameters()]
    device, generator = device_of(model), torch.Generator().manual_seed(0)
    parameters: dict[int, nn.Parameter] = {}
    returned: dict[str, Any] = {}
    try:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trainable)
            if id(parameter) in without:
                parameters[id(parameter)] = nn.Parameter(parameter.detach().to(META), parameter.requires_grad)
            elif parameter.is_meta:
                values = _random(name, parameter, generator).to(device)
                parameters[id(parameter)] = nn.Parameter(values, parameter.requires_grad)
        for attributes, name, parameter in held:
            attributes[name] = parameters.get(id(parameter), parameter)
        for path in dict.fromkeys(left_out.values()):
            layers[path].__dict__["forward"] = _noting(path, layers[path].forward, returned)
        for path, kept in left_out.items():
            layers[path].__dict__["forward"] = _handing_on(kept, layers[path].forward, returned)
        yield
    finally:
        for layer, before in forwards.items():
            if before is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = before
        for attributes, name, parameter in held:
            attributes[name] = parameter
        for parameter, flag in flags:
            parameter.requires_grad_(flag)


def _below(model: nn.Module, left_out: Mapping[str, str]) -> set[int]:
    """Identities of the parameters that these layers alone hold."""
    inside = {id(module) for path in left_out for module in model.get_submodule(path).modules()}
    modules = list(model.modules())
    elsewhere = {id(p) for m in modules if id(m) not in inside for p in m._parameters.values()}
    return {id(p) for m in modules if id(m) in inside for p in m._parameters.values()} - elsewhere


def _random(name: str, parameter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Values as a trained model may have them: factors about 1, biases about 0, matrices that keep a vector's size."""
    values = torch.empty(parameter.shape, dtype=parameter.dtype).normal_(generator=generator)
    if parameter.dim() > 1:
        return values.mul_(1 / math.sqrt(max(parameter[0].numel(), 1)))
    return values.mul_(0.1).add_(1.0 if name.endswith("weight") else 0.0)


def _noting(path: str, real: Callable[..., Any], returned: dict[str, Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        returned[path] = real(*args, **kwargs)
        return returned[path]

    return forward


def _handing_on(kept: str, real: Callable[..., Any], returned: Mapping[str, Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def forward(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        leaves, structure = pytree.tree_flatten(returned[kept])
        return pytree.tree_unflatten([_like(leaf, tensors) for leaf in leaves], structure)

    return forward


def _like(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    """The first tensor given that is like this one, else this one."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return next((tensor for tensor in tensors if tensor.dtype == leaf.dtype and tensor.shape == leaf.shape), leaf)


# --- A program that is too large to run here, beside eager PyTorch: its model with one layer of each kind ------------
#
# Terms: the *shallow* model is the user's own with the other layers handing on what they are given.
# It is captured, compiled and compared as any model, on at most two microbatches of the batch,
# on one rank but for context parallelism, and runs the layer files of the large program. Those that it cannot run are
# named.


log = logging.getLogger("csc")

MICROBATCHES = 2  # enough for their weights to show
WORK = 2e12  # FLOPs of a check on a CPU: seconds to tens of seconds


def check_by_layer(
    compiler: Compiles, ready: Sequence[Mapping[str, Any]], options: Options, files: Mapping[str, bytes]
) -> Checked:
    """ready: microbatches of one batch, in order; files: of the program, by their names in its directory.

    Holds three times the weights of the shallow model, and what one step of it keeps. DifferenceError that names the
    region where both part; the model is as before in any case.
    """
    start = time.perf_counter()
    model = compiler.model
    mesh = options.mesh.fewest_stages().one_replica()
    alone = replace(
        options, mesh=mesh, cuts=None, stages=None, placement=None, chunks=None, schedule="auto", memory=None,
        features=False,
    )  # fmt: skip
    program = compiler.finished(ready[0], alone)
    left_out = kinds(program)
    ready = ready[:MICROBATCHES] if not _too_much(model, program, left_out, MICROBATCHES) else ready[:1]
    reason = _too_much(model, program, left_out, len(ready))
    if reason:
        return Checked(skipped=reason)
    alone = replace(alone, microbatches=len(ready))
    trainable = {parameter.name for parameter in program.parameters if parameter.trainable}
    alone = replace(alone, freeze=None)
    with shallow(model, left_out, trainable), TemporaryFolder() as folder:
        small = _Shallow(compiler.of(model), _together(compiler, ready), ready, alone, Path(folder))
        try:
            small.write()
        except CscError as error:
            return Checked(skipped=f"the model with one layer of each kind does not compile: {error}")
        result, apart = _compared(small, files)
    if result.skipped:
        return result
    subject = "with one layer of each kind" + (f" (not {', '.join(apart)})" if apart else "")
    return replace(result, seconds=time.perf_counter() - start, what=subject)


@dataclass(frozen=True)
class _Shallow:
    """The shallow model's compiler, its batch, and a folder for its programs."""

    compiler: Compiles
    batch: Any
    ready: Sequence[Mapping[str, Any]]
    options: Options
    folder: Path

    def write(self) -> None:
        program = self.compiler.finished(self.ready[0], self.options)
        complete = self.compiler.complete(self.ready[0])
        copytree(self.compiler.emit(program, self.options, self.folder / "own", complete), self.folder / "given")

    def check(self, name: str) -> Checked:
        loaded = load(self.folder / name)
        trainer = Trainer(loaded, weights_of(self.compiler.model), InProcess(loaded))
        complete = map(self.compiler.complete, self.ready)
        trainable = {name for name, _ in trainer.named_parameters()}
        return check(
            self.compiler, lambda: step_of(trainer, list(complete)), trainable, self.batch, self.ready, self.options
        )


def _compared(small: _Shallow, files: Mapping[str, bytes]) -> tuple[Checked, tuple[str, ...]]:
    """The comparison with the large program's layer files as far as they can be run, and the others."""
    unlike = install_alike(files, small.folder / "given")
    if unlike:
        try:
            return small.check("given"), not_the_same(files, small.folder / "given")
        except DifferenceError as error:
            small.check("own")  # raises if these are wrong, too
            raise DifferenceError(
                f"{error.what.split(';')[0]}; with the layer files of the same model with fewer layers it would",
                ", ".join(unlike), f"It {BUG}",
            ) from None  # fmt: skip
        except Exception as error:  # they were planned otherwise: what F keeps for B, for one
            log.info("%s cannot be run with one layer of each kind: %s", ", ".join(unlike), error)
    return small.check("own"), not_the_same(files, small.folder / "own")


def _too_much(model: nn.Module, program: Program, left_out: Mapping[str, str], microbatches: int) -> str:
    """Why the shallow model cannot run here either; "" if it can."""
    held, room = bytes_of(model, left_out), ROOM * room_of(model)
    if 3 * held > room:
        return (
            f"weights and two sets of gradients of one layer of each kind, and of what is in no layer, are "
            f"{3 * held / 1e9:.0f} GB, and a check takes up to {room / 1e9:.0f} GB here"
        )
    work = 2 * microbatches * sum(
        sum(program.variants[region.variant].flops) for region in program.regions if region.module not in left_out
    )  # fmt: skip
    if program.device == "cpu" and work > WORK:
        return (
            f"one layer of each kind, and what is in no layer, take {work / 1e12:.1f} TFLOP at these sizes, and a "
            f"check on a CPU up to {WORK / 1e12:.0f}; compile for a shorter example to have it"
        )
    return ""


def _together(compiler: Compiles, ready: Sequence[Mapping[str, Any]]) -> Any:
    """Microbatches as one batch, if they can be."""
    if len(ready) == 1:
        return ready[0]
    whole = joined(ready, compiler.axes)
    if whole is None:
        return list(ready)
    alike = compiler.whole_entries(whole, len(ready))
    return {name: ready[0][name] if name in alike else value for name, value in whole.items()}
