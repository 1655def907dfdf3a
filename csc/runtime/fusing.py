"""The functions of programs that Inductor compiles, from their first step on."""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import logging
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from csc.errors import DifferenceError
from csc.ir.groups import PLACE, RANDOM, WEIGHTS
from csc.kernels.batch_loss import STANDING_IN, numbered
from csc.kernels.onednn import least_multiplications
from csc.runtime import context
from csc.runtime.compile_pool import CompileWorker, FunctionFolder, make_side_by_side, worker_count
from csc.runtime.compiled_function import (
    MISSING,
    BeingMadeError,
    CompiledFunction,
    FunctionOrder,
    KeptFunction,
    TorchState,
    code,
    form_of,
    settings,
    write_whole,
)
from csc.runtime.executor import NO_CHANCE, of_microbatch
from csc.runtime.flat_tensors import Layout, empty_as, layouts_of, nesting, structure_of, tensors_of
from csc.runtime.loaded_program import LoadedProgram
from csc.runtime.meeting import NOTHING, Meeting, StepVote
from csc.runtime.rank import Rank
from csc.runtime.specs import StageSpec
from csc.runtime.tried_function import tried
from csc.runtime.weight_names import Under
from csc.torch_private.fast_guards import same_layouts

# --- What a function of a layer file uses besides its arguments and torch --------------------------------------------
#
# A trace would see that once, and keep it.
#
# Constants of the file count as its text. What it calls of its own file is looked through too.


PURE = (
    "abs", "bool", "dict", "enumerate", "float", "int", "isinstance", "len", "list", "map", "max", "min", "range",
    "reversed", "slice", "sorted", "str", "sum", "tuple", "zip", "False", "None", "True",
)  # fmt: skip
CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def outside_read(function: Callable[..., Any]) -> str:
    """OSError if its text is not to be had."""
    seen: set[str] = set()
    waiting = [function]
    while waiting:
        one = waiting.pop()
        seen.add(one.__name__)
        tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        for name in _names(tree):
            value = one.__globals__.get(name, None)
            if inspect.isfunction(value) and value.__globals__ is one.__globals__:
                waiting += [value] if name not in seen else []
            elif not _is_known(name, value, name in one.__globals__):
                return name
    return ""


def _is_known(name: str, value: Any, of_file: bool) -> bool:
    if not of_file:
        return name in PURE
    values = value if isinstance(value, tuple) else (value,)
    return all(isinstance(constant, CONSTANTS) for constant in values) or value in (torch, math, torch.ops.aten)


def _names(tree: ast.AST) -> list[str]:
    """Those that are read and not set in it; what it imports, and what it sets elsewhere."""
    nodes = list(ast.walk(tree))
    bound = {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ExceptHandler)) and node.name}
    elsewhere = [name for node in nodes if isinstance(node, (ast.Global, ast.Nonlocal)) for name in node.names]
    imports = [name.name for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) for name in node.names]
    read = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return [f"global {name}" for name in elsewhere] + [f"import {name}" for name in imports] + [
        name for name in read if name not in bound
    ]  # fmt: skip


# --- The functions of the templates compiled by Inductor, from the text of the layer files ---------------------------
#
# Terms: a *template function* is one of FUNCTIONS in layers/NAME.py. Compiled, it is called as before, so rank files
# know nothing of it; equal layers, microbatches and ranks of a process share it.
#
# `w`, the parameters of a region, is handed on as a plain dict of the names that the function's text reads: what is
# compiled depends on no region's place in the model. What Inductor does not take runs as it is, and the log says why.


log = logging.getLogger("csc")

FUNCTIONS = ("forward", "backward_input", "backward_weight", "backward")
LAYOUTS = 8  # of the arguments of one function: what comes with more is run as it is
ALL = ""  # in place of a form
SEEN = 64  # layouts that are known at once, whatever runs with them
SHORT = 4  # of which are asked in C
Layouts = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]
COMPILED, KEPT, AS_IT_IS = "compiled", "found in the cache", "runs as it is"
OTHERS = "other layouts of its arguments came"


@dataclass(frozen=True)
class FusedRow:
    """A function for layouts of its arguments. how: COMPILED by this start, KEPT, AS_IT_IS; seconds: that its
    compilation took, whenever that was; why: it runs as it is; products: that oneDNN computes.
    """

    name: str
    how: str
    seconds: float
    why: str = ""
    products: int = 0


def fused_functions(package: str, folder: Path, sizes: str = "") -> list[Fused]:
    """The template functions of a program, which run as they are until they are switched on. folder: where what is made
    is kept, and taken from. sizes: of the program's microbatches, for what errors say.
    """
    start = f"{package}.layers."
    functions = []
    for name, module in sorted(sys.modules.items()):
        if name.startswith(start) and name != f"{start}tables":
            functions += _fused(module, folder, sizes)
    return functions


def host_compiler() -> str | None:
    """Its path."""
    names = (os.environ.get("CXX") or "g++", "g++", "clang++", "clang")
    return next(filter(None, map(shutil.which, names)), None)


def lacks(device: torch.device) -> str:
    """Empty if it has all."""
    if device.type != "cpu" or host_compiler() is not None:
        return ""
    return "there is no C++ compiler on this machine; install g++ or clang, or set CXX to one"


def _fused(module: ModuleType, folder: Path, sizes: str) -> list[Fused]:
    text, found = "", []
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        if not inspect.isfunction(function):  # not there, or done
            continue
        shown = f"{module.__name__.rpartition('.')[2]}.{name}"
        text = text or code(Path(function.__code__.co_filename).read_text())
        try:
            fused = Fused(shown, function, text, folder, sizes)
        except ValueError as error:
            log.warning("fuse: %s runs as it is: %s", shown, error)
            continue
        setattr(module, name, fused.call)
        found.append(fused)
    return found


class Fused:
    """A template function, and what stands for it with certain layouts of its arguments: nothing is compiled in a call.
    ValueError if `w` is used otherwise than by names in the text, which could not be told from outside; or something
    else than arguments and torch is, which would be compiled as it was then.

    The first call with certain layouts runs both, and compares them (csc.runtime.tried_function): DifferenceError, then
    and from then on, if they are not near enough. It returns what the compiled one gives, the bits of later calls.

    text: of its file, as csc.runtime.compiled_function gives it. on: what was taken is used. sizes: of microbatches.
    """

    def __init__(self, name: str, function: Callable[..., Any], text: str, folder: Path, sizes: str = "") -> None:
        self.name, self.plain, self.on = name, function, False
        self._rows: dict[str, FusedRow] = {}  # by form
        self._sizes, self._differs = sizes, ""
        self._text, self._folder = text, folder
        outside = outside_read(function)
        if outside:
            raise ValueError(f"it uses {outside}, and is compiled for arguments and torch alone")
        self._names = _read_of_w(function)
        self._place = list(inspect.signature(function).parameters).index("w") if self._names else -1
        self._taken: dict[str, CompiledFunction | None] = {}  # by form; None: computes nothing
        self._known: dict[Layouts, CompiledFunction | None] = {}  # as calls came
        self._short: dict[Layouts, tuple[int, Callable[..., bool], Callable[..., Any], Callable[..., Any]]] = {}
        self._watch: _Watch | None = None

    def call(self, *given: Any) -> Any:
        """What stands in the module, as a method: Python hands over the arguments of one, where it keeps those of an
        object that is called. So what F has kept and a rank file hands on is freed as soon as B has read it.
        """
        if self._short:
            tensors = self._flat(given)
            for count, are_these, code, nested in self._short.values():
                if len(tensors) == count and are_these(*tensors):
                    del given
                    return nested(code(tensors))
        return self._called(given)

    def _flat(self, arguments: tuple[Any, ...]) -> list[Any]:
        """The tensors, unless something is nested more deeply or is none: then it is in the list as it is."""
        flat: list[Any] = []
        for argument in arguments:
            kind = type(argument)
            if kind is tuple:
                flat += argument
            elif kind is Under:
                flat += argument.several(self._names)
            else:
                flat.append(argument)
        return flat

    def _called(self, arguments: tuple[Any, ...]) -> Any:
        if not self.on and self._watch is None:
            return self.plain(*arguments)
        if self._place >= 0:
            w: Mapping[str, torch.Tensor] = arguments[self._place]
            weights = {name: w[name] for name in self._names}
            arguments = (*arguments[: self._place], weights, *arguments[self._place + 1 :])
        try:
            tensors = tensors_of(arguments)
        except TypeError:  # an edited file may hand on anything
            return self.plain(*arguments)
        layouts = tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        if self._watch is not None:
            return self._watch.call(self, layouts, arguments, tensors)
        try:
            compiled = self._known[layouts]
        except KeyError:
            return self._first(layouts, arguments, tensors)
        if compiled is None:
            return self.plain(*arguments)
        self._shorten(layouts, compiled, tensors)
        return compiled.run(tensors)

    def _shorten(self, layouts: Layouts, compiled: CompiledFunction, tensors: list[torch.Tensor]) -> None:
        """Let later calls go the short way, if there is one."""
        code = compiled.unwrapped.code
        if code is not None and len(self._short) < SHORT and layouts not in self._short:
            self._short[layouts] = len(tensors), same_layouts(tensors), code, compiled.nested

    def _first(self, seen: Layouts, arguments: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        """The first call with these layouts."""
        if len(self._known) == SEEN:
            return self.plain(*arguments)
        layouts = layouts_of(tensors)
        form = form_of(structure_of(arguments), layouts)
        compiled = self._taken.get(form)
        if compiled is not None:
            results = self._compared(compiled, arguments, tensors)
            self._shorten(seen, compiled, tensors)
        else:
            if form not in self._taken and ALL not in self._taken:
                self._tell_of_others(form, layouts)
            results = self.plain(*arguments)
        self._known[seen] = compiled
        return results

    def _compared(self, compiled: CompiledFunction, arguments: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        """What the compiled function gives. DifferenceError if the function as it is gives something else."""
        results = None
        if not self._differs:
            results, self._differs = tried(self.plain, arguments, compiled, tensors)
        if not self._differs:
            return results
        raise DifferenceError(
            f"{self.name}, compiled by Inductor, does not compute what the layer file says"
            f"{f' for microbatches of {self._sizes}' if self._sizes else ''}: {self._differs}",
            f"{self.plain.__code__.co_filename}:{self.plain.__code__.co_firstlineno}",
            "Train with fuse=False, and report it with the model: it is a bug of csc or of Inductor",
        )

    def _tell_of_others(self, form: str, layouts: Sequence[Layout]) -> None:
        listed = ", ".join(f"{dtype} {sizes} {strides}" for dtype, _, sizes, strides in layouts)
        if not any(row.why == OTHERS for row in self.rows):
            log.warning("fuse: %s runs as it is with layouts that it was not compiled for", self.name)
        log.debug("fuse: %s was not compiled for %s", self.name, listed)
        self._rows[form] = FusedRow(self.name, AS_IT_IS, 0.0, OTHERS)

    def make(self, order: FunctionOrder, wait: bool) -> None:
        """Compile it in this process, unless it is kept. Without wait BeingMadeError if another process does. Any error
        of the trace or the compiler.
        """
        arguments = nesting(order.structure)(empty_as(order.layouts))
        self._ordered(order.structure, order.layouts).made(self.plain, arguments, wait)

    def take(self, order: FunctionOrder, how: str) -> str:
        """Use what is kept of this once it is switched on. Why not; "" if it is there."""
        try:
            function = self._ordered(order.structure, order.layouts).read()
        except Exception as error:  # of the folder, or of what is not torch's
            return f"{type(error).__name__}: {error}"
        if function is MISSING:
            return "what was compiled is not to be read"
        self._taken[order.form] = function
        if function is not None:
            self._rows[order.form] = FusedRow(self.name, how, function.seconds, products=function.products)
            log.info("fuse: %s %s%s", self.name, how, f" in {function.seconds:.2f} s" if how == COMPILED else "")
        return ""

    def refuse(self, form: str, why: str) -> bool:
        """Run as it is for arguments of this form, or of ALL, whatever was taken; whether it would not have."""
        if form in self._taken and self._taken[form] is None:
            return False
        self._taken[form] = None
        self._known.clear()
        self._short.clear()
        self._rows[form] = FusedRow(self.name, AS_IT_IS, 0.0, why)
        return True

    @property
    def rows(self) -> list[FusedRow]:
        """What has become of it, for all forms."""
        return list(self._rows.values())

    def order(self, structure: Any, layouts: list[Layout]) -> FunctionOrder:
        """To have it compiled for these."""
        return FunctionOrder.of(self.plain, self._ordered(structure, layouts))

    def _ordered(self, structure: Any, layouts: list[Layout]) -> KeptFunction:
        return KeptFunction(self.plain.__name__, self._text, structure, layouts, self._folder)

    def watch(self, repeats: bool) -> None:
        """From now on it runs as it is, and what it is called with is noted. repeats: every call runs; else one of each
        kind does, on tensors without values, and others are given the same results.
        """
        self._watch = _Watch(repeats)
        self._short.clear()

    def watched(self) -> list[FunctionOrder]:
        """What has been noted. It is no longer watched."""
        watch, self._watch = self._watch, None
        return [FunctionOrder.of(self.plain, kept) for kept, _ in watch.seen.values()] if watch is not None else []

    def kept(self, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> KeptFunction:
        """For such arguments."""
        return self._ordered(structure_of(given), layouts_of(tensors))


class _Watch:
    def __init__(self, repeats: bool) -> None:
        self._repeats = repeats
        self.seen: dict[Layouts, tuple[KeptFunction, Any]] = {}  # and its results, unless calls are repeated

    def call(self, function: Fused, layouts: Layouts, given: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        if layouts in self.seen and not self._repeats:
            return self.seen[layouts][1]
        results = function.plain(*given)
        if layouts not in self.seen and len(self.seen) < LAYOUTS:
            self.seen[layouts] = function.kept(given, tensors), None if self._repeats else results
        return results


def _read_of_w(function: Callable[..., Any]) -> list[str]:
    """The names under which a function's text reads parameters, `w["name"]`."""
    nodes = list(ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))))
    reads = [
        node for node in nodes
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "w"
    ]  # fmt: skip
    names = [node.slice.value for node in reads if isinstance(node.slice, ast.Constant)]
    uses = sum(isinstance(node, ast.Name) and node.id == "w" for node in nodes)
    if uses != len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError('it uses w otherwise than as w["name"]')
    return sorted(set(map(str, names)))


# --- What is kept of a program whose functions were compiled: what each is called with, and what has become of it ----


PREFIX = 32  # of a fingerprint, in a key


@dataclass(frozen=True)
class CalledForm:
    """name: of a function, as rows have it. structure, layouts: of its arguments."""

    name: str
    structure: Any
    layouts: list[Layout]


@dataclass(frozen=True)
class KeptProgram:
    """key: of the program and all that its functions' keys depend on; it begins with the program's fingerprint."""

    folder: Path
    key: str

    @property
    def _file(self) -> Path:
        return self.folder / "functions" / f"{self.key}.program"

    def forms(self) -> list[CalledForm] | None:
        """Never an error of what is kept."""
        try:
            return [CalledForm(**form) for form in json.loads(self._file.read_text())["forms"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, rows: Sequence[FusedRow], forms: Sequence[CalledForm]) -> None:
        """That none could be written is no error of a step; where nothing was compiled there is no folder for them."""
        if not rows:
            return
        content = {"rows": [asdict(row) for row in rows], "forms": [asdict(form) for form in forms]}
        try:
            write_whole(self._file, json.dumps(content))
        except OSError as error:
            log.info("fuse: what was compiled is not told to later starts: %s", error)


def rows_of(folder: Path, fingerprint: str) -> list[FusedRow]:
    """Of the functions of a program that has made a step on this machine, as the latest start to compile them told."""
    files = sorted(folder.glob(f"functions/{fingerprint[:PREFIX]}-*.program"), key=lambda file: file.stat().st_mtime)
    for file in reversed(files):
        try:
            return [FusedRow(**row) for row in json.loads(file.read_text())["rows"]]
        except (OSError, ValueError, KeyError, TypeError):  # damaged, or gone
            continue
    return []


# --- What ranks tell each other of functions that are compiled, before any of them runs one --------------------------
#
# Terms: a program is *settled* once all ranks of a step know which of its functions run compiled, and which as they
# are. A function that one rank could not have compiled, for arguments of a form, runs as it is on all ranks.
#
# All ranks call `told` in the same step: what they said before it tells them to.


COMPILED_FUNCTIONS = "compiled functions"  # the operation


@dataclass(frozen=True)
class FusedWord:
    """program: its number in the order in which all ranks take them. positions: those of its ranks here on the pp axis.
    built: with what its functions are compiled. everything: why none is to run compiled; "": each for itself. refused:
    why a function is not to, by its name and form. notes: what the functions are called with could not be told ahead,
    and is noted in this step.
    """

    program: int
    positions: Sequence[int]
    built: str = ""
    everything: str = ""
    refused: Mapping[str, str] = field(default_factory=dict)
    notes: bool = False


def told(meeting: Meeting, make: Callable[[], Sequence[FusedWord]]) -> list[FusedWord]:
    """By rank. What `make` raises is raised, and StepFailed on the other ranks."""
    text = meeting.hold(COMPILED_FUNCTIONS, lambda: (NOTHING, json.dumps([asdict(word) for word in make()])))
    return [FusedWord(**word) for text in meeting.texts(COMPILED_FUNCTIONS, text) for word in json.loads(text)]


# --- A rank's functions run once on tensors without values: what they call is seen before any of it computes ---------
#
# What comes from other ranks is as program.json says. Nothing is sent, no memory is taken, no random number is drawn.


Tensors = dict[str, torch.Tensor]


def rehearse(rank: Rank, microbatch: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """weights: as the rank holds them; those that it has shards of stand here for whole ones."""
    from csc.torch_private.traces import FakeTensorMode  # imports a second's worth that ranks do not need otherwise

    entries = dict(context.attach(rank, microbatch))
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor, static_shapes=True)

    batch = {name: fake(value) if isinstance(value, torch.Tensor) else value for name, value in entries.items()}
    batch |= {name: met.number for name, met in rank.met.items()}
    if rank.program.manifest.random:
        batch[RANDOM] = of_microbatch(NO_CHANCE, 0)
    if rank.program.manifest.loss.divisors:
        batch[WEIGHTS] = fake(torch.ones(len(rank.program.manifest.loss.divisors), dtype=torch.float64))
    if rank.program.manifest.loss.over_batch is not None:
        batch[PLACE] = numbered(STANDING_IN)
    constants = {name: fake(tensor) for name, tensor in rank.constants.items()}
    all_weights = _whole(rank, weights, fake)
    with torch.no_grad(), mode:
        saved = {stage.stage: _forward(rank, stage, batch, all_weights, constants) for stage in rank.stages}
        for stage in reversed(rank.stages):
            _backward(rank, stage, saved[stage.stage], all_weights, constants)


def _whole(
    rank: Rank, weights: Mapping[str, torch.Tensor], fake: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:  # fmt: skip
    weights_found = {}
    for spec in rank.program.manifest.parameters:
        if spec.name in weights:
            weight = fake(weights[spec.name])
            weights_found[spec.name] = (
                weight if weight.shape == spec.local.shape else weight.new_empty(spec.local.shape)
            )
    return weights_found


def _received(rank: Rank, kind: str, stage: int) -> Tensors:
    return {
        value.name: torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=rank.device)
        for message in rank.program.manifest.messages
        if (message.kind, message.destination) == (kind, stage)
        for value in message.values
    }


def _forward(rank: Rank, stage: StageSpec, batch: Mapping[str, Any], weights: Tensors, constants: Tensors) -> Any:
    """(saved, the loss if it is computed here)."""
    received = _received(rank, "F", stage.stage)
    sent, saved = rank.functions[stage.stage].forward(batch, received, weights, constants)
    return saved, sent.get("loss")


def _backward(rank: Rank, stage: StageSpec, forward: Any, weights: Tensors, constants: Tensors) -> None:
    functions, (saved, loss) = rank.functions[stage.stage], forward
    received = _received(rank, "B", stage.stage)
    if rank.program.manifest.loss.stage == stage.stage and loss is not None:
        received["loss"] = torch.empty((), dtype=loss.dtype, device=loss.device)
    if functions.backward is not None:
        for _ in functions.backward(saved, received, weights, constants):
            pass
    if functions.backward_input is not None:
        _, kept = functions.backward_input(saved, received, weights, constants)
        if functions.backward_weight is not None:
            for _ in functions.backward_weight(kept, weights, constants):
                pass


# --- The functions of one program that Inductor compiles, ahead of a step --------------------------------------------
#
# Terms: a *first* program, of the sizes that a run begins with, is prepared before its first step: what its functions
# are called with is found by a rehearsal, or kept by an earlier start, and compiled while the step waits. A *later*
# one, for sizes that come on the way, runs as it is until it has been met MET times: what comes once is not worth the
# wait. Where functions cannot be run without values, what a step calls is *noted*, and compiled before the next one.
#
# Ranks switch to compiled functions in the same step, and to the same ones: values that several of them compute alike
# stay alike to the bit.


UNLIKE = "not all ranks' CPUs and C++ compilers have the same vector instructions"
MET = 4  # steps with sizes that came later, before the fifth compiles for them
Call = tuple[Rank, Mapping[str, Any], Mapping[str, torch.Tensor]]  # microbatch and weights


class FusedProgram:
    """Of this process' ranks. number: in the order in which all ranks take programs. folder: of what is compiled. kept:
    None where nothing is kept for other processes. without: why this process cannot compile; "": it can. later: it is a
    later one. worker: gives one that makes functions beside this process; None: a new one each time.
    """

    def __init__(
        self, number: int, functions: list[Fused], folder: Path, kept: KeptProgram | None, device: torch.device,
        positions: Sequence[int] = (0,), without: str = "", later: bool = False,
        worker: Callable[[], CompileWorker] | None = None,
    ) -> None:  # fmt: skip
        self._number, self._positions, self._without = number, positions, without
        self._functions, self._device, self._worker = functions, device, worker
        self._by_name = {function.name: function for function in functions}
        self._folder, self._kept = folder, kept
        self._later, self._waits = later, MET if later else 0  # steps before it is prepared
        self._orders: list[tuple[Fused, FunctionOrder]] | None = None  # None: it is not known what they are called with
        self._notes, self._prepared, self._settled = False, False, False
        self._failed: dict[str, str] = {}  # why what was ordered was not made, by key
        self._refused: dict[str, str] = {}  # why a function does not run compiled here: by its name, or that and a form
        self._elsewhere: dict[str, str] = {}  # the same of any rank
        self._nothing = ""  # why no function is to run compiled on any rank

    @property
    def vote(self) -> StepVote:
        """On a step with it."""
        return StepVote(prepares=not self._settled and not self._waits)

    @property
    def is_settled(self) -> bool:
        """Whether what runs stays so."""
        return self._settled

    def before(self, calls: Callable[[], Iterable[Call]]) -> None:
        """Before the calls of a step run: its functions are compiled, or noted in this step."""
        if self._settled or self._waits or self._without:
            return
        if self._orders is None and not self._notes:
            self._find(calls)
        if self._notes:
            self._note()
        elif not self._prepared:
            self._prepare()

    def after(self) -> None:
        """After a step, unless it failed."""
        self._waits = max(0, self._waits - 1)
        if self._notes:
            self._orders, self._notes, self._prepared = self._watched(), False, False

    # what functions are called with

    def _find(self, calls: Callable[[], Iterable[Call]]) -> None:
        try:
            self._orders = self._told() or self._rehearsed(calls())
        except Exception as error:
            log.info(
                "fuse: the next step runs as it is, as its functions cannot be run without values: %s: %s",
                type(error).__name__, error,
            )  # fmt: skip
            self._notes = True

    def _told(self) -> list[tuple[Fused, FunctionOrder]]:
        """What an earlier start has kept."""
        forms = self._kept.forms() if self._kept is not None else None
        known = [(self._by_name.get(form.name), form) for form in forms or ()]
        return [
            (function, function.order(form.structure, form.layouts)) for function, form in known if function is not None
        ]

    def _rehearsed(self, calls: Iterable[Call]) -> list[tuple[Fused, FunctionOrder]]:
        for function in self._functions:
            function.watch(repeats=False)
        try:
            for call in calls:
                rehearse(*call)
        finally:
            watched = self._watched()
        return watched

    def _note(self) -> None:
        """All functions run as they are in this step."""
        for function in self._functions:
            function.watch(repeats=True)

    def _watched(self) -> list[tuple[Fused, FunctionOrder]]:
        """What was called since they are watched. None is watched any more, whatever happens: in a rehearsal they give
        tensors without values.
        """
        watched: dict[str, tuple[Fused, FunctionOrder]] = {}
        for function in self._functions:
            try:
                watched |= {order.key: (function, order) for order in function.watched()}
            except Exception as error:  # of a C++ compiler that does not work, say
                self._refuse(function, ALL, f"{type(error).__name__}: {error}")
        return list(watched.values())

    # compiled

    def _prepare(self) -> None:
        """Compile side by side what is not kept."""
        assert self._orders is not None
        left = [order for function, order in self._orders if not order.is_kept or function.take(order, KEPT)]
        workers = worker_count() if self._device.type == "cpu" else 0  # Inductor has its own for kernels of GPUs
        make_side_by_side(left, self._here, workers, self._worker)
        self._take({order.key for order in left})
        self._prepared = True

    def _here(self, order: FunctionOrder, wait: bool) -> None:
        function = next(function for function, other in self._orders or () if other is order)
        try:
            function.make(order, wait)
        except BeingMadeError:
            raise
        except Exception as error:  # of whatever stands in the file
            self._failed[order.key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

    def _take(self, ordered: Set[str]) -> None:
        """What was made; why the rest was not. ordered: keys."""
        for function, order in self._orders or ():
            if order.key in ordered:
                why = self._failed.get(order.key) or function.take(order, COMPILED)
                if why and order.key not in self._failed:  # what another process could not make
                    self._here(order, True)
                    why = self._failed.get(order.key) or function.take(order, COMPILED)
                if why:
                    self._refuse(function, order.form, why)

    def _refuse(self, function: Fused, form: str, why: str) -> None:
        """Of this rank's own."""
        log.warning("fuse: %s runs as it is: %s", function.name, why)
        self._refused[_named(function, form)] = why
        function.refuse(form, why)

    # with the other ranks

    def word(self) -> FusedWord:
        """What the others have to know before they settle it."""
        return FusedWord(self._number, self._positions, self._built(), self._without, self._refused, self._notes)

    def _built(self) -> str:
        try:
            if self._without:
                return ""
            built = settings(self._folder, self._device.type == "cpu")
            return json.dumps(built | {"products by oneDNN from": least_multiplications()}, sort_keys=True)
        except Exception:  # of a compiler that does not work: then nothing was taken, and each function says why
            return ""

    def settle(self, words: Sequence[FusedWord], is_stepped: bool) -> None:
        """words: of all ranks, on any program. is_stepped: this rank has said one of this program."""
        ours = [word for word in words if word.program == self._number]
        for word in ours:
            self._nothing = self._nothing or word.everything or ("" if word.built in (ours[0].built, "") else UNLIKE)
            self._elsewhere |= word.refused
        if self._settled:  # another replica's
            self._refuse_elsewhere()
        elif not is_stepped:
            return
        elif any(word.notes and set(word.positions) & set(self._positions) for word in ours):
            if not self._notes:  # as what computes the same values
                self._notes = True
                self._note()
        else:
            self._switch()

    def _switch(self) -> None:
        self._settled = True
        self._refuse_elsewhere()
        if self._nothing:
            (log.info if self._later else log.warning)("fuse: all functions run as they are, as %s", self._nothing)
            return
        for function in self._functions:
            function.on = True
        if self._kept is not None:
            forms = [
                CalledForm(function.name, order.structure, order.layouts) for function, order in self._orders or ()
            ]
            self._kept.keep(self.rows(), forms)

    def _refuse_elsewhere(self) -> None:
        """Run as they are, here too, the functions that a rank could not have compiled."""
        for function, order in self._orders or ():
            why = (
                self._elsewhere.get(_named(function, order.form))
                or self._elsewhere.get(_named(function, ALL))
                or self._nothing
            )
            if why and function.refuse(order.form, why) and not self._nothing:
                log.warning("fuse: %s runs as it is, as on another rank: %s", function.name, why)

    def rows(self) -> list[FusedRow]:
        """Of each function and layout that was called."""
        return [row for function in self._functions for row in function.rows]


def _named(function: Fused, form: str) -> str:
    return f"{function.name} {form}".rstrip()


# --- The programs of one trainer, whose functions Inductor compiles --------------------------------------------------


class FusedMembers:
    """The programs of one trainer, whose functions Inductor compiles. folder: where artifacts are kept; None: for this
    process alone. positions: of this process' ranks on the pp axis.
    """

    def __init__(self, folder: FunctionFolder | None, device: torch.device, positions: Iterable[int]) -> None:
        self._folder = folder or FunctionFolder.of(None)
        self._device, self._positions = device, sorted(set(positions))
        self._programs: list[FusedProgram] = []

    def add(self, program: LoadedProgram) -> None:
        """Its modules are imported."""
        later = bool(self._programs)
        sizes = ", ".join(f"{spec.name} {list(spec.shape)}" for spec in program.manifest.inputs)
        functions = fused_functions(program.package, self._folder.path, sizes)
        is_temporary = self._folder.own is not None
        kept = None if is_temporary else KeptProgram(self._folder.path, _key(program, self._positions))
        self._programs.append(
            FusedProgram(
                len(self._programs), functions, self._folder.path, kept, self._device, self._positions,
                lacks(self._device), later, self._folder.workers.take,
            )
        )  # fmt: skip

    def vote(self, numbers: Iterable[int]) -> StepVote:
        """On a step of the programs with these numbers."""
        return StepVote.of_any(self._programs[number].vote for number in numbers)

    @contextmanager
    def step(self, calls: Sequence[tuple[int, Call]], vote: StepVote, meeting: Meeting) -> Iterator[None]:
        """All ranks have agreed on the step. vote: what any of them has said of it."""
        numbers = list(dict.fromkeys(number for number, _ in calls))

        def before() -> list[FusedWord]:
            for number in numbers:
                of_one = {id(call[0]): call for other, call in reversed(calls) if other == number}
                self._programs[number].before(of_one.values)
            return [self._programs[number].word() for number in numbers if self._programs[number].vote.prepares]

        if vote.prepares:
            stepped = {number for number in numbers if self._programs[number].vote.prepares}
            words = told(meeting, before)
            for number in {*stepped, *(word.program for word in words)}:
                self._programs[number].settle(words, number in stepped)
        yield
        for number in numbers:
            self._programs[number].after()

    def is_settled(self, number: int) -> bool:
        """Whether the functions of a program are those that it goes on with."""
        return self._programs[number].is_settled

    def rows(self) -> list[FusedRow]:
        """Of all functions that were called."""
        return [row for program in self._programs for row in program.rows()]


def _key(program: LoadedProgram, positions: Sequence[int]) -> str:
    """Of what the functions of a program are compiled for on some ranks, its layer files as they are now."""
    layers = [file.read_text() for file in sorted((program.directory / "layers").glob("*.py"))]
    text = json.dumps([layers, list(positions), asdict(TorchState.now())])
    return f"{program.manifest.fingerprint[:PREFIX]}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
