"""Things that hold values, with the values that they had: mappings, lists, objects, tensors."""

from __future__ import annotations

import builtins
import gc
import io
import os
import sys
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from itertools import chain, repeat
from operator import attrgetter, is_
from types import FrameType, MappingProxyType
from typing import Any, TypeGuard
from unittest.mock import patch

import torch
from torch import nn

from csc.capture.dedup.equality import attributes_read
from csc.capture.sources import is_own
from csc.errors import InputError
from csc.kernels.opaque import is_opaque
from csc.torch_private.fast_guards import dict_version
from csc.torch_private.traces import outside_tracing

# --- Mappings whose writes Python counts: one number says that nothing was written, whatever they hold ---------------
#
# A number says nothing of the order in an OrderedDict, which has one of its own. Nor, from Python 3.12 on, does it
# count that an empty dict became a copy of another one (`update`): whether those are empty still is asked each time.


Holds = Callable[[], bool]


class Versioned:
    """held: (mapping, whether it holds what it did), as it is now."""

    def __init__(self, held: Iterable[tuple[dict[Any, Any], Holds]]) -> None:
        pairs = list(held)
        self._mappings, self._asked = [mapping for mapping, _ in pairs], [holds for _, holds in pairs]
        versions = list(map(dict_version, self._mappings))
        self._versions: list[int | None] = [number if holds() else None for number, holds in zip(versions, self._asked)]
        self._empty = self._empty_ones()

    def hold(self) -> bool:
        """Whether each holds what it did."""
        now: list[int | None] = list(map(dict_version, self._mappings))
        filled = any(map(dict.__len__, self._empty))
        if now == self._versions and not filled:
            return True
        written = (holds for holds, old, new in zip(self._asked, self._versions, now) if filled or old != new)
        if not all(holds() for holds in written):
            return False
        self._versions, self._empty = now, self._empty_ones()
        return True

    def _empty_ones(self) -> list[dict[Any, Any]]:
        return [mapping for mapping in self._mappings if not dict.__len__(mapping)]


def counted(mapping: Mapping[Any, Any]) -> dict[Any, Any] | None:
    """The dict that counts the writes of a mapping: itself, or that of a class, which Python shows through a proxy."""
    one = gc.get_referents(mapping)[0] if isinstance(mapping, MappingProxyType) else mapping
    return one if isinstance(one, dict) and not isinstance(one, OrderedDict) else None


def kind_of(mapping: Mapping[Any, Any]) -> Any:
    """The class of Python whose methods read a mapping as it is: its own may make values on demand."""
    if type(mapping) is dict:  # nearly all are
        return dict
    return next((kind for kind in (OrderedDict, dict) if isinstance(mapping, kind)), type(mapping))


def members_hold(mapping: Mapping[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> bool:
    """See above."""
    kind = kind_of(mapping)
    size = dict.__len__(mapping) if isinstance(mapping, dict) else len(mapping)
    if not size == len(keys) == len(values):
        return False
    return all(map(is_, kind.__iter__(mapping), keys)) and all(map(is_, kind.values(mapping), values))


# --- Tensors as they were, by what changes when one is written to: its version; where and how it lies, as ------------
#
# `tensor.data = other` changes; and the bytes of a small one, since `tensor.data.mul_(2)` and NumPy leave the version
# as it was.


SMALL = 4096  # bytes: of what lies on the CPU, of which a microsecond compares that many
VERSION, KIND = attrgetter("_version"), attrgetter("dtype", "shape")
HOW = (torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg, KIND)  # one lies


class TensorValues:
    """named: (path, tensor); those in inference mode have no versions, and are left out."""

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._paths, self._tensors = list[str](), list[torch.Tensor]()
        for path, tensor in named:
            if not tensor.is_inference():
                self._paths.append(path)
                self._tensors.append(tensor)
        self._versions = list(map(VERSION, self._tensors))
        lying = [(path, tensor) for path, tensor in zip(self._paths, self._tensors) if _lies(tensor)]
        self._lying, self._lying_paths = [tensor for _, tensor in lying], [path for path, _ in lying]
        self._places = self._as_they_lie()
        self._bytes = [(path, view, view.tobytes()) for path, tensor in lying if (view := _bytes(tensor)) is not None]

    def hold(self) -> bool:
        """Whether none was written to or moved."""
        return (
            list(map(VERSION, self._tensors)) == self._versions
            and self._as_they_lie() == self._places
            and all(view.tobytes() == before for _, view, before in self._bytes)
        )

    def changed(self) -> list[str]:
        """The paths of those that were."""
        changed = [
            path for path, tensor, was in zip(self._paths, self._tensors, self._versions) if tensor._version != was
        ]
        for now, before in zip(self._as_they_lie(), self._places):
            changed += [path for path, pointer, was in zip(self._lying_paths, now, before) if pointer != was]
        return changed + [path for path, view, before in self._bytes if view.tobytes() != before]

    def _as_they_lie(self) -> list[list[Any]]:
        return [list(map(reader, self._lying)) for reader in HOW]


def _lies(tensor: torch.Tensor) -> bool:
    """Whether it is one piece of memory, and no tensor class that has its own ways."""
    return type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer) and tensor.layout is torch.strided


def _bytes(tensor: torch.Tensor) -> Any:
    """The memory of a small one, as NumPy shows it."""
    with outside_tracing():
        small = 0 < tensor.nbytes <= SMALL and tensor.device.type == "cpu" and tensor.is_contiguous()
        if not small or tensor.is_conj() or tensor.is_neg():
            return None
        return tensor.detach().reshape(-1).view(torch.uint8).numpy()


# --- Things that hold values, with the values that they had ----------------------------------------------------------
#
# These are lists, dicts, classes, objects with __slots__, names of a namespace, and environment variables.
#
# Terms
#   watch      (path, names, read, before): `read` is a partial of one of the functions here, `before` what it gave
#   together   thousands of watches, asked in loops that Python does not see


ABSENT = object()
CONTAINERS = (list, dict, set, OrderedDict, defaultdict, deque)
Read = Callable[[], list[Any]]
Names = tuple[str, ...]
Watch = tuple[str, Names, Read, list[Any]]
CODE, DEFAULTS, OF_KEYWORDS = map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))
PARTS = attrgetter("__code__", "__defaults__", "__kwdefaults__")


def values(members: Mapping[str, Any], left_out: Set[str] = frozenset()) -> list[Any]:
    """As they are, in their order: the class of a mapping may make others on demand."""
    if left_out:
        return [value for name, value in items(members) if str(name) not in left_out]
    return list(kind_of(members).values(members))


def items(members: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """See `values`."""
    return list(kind_of(members).items(members))


def names_of(members: Mapping[Any, Any], left_out: Set[str] = frozenset()) -> Names:
    """Of `values`, in their order."""
    return tuple(name for name in (str(key) for key, _ in items(members)) if name not in left_out)


def elements(container: Iterable[Any]) -> list[Any]:
    """Of a list, a set, a deque."""
    return list(container)


def attributes(value: Any, names: Names) -> list[Any]:
    """Of an object, by these names."""
    return [getattr(value, name, ABSENT) for name in names]


def looked_up(space: Mapping[str, Any], names: Names) -> list[Any]:
    """Of a namespace, by these names."""
    return [space.get(name, ABSENT) for name in names]


def environment(names: Names) -> list[Any]:
    """Environment variables, equal ones as the same object each time."""
    return [sys.intern(os.environ[name]) if name in os.environ else ABSENT for name in names]


def put_members_back(
    read: Read, before: Mapping[str, Any], elements_before: Sequence[Any], is_wrong: Callable[[Any], bool]
) -> None:
    """Put back what a partial of one of these functions reads and `is_wrong`: by name, or all elements."""
    function, holder = read.func, read.args[0]  # type: ignore[attr-defined]
    if function is elements:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(elements_before)
    elif function is attributes:
        for name, value in before.items():
            if is_wrong(getattr(holder, name, ABSENT)):
                delattr(holder, name) if value is ABSENT else setattr(holder, name, value)
    elif isinstance(holder, dict):
        for key in [key for key, value in items(holder) if is_wrong(value)]:
            was = before.get(str(key), ABSENT)
            holder.pop(key) if was is ABSENT else holder.update({key: was})


def copied(value: Any) -> Any:
    """A container of its own with what a container holds now; else the value itself."""
    return copy(value) if type(value) in CONTAINERS else value


def put_back(value: Any, content: Any) -> Any:
    """The value; a container holding what it held when it was copied."""
    if value is not content:
        value.clear()
        value.extend(content) if isinstance(value, (list, deque)) else value.update(content)
    return value


def all_variables() -> list[Any]:
    """The environment, an equal one as the same object each time."""
    return [sys.intern(repr(sorted(os.environ.items())))]


def _at(read: Read, places: list[int]) -> list[Any]:
    values_read = read()
    return [values_read[place] for place in places]


def identical(now: Any, before: Any) -> bool:
    """Whether two sequences have the same objects."""
    return len(now) == len(before) and all(map(is_, now, before))


def without(watch: Watch, left_out: Set[str]) -> Watch:
    """The same of all its values but those of these names, which a mapping may get only later."""
    if not left_out:
        return watch
    path, names, read, _ = watch
    kept = tuple(name for name in names if name not in left_out)
    if isinstance(read, partial) and read.func is values:
        rest: Read = partial(values, read.args[0], frozenset(left_out))
    else:
        places = [place for place, name in enumerate(names) if name not in left_out]
        rest = partial(_at, read, places)
    return path, kept, rest, rest()


class Together:
    """Each kind of watch has one loop; what is of no kind is read as it is. Most mappings are empty, and stay so."""

    def __init__(self, watches: Sequence[Watch]) -> None:
        kinds: dict[Any, list[Watch]] = defaultdict(list)
        for watch in watches:
            kinds[_kind(watch)].append(watch)
        self._empty = _firsts(kinds["empty"])
        mappings = list(map(counted, _firsts(kinds["counted"])))
        self._counted = Versioned(zip(filter(None, mappings), map(_holds, kinds["counted"])))
        self._ordered = list(map(_holds, kinds["ordered"]))
        self._others = [(read, before) for _, _, read, before in kinds[None]]
        self._named = [(read.args, names) for _, names, read, _ in kinds[None] if is_of_members(read)]
        self._containers = _firsts(kinds[elements])
        self._sizes = [len(before) for _, _, _, before in kinds[elements]]
        objects = kinds[attributes]
        self._objects = [obj for obj, (_, names, _, _) in zip(_firsts(objects), objects) for _ in names]
        self._attributes = [name for _, names, _, _ in objects for name in names]
        self._before = [value for kind in (kinds[elements], objects) for _, _, _, before in kind for value in before]
        self._variables = dict(chain.from_iterable(zip(names, before) for _, names, _, before in kinds[environment]))
        self._encoded: dict[Any, Any] = {}  # all variables, when these held last
        self._version: int | None = None  # and how often those had been written to then

    def hold(self) -> bool:
        """Whether each holds the very values that it had."""
        return (
            not any(self._empty)
            and self._counted.hold()
            and all(holds() for holds in self._ordered)
            and list(map(len, self._containers)) == self._sizes
            and all(map(is_, self._now(), self._before))
            and self._variables_hold()
            and all(names_of(*arguments) == names for arguments, names in self._named)
            and all(identical(read(), before) for read, before in self._others)
        )

    def _now(self) -> Iterator[Any]:
        return chain(
            chain.from_iterable(self._containers), map(getattr, self._objects, self._attributes, repeat(ABSENT))
        )

    def _variables_hold(self) -> bool:
        if not self._variables:
            return True
        kept = vars(os.environ).get("_data", os.environ)  # as Python keeps them: nothing has to be decoded
        version = dict_version(kept) if type(kept) is dict else None
        if version is not None and version == self._version:
            return True
        encoded, self._version = dict(kept), version
        if encoded == self._encoded:
            return True
        now = dict(os.environ)  # one by one, each is encoded first
        holds = all(now.get(name, ABSENT) == before for name, before in self._variables.items())
        if holds:
            self._encoded = encoded
        else:
            self._version = None
        return holds


class Codes:
    """Functions with their code and defaults, read one kind after the other: a step has driven them out of the caches,
    and what all of them lead to is ten times as much. Equal code is as good.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]]) -> None:
        self._functions = functions
        self._codes = list(map(CODE, functions))
        self._defaults = [(read, list(map(read, functions))) for read in (DEFAULTS, OF_KEYWORDS)]

    def hold(self) -> bool:
        """Whether each has the very ones that it had."""
        return list(map(CODE, self._functions)) == self._codes and all(
            all(map(is_, map(read, self._functions), before)) for read, before in self._defaults
        )


def is_of_members(read: Read) -> TypeGuard[partial[list[Any]]]:
    """Whether these are the values of a mapping, or of a class."""
    return isinstance(read, partial) and read.func is values


def _kind(watch: Watch) -> Any:
    """What the loop over watches of a kind goes by."""
    _, _, read, before = watch
    if not isinstance(read, partial) or (read.func is values and len(read.args) > 1):
        return None
    if read.func in (elements, attributes, environment):
        return read.func
    if read.func is values and type(read.args[0]) in (dict, OrderedDict) and not before:
        return "empty"
    if read.func not in (values, looked_up):
        return None
    return "counted" if counted(read.args[0]) else "ordered"


def _holds(watch: Watch) -> Callable[[], bool]:
    """Whether what it watches has what it had."""
    _, names, read, before = watch
    assert isinstance(read, partial)
    mapping = read.args[0]
    if read.func is values:
        return partial(members_hold, mapping, [key for key, _ in items(mapping)], before)
    return partial(_looked_up_hold, mapping, names, before)


def _looked_up_hold(space: Mapping[str, Any], names: Names, before: Sequence[Any]) -> bool:
    return identical(looked_up(space, names), before)


def _firsts(watches: Sequence[Watch]) -> list[Any]:
    """What they watch."""
    return [read.args[0] for _, _, read, _ in watches if isinstance(read, partial)]


# --- Files that a forward reads --------------------------------------------------------------------------------------
#
# Which ones shows in a trace alone. The state of one is what the system tells of it: when it was written, size, place.


FileState = tuple[int, ...] | None  # None: there is none
READING = ((builtins, "open"), (io, "open"), (os, "stat"), (os, "listdir"), (os, "scandir"))
NO_FILES = ("/proc/", "/sys/", "/dev/")  # what changes whenever it is looked at
SOURCES = (".py", ".pyc")  # read for messages, too
stat = os.stat


def file_state(path: Any) -> FileState:
    """Of a path, or of an open file's number."""
    try:
        told = stat(path)
    except (OSError, ValueError):
        return None
    return told.st_mtime_ns, told.st_size, told.st_ino


@contextmanager
def files_read() -> Iterator[dict[str, FileState]]:
    """Files and folders that code of models reads or looks for within the context, as they were then."""
    found: dict[str, FileState] = {}
    thread = threading.get_ident()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **kwargs: Any) -> Any:
            path, mode = args[0] if args else None, kwargs.get("mode", args[1] if len(args) > 1 else "r")
            writes = isinstance(mode, str) and "r" not in mode and "+" not in mode
            named = isinstance(path, (str, os.PathLike)) and threading.get_ident() == thread
            if named and not writes and _asks_itself(sys._getframe(1)):
                full = os.path.abspath(str(path))
                if not full.startswith(NO_FILES) and not full.endswith(SOURCES):
                    found.setdefault(full, file_state(full))
            return function(*args, **kwargs)

        return asked

    with ExitStack() as patches:
        for module, name in READING:
            patches.enter_context(patch.object(module, name, noting(getattr(module, name))))
        yield found


def _asks_itself(frame: FrameType | None) -> bool:
    """Whether code of a model asks, through Python's library and NumPy alone."""
    while frame is not None:
        top = str(frame.f_globals.get("__name__")).partition(".")[0]
        if top not in sys.stdlib_module_names and top != "numpy":
            return is_own(top)
        frame = frame.f_back
    return False


# --- What the rest of a model reads of an opaque module, which runs as it is -----------------------------------------
#
# A trace sees what was there, and no more.


Slot = tuple[str, str]  # the path of a module, the name of an attribute
Namespace = tuple[str, dict[str, Any], list[str]]
OF_CALLS = frozenset({"forward", "training"})  # what calling a module reads, as it reads its hooks


def hidden(model: nn.Module) -> dict[int, str]:
    """Of these a trace sees nothing but the parameters, and what other modules read of them."""
    return {
        id(module_name): ".".join(filter(None, (path, inner)))
        for path, module in model.named_modules()
        if is_opaque(module)
        for inner, module_name in module.named_modules()
    }


@contextmanager
def opaque_reads(model: nn.Module) -> Iterator[set[Slot]]:
    """Attributes of opaque modules that a trace reads, which runs none of them. No tensors: those are in the graph."""
    read: set[Slot] = set()
    opaque = [(path, module) for path, module in model.named_modules() if is_opaque(module)]
    with ExitStack() as stack:
        seen = [(path, module, stack.enter_context(attributes_read(module))) for path, module in opaque]
        yield read
    for path, module, names in seen:
        for inner, name in names:
            value = vars(module.get_submodule(inner)).get(name, ABSENT)
            if value is not ABSENT and not (isinstance(value, torch.Tensor) or name in OF_CALLS or "_hooks" in name):
                read.add((".".join(filter(None, (path, inner))), name))


def refuse_shared_tensors(model: nn.Module, constants: Mapping[str, torch.Tensor]) -> None:
    """constants: the tensors, no parameters, that a graph reads. What an opaque module has in memory it may change in
    every step, before others read it or after.
    """
    inside = hidden(model)
    owners = {
        _address(tensor): f"{inside[id(module)]}.{name}"
        for module in model.modules()
        if id(module) in inside
        for name, tensor in (*module._buffers.items(), *vars(module).items())
        if isinstance(tensor, torch.Tensor)
    }
    for name, tensor in constants.items():
        if (owner := owners.get(_address(tensor))) is not None:
            raise InputError(
                f"the model reads {owner!r}, a tensor of an opaque module, outside of that module, which may change it "
                "in every step", name,
                "let the opaque module itself compute with it, or read a tensor of another module; or make opaque a "
                "module around both",
            )  # fmt: skip


def _address(tensor: torch.Tensor) -> int:
    """Of its memory; of a tensor without any its identity."""
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.untyped_storage().data_ptr()


def namespaces(model: nn.Module, read: Set[Slot]) -> list[Namespace]:
    """Of the modules that these slots are of, each with the names that are read."""
    modules = dict(model.named_modules(remove_duplicate=False))
    spaces: dict[int, Namespace] = {}
    for path, name in sorted(read):
        if path in modules:
            attributes: dict[str, Any] = modules[path].__dict__
            spaces.setdefault(id(attributes), (f"attribute {path}", attributes, []))[2].append(name)
    return list(spaces.values())
