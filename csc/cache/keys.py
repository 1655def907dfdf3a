"""Keys: hashes of all that decides what csc makes of a model, and of nothing else."""

from __future__ import annotations

import builtins
import hashlib
import importlib.util
import json
import logging
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import fields
from functools import cache
from pathlib import Path, PurePath
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from csc import devices
from csc.cache.describe import (
    CACHED,
    Describer,
    Facts,
    Opaque,
    Origins,
    csc_folders,
    facts,
    file_of,
    functions_of,
    is_own,
    is_own_class,
    is_own_function,
    is_put_there,
    is_source,
    torch_folder,
    version,
)
from csc.capture.batch import device_of
from csc.capture.trace.export import training, without_kv_cache
from csc.ir.program import Options
from csc.passes.pipeline import of_csc, traced_by_users
from csc.torch_private.traces import modes_that_are_on

# --- Torch's own switches that decide what code computes: precision of products, kernels, dtypes, modes --------------


backends: Any = torch.backends
SWITCHES: dict[str, Callable[[], Any]] = {
    "default dtype": torch.get_default_dtype,
    "default device": torch.get_default_device,
    "inference": torch.is_inference_mode_enabled,
    "autocast": lambda: [[torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)] for d in devices.TYPES],
    "autocast cache": torch.is_autocast_cache_enabled,
    "deterministic": lambda: [
        torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
    ],
    "float32 products": torch.get_float32_matmul_precision,
    "float32 of all": lambda: backends.fp32_precision,
    "float32 of oneDNN": lambda: [backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision],
    "oneDNN": lambda: backends.mkldnn.enabled,
    "fast path of transformers": backends.mha.get_fastpath_enabled,
    **devices.SWITCHES,
}  # fmt: skip


def switches() -> list[Any]:
    """Each switch as it is now. Torch refuses to tell a float32 switch that was set in its newer way in the older one;
    then the newer tells.
    """
    return [[name, _state(read)] for name, read in SWITCHES.items()]


def tracing_switches() -> list[Any]:
    """Those that what is traced depends on, here. A compiled step is in no inference mode, wherever it is called."""
    left_out = devices.absent_switches()
    return [[name, _state(read)] for name, read in SWITCHES.items() if name != "inference" and name not in left_out]


def _state(read: Callable[[], Any]) -> str:
    try:
        return str(read())
    except RuntimeError:
        return "set in another way"


# --- What lies outside of a process or changes by itself: the environment, files, the clock, random numbers ----------
#
# Code that asks for it gives one program now and another at the next start, whatever is written in the code. A module
# of Python's library counts as the world unless it is in PURE.


PURE = {
    "__future__", "_abc", "_collections", "_collections_abc", "_functools", "_operator", "_struct", "_warnings",
    "_weakref", "_weakrefset", "abc", "array", "bisect", "builtins", "cmath", "collections", "colorsys", "contextlib",
    "contextvars", "copy", "dataclasses", "decimal", "enum", "fractions", "functools", "heapq", "inspect", "itertools",
    "json", "keyword", "logging", "math", "numbers", "operator", "pprint", "re", "reprlib", "statistics", "string",
    "struct", "textwrap", "traceback", "types", "typing", "unicodedata", "warnings", "weakref",
}  # fmt: skip
OF_SYS = {"byteorder", "float_info", "hexversion", "implementation", "maxsize", "platform", "version_info"}
BUILTINS = {"open", "input", "globals", "locals", "eval", "exec", "compile", "__import__", "breakpoint"}
ATTRIBUTES = {"read_text", "read_bytes", "open", "exists", "is_file", "iterdir"}  # of files and paths
READERS = {"load_file", "safe_open", "fromfile", "loadtxt", "genfromtxt", "memmap", "imread", "read_csv", "from_file"}
MODULES = {"torch.random", "torch.distributed", "torch.hub", "numpy.random"}
OF_MODULES = {
    "torch": {"load", "initial_seed", "seed", "get_rng_state", "get_num_threads", "get_num_interop_threads"},
    **devices.ASKED,
    "torch.jit": {"load"},
    "numpy": {"load"},
}  # what these modules say of the world


def asked(value: Any) -> str:
    """What of the world a function, class or object is; "" for nothing."""
    if isinstance(value, PurePath):
        return "a path"
    named = getattr(value, "__module__", None) or type(getattr(value, "__self__", None)).__module__
    name = getattr(value, "__qualname__", None)
    if not isinstance(named, str) or not isinstance(name, str):
        named, name = type(value).__module__, type(value).__qualname__
    if _outside(named) or name in OF_MODULES.get(named, ()) or (name in READERS and callable(value)):
        return f"{named}.{name}"
    return ""


def asked_of(module: ModuleType, names: Set[str]) -> str:
    """What of the world code may ask a module for that uses these names; "" for nothing."""
    found = module.__name__
    if found == "sys":
        return ", ".join(f"sys.{name}" for name in sorted(names & vars(sys).keys() - OF_SYS))
    if _outside(found) or found in MODULES:
        return found
    asking = names & (OF_MODULES.get(found, set()) | READERS) & vars(module).keys()
    return ", ".join(f"{found}.{name}" for name in sorted(asking))


def _outside(module: str) -> bool:
    top = module.partition(".")[0]
    return top in sys.stdlib_module_names and top not in PURE and top != "sys"


# --- Functions and classes of torch, of Python and of other distributions that somebody has put others in place of ---


SPACES: tuple[Any, ...] = (
    builtins, torch, torch.Tensor, torch.fft, torch.linalg, torch.special, torch.nn.attention, nn.functional, nn.init,
)  # fmt: skip


def patched(describer: Describer) -> Any:
    """Names in torch's own modules with what they stand for; elsewhere, own functions among installed ones."""
    names: list[str] = []
    trees: list[Any] = []
    for space in SPACES:
        for name, value in list(vars(space).items()):
            if isinstance(value, ModuleType) or (name.startswith("__") and name.endswith("__") and not callable(value)):
                continue
            stands_for = getattr(value, "__qualname__", None)
            if isinstance(stands_for, str):
                names.append(f"{name} {stands_for}")
            replaced = [
                function
                for function in functions_of(value)
                if not function.__code__.co_filename.startswith(torch_folder())
            ]
            for member in (*replaced, *([value] if is_put_there(value) else [])):
                trees.append([name, describer.tree(member, f"{space.__name__}.{name}")])
    for mode in modes_that_are_on():
        if is_own_class(type(mode)):
            trees.append(["mode", describer.tree(mode, "a mode that is on")])
    for module, name, function in _put_into_others():
        trees.append([module, name, describer.tree(function, f"{module}.{name}")])
    return [hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest(), trees]


def _put_into_others() -> Iterator[tuple[str, str, FunctionType]]:
    """Own functions that stand in modules of transformers and PEFT."""
    for place in sorted(sys.modules):
        if place.partition(".")[0] in ("transformers", "peft"):
            installed = getattr(sys.modules[place], "__file__", None)
            for name, value in list(vars(sys.modules[place]).items()):
                if type(value) is FunctionType and value.__code__.co_filename != installed and is_own_function(value):
                    yield place, name, value


# --- What the code of a model looks at -------------------------------------------------------------------------------
#
# It looks at the values that own functions and methods read of modules, however they get there.
#
# Terms
#   own        of the user's files; what installed code looks at is taken to follow from its version
#   reached    from `forward`, as far as names tell: a method is where code that is reached uses its name
#   world      what lies outside of the process or changes by itself (csc.cache.keys)


INERT = ("typing", "__future__", "types")  # nothing that a result depends on beyond its name
NOT_IN_FORWARD = {  # methods that objects and models have for other ends
    "__repr__", "__str__", "__del__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__", "__deepcopy__",
    "extra_repr", "state_dict", "load_state_dict", "_load_from_state_dict", "_save_to_state_dict", "train", "eval",
    "reset_parameters", "_init_weights", "init_weights", "post_init", "from_pretrained", "save_pretrained", "generate",
    "prepare_inputs_for_generation", "tie_weights", "to", *devices.TYPES, "apply", "_apply",
}  # fmt: skip


def reads(describer: Describer) -> Any:
    """What the code that the describer has met looks at, that code's own included."""
    finder = _Reads(describer)
    finder.follow()
    finder.check()
    return finder.values


class _Reads:
    def __init__(self, describer: Describer) -> None:
        self.values: list[Any] = []
        self._describer = describer
        self._known: dict[tuple[int, str], ModuleType | None] = {}  # (namespace, name) that have been described
        self._named: dict[FunctionType, list[FunctionType]] = {}  # functions that a function names
        self._asks: dict[FunctionType, list[str]] = {}  # what of the world
        self._dynamic = False
        self._names = set[str]()

    def follow(self) -> None:
        """Describe what functions look at, and what the functions found with it look at, until there are no more."""
        waiting, methods = 0, 0
        while True:
            functions = list(self._describer.functions)
            methods_found = self._describer.classes.methods
            if waiting < len(functions):
                self._look(functions[waiting])
                waiting += 1
            elif methods < len(methods_found):
                self._look(methods_found[methods][2])
                methods += 1
            elif not self._look_into_escaped():
                return

    def _look(self, function: FunctionType) -> None:
        if function in self._named or not is_own_function(function):
            return
        self._named[function] = []
        known = facts(function.__code__)
        self._names |= known.names
        self._dynamic = self._dynamic or known.dynamic
        space = function.__globals__
        for name in sorted(known.attributes & ATTRIBUTES):
            self._ask(function, 0, f"reads files (`{name}`)")
        for name, line in known.globals:
            if name in space:
                self._value(function, space, name, line, known)
            elif name in BUILTINS and hasattr(builtins, name):
                self._ask(function, line, f"calls `{name}`")
        for name, above, inner, line in known.imports:
            full_name = self._imported(function, name, above, line, known)
            for inner_name in inner:
                if sys.modules.get(full_name) is not None and inner_name not in vars(sys.modules[full_name]):
                    self._imported(function, f"{full_name}.{inner_name}", 0, line, known)

    def _imported(self, function: FunctionType, name: str, above: int, line: int, known: Facts) -> str:
        package = str(function.__globals__.get("__package__") or "").split(".")
        parts = [*package[: len(package) + 1 - above], *filter(None, [name])] if above else [name]
        full_name = ".".join(filter(None, parts))
        module = sys.modules.get(full_name)
        if module is None:
            path = file_of(full_name, str(PurePath(function.__code__.co_filename).parent))
            if path is not None and is_own(path[0]):
                self._ask(function, line, f"imports {full_name}, which was not loaded before")
            return full_name
        for owner in (module, sys.modules.get(full_name.partition(".")[0])):
            if owner is not None:
                self._module(function, owner, line, known, set())
        return full_name

    def _value(self, function: FunctionType, space: dict[str, Any], name: str, line: int, known: Facts) -> None:
        """What a function finds under a name that it uses, in its own module or another one."""
        value = space[name]
        if isinstance(value, ModuleType):
            self._module(function, value, line, known, set())
            return
        if isinstance(value, type):
            if issubclass(value, nn.Module):  # it may be made in forward
                constructors = [f for cls in value.__mro__ for f in functions_of(vars(cls).get("__init__"))]
                self._named[function] += filter(is_own_function, constructors)
        else:
            self._named[function] += filter(is_own_function, functions_of(value))
        if request := asked(value):
            self._ask(function, line, f"uses {request}")
            return
        if (id(space), name) in self._known or _inert(value):
            return
        self._known[id(space), name] = None
        place = f"{PurePath(str(space.get('__file__', ''))).name}: {name}"
        self.values.append([place, self._described(value, place)])

    def _described(self, value: Any, place: str) -> Any:
        if isinstance(value, type):
            return self._describer.classes.number(value, place)
        if isinstance(value, FunctionType) or type(value) is CACHED:
            trees = []
            for function in functions_of(value):
                trees.append(self._describer.function(function, place))
                self._look(function)
            return trees
        return self._describer.tree(value, place)

    def _module(self, function: FunctionType, module: ModuleType, line: int, known: Facts, seen: set[int]) -> None:
        """What a function finds in a module that it names: whatever there has a name that the function uses."""
        if id(module) in seen or module.__name__.partition(".")[0] == "csc":
            return
        seen.add(id(module))
        space = vars(module)
        if request := asked_of(module, known.names):
            self._ask(function, line, f"uses {request}")
            return
        path = getattr(module, "__file__", None) or ""
        if is_source(path) and is_own(path):
            self._describer.tree(module, module.__name__)
            names = list(space) if known.dynamic else [*known.names, "__getattr__"]
            for name in sorted(name for name in names if name in space and not _of_python(name)):
                value = space[name]
                if isinstance(value, ModuleType):
                    self._module(function, value, line, known, seen)
                else:
                    self._value(function, space, name, line, known)
            return
        for name in sorted(known.names):
            if name in space:
                if isinstance(space[name], ModuleType):
                    self._module(function, space[name], line, known, seen)
                else:
                    self._installed(function, module, name)

    def _installed(self, function: FunctionType, module: ModuleType, name: str) -> None:
        """A value of somebody else's module: which one it is; what it is where it is the user's, or plain."""
        value = vars(module)[name]
        self._named[function] += filter(is_own_function, functions_of(value))
        if (id(vars(module)), name) in self._known:
            return
        self._known[id(vars(module)), name] = None
        place = f"{module.__name__}.{name}"
        try:
            self.values.append([place, self._described(value, place)])
        except Opaque:
            self.values.append([place, type(value).__qualname__])

    def _look_into_escaped(self) -> bool:
        """What is in own modules that are values, under names that any code uses. False if that is known."""
        before = len(self._known)
        for module in list(self._describer.escaped.values()):
            space = vars(module)
            names = space.keys() if self._dynamic else self._names & space.keys()
            for name in sorted(names):
                value = space[name]
                if (_of_python(name) and name != "__getattr__") or (id(space), name) in self._known:
                    continue
                self._known[id(space), name] = None
                if isinstance(value, ModuleType) or not _inert(value):
                    place = f"{PurePath(str(space.get('__file__', ''))).name}: {name}"
                    self.values.append([place, self._describer.tree(value, place)])
        return len(self._known) > before

    # what forward reaches of it

    def _ask(self, function: FunctionType, line: int, request: str) -> None:
        file = PurePath(function.__code__.co_filename).name
        place = f"{file}:{line or function.__code__.co_firstlineno}: {function.__qualname__}"
        self._asks.setdefault(function, []).append(f"{place} {request}, which may differ at every start")

    def check(self) -> None:
        """Opaque if code that forward reaches asks the world for something."""
        if self._asks:
            for function in self._reached():
                if function in self._asks:
                    raise Opaque(self._asks[function][0])

    def _reached(self) -> Iterator[FunctionType]:
        by_name: dict[str, list[FunctionType]] = {}
        reached = dict.fromkeys(self._describer.functions)
        for kind, name, function in self._describer.classes.methods:
            by_name.setdefault(name, []).append(function)
            if name == "forward" or _called_by_others(kind, name):
                reached[function] = None
        waiting = list(reached)
        while waiting:
            function = waiting.pop(0)
            yield function
            names = facts(function.__code__)
            called = by_name if names.dynamic else names.names & by_name.keys()
            for one in (*self._named.get(function, ()), *(f for name in called for f in by_name[name])):
                if one not in reached:
                    reached[one] = None
                    waiting.append(one)


def _called_by_others(kind: type, name: str) -> bool:
    """True for a method that Python calls by itself, or that a class of somebody else may call under its own name."""
    if name in NOT_IN_FORWARD:
        return False
    if name.startswith("__") and name.endswith("__"):
        return not (name == "__init__" and issubclass(kind, nn.Module))
    return any(name in vars(cls) for cls in kind.__mro__ if not is_own_class(cls))


def _inert(value: Any) -> bool:
    named = type(value).__module__ in INERT and not isinstance(value, SimpleNamespace)
    return isinstance(value, logging.Logger) or named


def _of_python(name: str) -> bool:
    """True for what Python itself puts into a module."""
    return name.startswith("__") and name.endswith("__") and name != "__getattr__"


# --- Keys: hashes of all that decides what csc makes of a model, and of nothing else ---------------------------------


FORMAT = 5
# Of the options; and the mesh within layers.
OF_TRACES = ("loss_weight", "context", "precision", "keep_fp32", "loss_chunk", "fuse", "sequence_parallel", "replicate")
DISTRIBUTIONS = ("torch", "transformers", "triton")

__all__ = ["Opaque", "function_key", "mesh_key", "model_key", "own_sources", "passes_key", "program_key", "trace_key"]


def model_key(model: nn.Module, extra: Mapping[str, Any]) -> str:
    """Of the model as it is traced, without tracing it: code, configuration, shapes, buffers; not its weights, nor
    what is frozen.

    extra: entries of the batch that are no tensors. Opaque, with the place, for what cannot be described.
    """
    describer = Describer(Origins(), device_of(model).type)
    with training(model), without_kv_cache(model):
        entries = describer.tree(dict(sorted(extra.items())), "batch")
        described = [describer.model(model), describer.hooks_of_all(), entries]
        described += [patched(describer), reads(describer), describer.classes.tree()]
    return _hash([FORMAT, described, describer.origins.tree(), _environment(model)])


def trace_key(model: str, batch: Any, options: Options, passes: str = "") -> str:
    """model: its key; batch: the key of a match (csc.capture.guards); passes: that of the options' passes."""
    chosen = [getattr(options, name) for name in OF_TRACES]
    return _hash(
        [
            "trace",
            model,
            repr(batch),
            *options.mesh.graph_key,
            repr(chosen),
            passes,
        ]
    )


def passes_key(options: Options) -> str:
    """Of passes that are not csc's own: their code and options, and what else their code looks at; and of the order.

    Passes of a user that trace may look at all options. Opaque, with the place, for what cannot be described.
    """
    if options.passes is None:
        return ""
    describer = Describer(Origins())
    steps = [one.name if of_csc(one) else describer.tree(one, f"pass {one.name}") for one in options.passes]
    described = [steps, patched(describer), reads(describer), describer.classes.tree(), describer.origins.tree()]
    return _hash([described, _chosen(options) if traced_by_users(options) else None])


def function_key(function: Callable[..., Any]) -> str:
    """Of what a function of a user does: its code, what it holds, and what else its code looks at; not of the rest of
    its file. Empty for one that cannot be described, as one that reads files.
    """
    describer = Describer(Origins())
    try:
        return _hash([describer.tree(function, "function"), reads(describer), describer.classes.tree()])
    except Opaque:
        return ""


def program_key(trace: str, options: Options, trainable: Mapping[str, bool]) -> str:
    """trace: the key of what it is made from, the passes in it; trainable: `requires_grad` of the parameters."""
    chosen = _chosen(options)
    return _hash(["program", trace, chosen, sorted(trainable.items())])


def mesh_key(model: str, sizes: Any, options: Options, trainable: Mapping[str, bool]) -> str:
    """model: its key; sizes: of the tensors of the example; options: with the open mesh."""
    return _hash(["mesh", program_key(model, options, trainable), repr(sizes)])


def _chosen(options: Options) -> dict[str, str]:
    """Of all options but the passes, which have a key of their own."""
    names = [one.name for one in fields(Options) if one.name != "passes"]
    return {name: _option(name, getattr(options, name)) for name in names}


def _option(name: str, value: Any) -> str:
    """Of an option that names a file, or several, what is in it."""
    if name == "hardware" and isinstance(value, tuple):
        return repr([_option(name, item) for item in value])
    if name in ("schedule", "hardware") and isinstance(value, str):
        path = Path(value)
        if path.suffix in (".txt", ".toml") and path.is_file():
            return hashlib.sha256(path.read_bytes()).hexdigest()
        return value
    return str(value) if name == "schedule" else repr(value)


def _environment(model: nn.Module) -> Any:
    device = device_of(model)
    here = [device.type, devices.capability(device), switches()]
    return [platform.python_version(), _versions(), *here, own_sources()]


@cache
def _versions() -> list[list[str]]:
    return [[name, version(name)] for name in DISTRIBUTIONS if importlib.util.find_spec(name)]


@cache
def own_sources() -> str:
    """A hash of csc's own files, as this process runs them: another csc, or an edited one, starts afresh."""
    digest = hashlib.sha256()
    for folder in csc_folders():
        for file in sorted(folder.rglob("*")):
            if file.suffix in (".py", ".toml") and file.is_file():
                digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()


def _hash(tree: Any) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
