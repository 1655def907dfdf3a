"""Values that are known while a model is traced, so that Python decisions can be taken from them."""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from csc.capture.values.batch_alone import MISSING, Alone, Recording, writes
from csc.capture.values.hoist import STATISTICS
from csc.capture.values.row_index import LazyChunks, LazyNumbers, RowIndices, length
from csc.errors import InputError, calling_line
from csc.ir.capture_guards import Expression
from csc.torch_private.symbolic_sizes import as_hinted, assume_as_many, assume_several, symbols_of
from csc.torch_private.traces import in_functorch_transform, lists_from, outside_tracing, pytree

# --- Whole numbers that a model makes of sizes by torch's functions, not Python's ------------------------------------
#
# `torch.div(length, window, rounding_mode="trunc") - 1` is a tensor, though of sizes alone. Where it then stands for a
# size, a trace knows nothing of it; the number of the same kind as the sizes that it comes from, it does.


SIMPLE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "__add__": operator.add, "__radd__": operator.add, "sub": operator.sub,
    "__sub__": operator.sub, "mul": operator.mul, "__mul__": operator.mul, "__rmul__": operator.mul,
}  # fmt: skip
NUMBERS = (int, torch.SymInt)


class TensorCounts:
    """Of one run."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.Tensor, Any]] = {}

    def of(self, tensor: Any) -> Any:
        """The number that a tensor holds; None if it is not known to be made of sizes."""
        return self._known.get(id(tensor), (tensor, None))[1]

    def add(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """A call, and what it returned."""
        if not isinstance(result, torch.Tensor) or result.dim() or result.dtype != torch.int64:
            return
        if writes(name) or "out" in kwargs:  # perhaps through a view
            self._known.clear()
            return
        number = self._number(name, args, kwargs)
        if number is not None:
            self._known[id(result)] = (result, number)

    def _number(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if len(args) != 2:
            return None
        if name == "div" and kwargs.get("rounding_mode") in ("trunc", "floor") and len(kwargs) == 1:
            plain = all(
                type(argument) in NUMBERS for argument in args
            )  # sizes, so not below 0, where both ways round alike
            return args[0] // args[1] if plain and (type(args[1]) is not int or args[1] > 0) else None
        left, right = (argument if type(argument) in NUMBERS else self.of(argument) for argument in args)
        if name not in SIMPLE or kwargs or left is None or right is None:
            return None
        return SIMPLE[name](left, right)


# --- Loops over the experts that some token chose: `for expert in hit.nonzero():` ------------------------------------
#
# How many turns such a loop has depends on values. A trace goes through it for every expert, and what a turn writes
# stays as it was unless the expert was hit:
#
#     new = old.clone(); write(new); old.copy_(torch.where(hit[expert], new, old))
#
# That is the same as long as nothing else of a turn is left behind: a tensor that one turn makes may not be read by
# another or behind the loop, no local name may carry something from turn to turn, and turns that read parameters have
# to read the same ones (eager PyTorch gives those of an expert that was not hit no gradient, where a trace gives
# zeros). What does not keep to that is refused.


MOST = 1024  # turns
REMEDY = (
    "go through all experts (for expert in range(experts)), or keep the module out of the trace with csc.opaque(module)"
)


class HitLoops:
    """Of one run. parameters: names, by the identity of what they are in it."""

    def __init__(self, parameters: Mapping[int, str]) -> None:
        self._parameters = parameters
        self._masks: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # what nonzero gave, and of what
        self._hit: torch.Tensor | None = None  # of the turn that is under way
        self._turn = 0  # its number, among all; 0 outside of loops
        self._turns = 0
        self._made_in: dict[int, tuple[torch.Tensor, int]] = {}
        self._read: dict[int, set[str]] = {}
        self._open: list[str] = []

    def call(self, name: str, args: Any, kwargs: Any) -> Any:
        """The result of a call that is part of such a loop; NotImplemented for any other."""
        if name == "unbind" and id(args[0]) in self._masks:  # what iterating over a tensor calls
            return self._each(self._masks[id(args[0])][1])
        if self._hit is None or not args or not isinstance(args[0], torch.Tensor) or "out" in kwargs:
            return NotImplemented
        return self._masked(name, args, kwargs) if writes(name) else NotImplemented

    def add(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """A call that was made, and what it returned."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        for tensor in tensors if self._turns else ():
            self._check(tensor)
        if self._turn:
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, torch.Tensor) and not any(leaf is other for other in tensors):
                    self._made_in[id(leaf)] = (leaf, self._turn)
            if "out" in kwargs:
                raise _refused("gives an operation a tensor for its result (out=)")
        if name in ("nonzero", "argwhere") and len(tensors) == 1 and not kwargs.get("as_tuple"):
            mask = tensors[0]
            if mask.dim() == 1 and mask.dtype is torch.bool and type(mask.shape[0]) is int and mask.shape[0] <= MOST:
                self._masks[id(result)] = (result, mask)

    def refuse_left(self) -> None:
        """InputError if a loop was left before its end."""
        if self._open:
            raise _refused("leaves such a loop before its end", self._open[0])

    def _check(self, tensor: torch.Tensor) -> None:
        made_in = self._made_in.get(id(tensor))
        if made_in is not None and made_in[1] != self._turn:
            raise _refused("reads outside of a turn what was made in it")
        if self._turn and id(tensor) in self._parameters:
            self._read[self._turn].add(self._parameters[id(tensor)])

    def _each(self, mask: torch.Tensor) -> Iterator[torch.Tensor]:
        line, frame = calling_line(), _model_frame()
        if self._turn:
            raise _refused("goes through such a loop inside of another", line)
        names = _carried(frame) if frame is not None else None
        if names is None or names:
            raise _refused(f"carries {', '.join(names or ('what it makes',))} from turn to turn", line)
        self._open.append(line)
        first = self._turns + 1
        for expert in range(mask.shape[0]):
            self._hit = None
            hit = mask[expert]
            self._turns += 1
            index = torch.tensor([expert])
            self._turn, self._hit, self._read[self._turns] = self._turns, hit, set()
            yield index
            self._hit, self._turn = None, 0
        self._open.remove(line)
        read = [reads for turn in range(first, self._turns + 1) if (reads := self._read[turn])]
        for other in read:
            for name in sorted(other ^ read[0])[:1]:
                raise _refused(f"reads {name} for some alone, which has no gradient where none of these is hit", line)

    def _masked(self, name: str, args: Any, kwargs: Any) -> Any:
        """A write that has no effect unless the expert was hit."""
        hit, target = self._hit, args[0]
        assert hit is not None
        self._hit = None
        try:
            new = torch.clone(target)
            getattr(torch.Tensor, name)(new, *args[1:], **kwargs)
            target.copy_(torch.where(hit, new, target))
        finally:
            self._hit = hit
        return None if name == "__setitem__" else target


def _model_frame() -> Any:
    """Of the code that loops."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("csc", "torch", "contextlib"):
        frame = frame.f_back
    return frame


def _carried(frame: FrameType) -> list[str] | None:
    """Local names that the loop which begins in a frame writes, and reads before; None if none begins. Not those of
    tensors: if they are others after a turn, reading them is noticed.
    """
    reads: dict[str, bool] = {}  # whether a name is read first
    written: set[str] = set()
    body = [instruction for instruction in dis.get_instructions(frame.f_code) if instruction.offset >= frame.f_lasti]
    if not body or body[0].opname != "FOR_ITER":
        return None
    for instruction in body[1:]:
        if instruction.offset >= body[0].argval:
            break
        if isinstance(instruction.argval, str) and ("_FAST" in instruction.opname or "_DEREF" in instruction.opname):
            writes_it = instruction.opname.startswith("STORE")
            reads.setdefault(instruction.argval, not writes_it)
            written |= {instruction.argval} if writes_it else set()
    known = frame.f_locals
    return sorted(name for name in written if reads[name] and not isinstance(known.get(name), torch.Tensor))


def _refused(fault: str, line: str = "") -> InputError:
    return InputError(
        f"the model goes through the experts that were hit, of which only values tell, and {fault}",
        line or calling_line() or "model",
        REMEDY,
    )


# --- Values that are known while a model is traced, so that Python decisions can be taken from them ------------------
#
# Terms
#   known      a tensor of whole numbers whose values are there beside the traced one: batch entries that are no tokens
#              (image sizes, grids), and what is computed from them and from plain numbers alone
#   deciding   a batch entry whose values decided something: `.tolist()`, an `if`, a size. The capture holds for these
#              values; others are another capture.
#   sources    the batch entries that a tensor was computed from
#
#     watch = Watching({"image_grid_thw": tensor})
#     with watch.entries(batch, asked): model(**batch)   under torch.export, batch holds traced tensors
#     watch.deciding -> {"image_grid_thw": the first line that asked}


Run = Callable[[Any, str, Any, Any], Any]  # of a function, by its name, with arguments
LARGEST = 1 << 16  # elements; beyond, values are not kept
ASKS = frozenset(
    {"tolist", "item", "__int__", "__float__", "__bool__", "__index__", "__contains__", "is_nonzero", "numpy", "equal",
     "nonzero", "argwhere", "unique", "unique_consecutive", "_unique2", "masked_select", "bincount", "allclose",
     "histc", "__array__"}
)  # fmt: skip
FACTORIES = frozenset({"arange", "tensor", "zeros", "ones", "full", "as_tensor", "eye", "linspace", "empty"})
ANSWERS = frozenset(
    {"item", "__int__", "__float__", "__bool__", "__index__", "__contains__", "is_nonzero", "equal", "allclose"}
)  # of these the result is no tensor
INDICES = STATISTICS | {"nonzero", "argwhere", "where", "unique_consecutive"}
SIZED = FACTORIES | {
    "broadcast_to", "chunk", "expand", "interpolate", "narrow", "new_full", "new_ones", "new_zeros", "pad", "repeat",
    "reshape", "roll", "split", "tensor_split", "tile", "unflatten", "unfold", "view",
}  # fmt: skip


@dataclass(frozen=True)
class _Fact:
    """What is known of a traced tensor, kept alive as long as the fact."""

    tensor: torch.Tensor
    value: torch.Tensor | None
    sources: frozenset[str]


LABELLED = {"cross_entropy", "nll_loss"}


def _labels_of_all(input: torch.Tensor, target: torch.Tensor, *_: Any, **__: Any) -> None:
    """Note that rows which masks select and their labels are as many, as torch from 2.13 on does by itself. Before, it
    asks for the two numbers, which a trace does not have.
    """
    if input.dim() and target.dim():
        assume_as_many(input.shape[0], target.shape[0])


class Watching(TorchFunctionMode):
    """Runs operations on known values for real, beside the trace of them."""

    def __init__(
        self,
        values: Mapping[str, torch.Tensor],
        decides: bool = False,
        hoisted: Callable[[Expression, str], Any] = lambda expression, name: None,
    ) -> None:
        """values: the real values of the entries that may decide. decides: whether questions about the batch
        alone are answered for the batch at hand. hoisted(expression, name): what stands for the tensors that it gives,
        computed before the step; None if nothing does.
        """
        super().__init__()
        self._values, self._decides, self._hoisted = values, decides, hoisted
        self.alone = Alone({}, {}, {})
        self.undecided = False  # whether something was asked of the batch alone and not answered
        self._asked: Callable[[frozenset[str]], None] = lambda sources: None
        self._facts: dict[int, _Fact] = {}
        self._sized_by: dict[str, str] = {}  # the known entry that has a size of this symbol
        self._chunks = LazyChunks(self._run)
        self._rows: RowIndices | None = None
        self._counts, self._loops = TensorCounts(), HitLoops({})
        self.recording = Recording({})
        self._unknown: set[int] = set()  # storages of real values that something unknown was written to
        self.deciding: dict[str, str] = {}
        self.asked_last: frozenset[str] = frozenset()  # sources of what was asked for and not known

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's values are there, so that Python decisions may have been taken from them."""
        return self._value(tensor) is not None

    @contextmanager
    def entries(
        self,
        batch: Mapping[str, torch.Tensor],
        asked: Callable[[frozenset[str]], None],
        recording: Recording,
        alone: Alone,
        rows: Callable[[Run], RowIndices] | None = None,
        parameters: Mapping[int, str] | None = None,
    ) -> Iterator[None]:
        """Watch what is computed from these tensors. asked(sources): called before values are asked for, known or not;
        it may raise. rows: makes what moves rows by their numbers, if that is wanted. parameters: names of the model's,
        by the identity of what they are in this run.
        """
        self.recording, self.alone = recording, alone
        self._rows = rows(self._run) if rows is not None else None
        self._asked = asked
        self._facts.clear()
        self._chunks, self._counts = LazyChunks(self._run), TensorCounts()
        self._loops = HitLoops(parameters or {})
        self._sized_by.clear()
        for name, tensor in batch.items():
            self._facts[id(tensor)] = _Fact(tensor, self._values.get(name), frozenset({name}))
            if name in self._values:
                self._sized_by |= {symbol: name for size in tensor.shape for symbol in symbols_of(size)}
        modules = self._rows.real_for_modules() if self._rows is not None else nullcontext()
        with self, modules, lists_from(self._listed):
            yield
            self._chunks.settle()
            self._loops.refuse_left()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if in_functorch_transform():
            result = func(*args, **kwargs)
            self.recording.add(func, args, kwargs, result)
            return result
        name = getattr(func, "__name__", "")
        if name in LABELLED:
            _labels_of_all(*args, **kwargs)
        looped = self._loops.call(name, args, kwargs)
        if looped is not NotImplemented:
            return looped
        if self._rows is not None:
            moved = self._rows.call(func, name, args, kwargs)
            if moved is not NotImplemented:
                return moved
        known_length = length(name, args)
        if known_length is not None:
            return known_length
        shape = self._chunks.shape(name, func, args)
        if shape is not None:
            return shape
        joined = self._chunks.joined(name, args, kwargs)
        if joined is not None:
            return joined
        chunk = self._chunks.reshaped(name, args, kwargs)
        if chunk is not None:
            return chunk
        chunks = self._chunks.cut(name, args, kwargs, lambda args, kwargs: self._run(func, name, args, kwargs))
        return self._run(func, name, args, kwargs) if chunks is None else chunks

    def real(self, value: Any) -> Any:
        """Arguments of a call with what chunks and rows in it stand for (see csc.capture.values.row_index,
        csc.capture.values.row_index).
        """
        rows = self._rows
        return pytree.tree_map(lambda leaf: self._chunks.real(leaf if rows is None else rows.real(leaf)), value)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        args, kwargs = self._sizes_as_numbers(name, self.real(args), self.real(kwargs))
        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sources = frozenset[str]().union(*(self._sources(tensor) for tensor in tensors))
        known = self._all_known(name, tensors, leaves)
        if known:  # with sizes of known entries: what is decided by it holds for these entries alone, sizes and values
            sources |= {self._sized_by[symbol] for leaf in leaves for symbol in symbols_of(leaf)}
        if name == "__format__" and known and not sources:  # a number of the trace alone, as in f"expert_{number}"
            return self._really(func, args, kwargs)
        if _asks(name, args, kwargs):
            if tensors:
                self._asked(sources)
            statistic = self._made_before(func, name, args, kwargs) if known and name in STATISTICS else None
            if statistic is not None:  # no constant, though its values are known: the whole batch has others
                return self._remembered(statistic, self._really(func, args, kwargs), sources)
            if known:
                self._consult(sources)
                real = self._really(func, args, kwargs)
                self.alone.add(func, args, kwargs, real)
                return self._remembered(real, None, sources)
            answer = self._of_batch_alone(func, name, args, kwargs)
            if answer is not MISSING:
                return self._remembered(answer, None, sources)
            if tensors:
                self.asked_last = sources
            args = self._by_numbers(name, args)
        if writes(name) and tensors and (value := self._value(tensors[0])) is not None:
            self._written(value.untyped_storage().data_ptr(), sources, known)
        result = func(*args, **kwargs)
        self.recording.add(func, args, kwargs, result)
        self.alone.add(func, args, kwargs, result)
        self._counts.add(name, args, kwargs, result)
        self._loops.add(name, args, kwargs, result)
        if name == "__getitem__" and isinstance(result, torch.Tensor) and result.dim():
            assume_several(result.shape[0])
        if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(result)):
            if known and writes(name):
                self._really(func, args, kwargs)
            return result
        real = self._really(func, args, kwargs) if known else None
        return self._remembered(result, real, sources)

    def _of_batch_alone(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What a call gives for the batch at hand, if it asks of the batch alone; MISSING if not."""
        if not self._decides:
            self.undecided |= self.alone.expression(func, args, kwargs) is not None
            return MISSING
        if name in ANSWERS or name == "tolist":
            return self.alone.answer(func, args, kwargs)
        answer = self._made_before(func, name, args, kwargs) if name in INDICES else None
        return MISSING if answer is None else answer

    def _made_before(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        """What stands for what a call makes of the batch alone, before the step; None if it makes it of more."""
        expression = self.alone.expression(func, args, kwargs)
        return self._hoisted(expression, name) if expression is not None else None

    def _by_numbers(self, name: str, args: Any) -> Any:
        """`x[mask]` with a mask whose values are known is `x[numbers]`, and the numbers are made before the step."""
        if name != "__getitem__":
            return args
        index: list[Any] = []
        for one in args[1] if isinstance(args[1], tuple) else (args[1],):
            mask = (
                isinstance(one, torch.Tensor)
                and one.dtype in (torch.bool, torch.uint8)
                and self._value(one) is not None
            )
            numbers: Any = (
                self._of_batch_alone(torch.nonzero, "nonzero", (one,), {"as_tuple": True}) if mask else MISSING
            )
            index += (one,) if numbers is MISSING else tuple(numbers)
        return args[0], tuple(index)

    def _listed(self, tensor: torch.Tensor, method: Callable[[], Any]) -> Any:
        """`tensor.tolist()`, which is own() if its values are not known."""
        value, sources = self._value(tensor), self._sources(tensor)
        if in_functorch_transform():
            return method()
        listed = tensor.dim() == 1 and not tensor.is_floating_point()
        count = as_hinted(tensor.shape[0]) if sources and listed else None
        if value is None and count is None and not (self._decides and sources):
            return method()

        def read() -> Any:
            if value is None:
                self._asked(sources)
                answer = self._of_batch_alone(torch.Tensor.tolist, "tolist", (tensor,), {})
                if answer is not MISSING:
                    return answer
                self.asked_last = sources
                return method()
            self._consult(sources)
            with outside_tracing():
                return value.tolist()

        if value is not None:
            self._asked(sources)
        return read() if count is None else LazyNumbers(count, read, value is not None)

    def _sizes_as_numbers(self, name: str, args: Any, kwargs: Any) -> Any:
        """Arguments in which known tensors that stand for a size or a bound are numbers."""

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or leaf.dim() or leaf.is_floating_point():
                return leaf
            count, value = self._counts.of(leaf), self._value(leaf)
            if count is not None:
                return count
            if value is None:
                answer = (
                    self._of_batch_alone(torch.Tensor.item, "item", (leaf,), {}) if self._sources(leaf) else MISSING
                )
                return leaf if answer is MISSING else answer
            self._asked(self._sources(leaf))
            self._consult(self._sources(leaf))
            with outside_tracing():
                return value.item()

        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if not any(isinstance(item, slice) for item in index):
                return args, kwargs
            bounds = tuple(
                slice(number(item.start), number(item.stop), number(item.step)) if isinstance(item, slice) else item
                for item in index
            )
            return (args[0], bounds), kwargs
        if name not in SIZED or name in ("tensor", "as_tensor"):
            return args, kwargs
        first = 0 if name in FACTORIES else 1
        return (*args[:first], *pytree.tree_map(number, args[first:])), pytree.tree_map(number, kwargs)

    def _consult(self, sources: frozenset[str]) -> None:
        for name in sorted(sources - self.deciding.keys()):
            self.deciding[name] = calling_line()

    def _sources(self, tensor: torch.Tensor) -> frozenset[str]:
        fact = self._facts.get(id(tensor))
        return fact.sources if fact is not None else frozenset()

    def _value(self, tensor: torch.Tensor) -> torch.Tensor | None:
        fact = self._facts.get(id(tensor))
        if fact is None or fact.value is None or fact.value.untyped_storage().data_ptr() in self._unknown:
            return None
        return fact.value

    def _written(self, memory: int, sources: frozenset[str], known: bool) -> None:
        """Whatever lies in memory that was written to is computed from what was written."""
        for place, fact in self._facts.items():
            if fact.value is not None and fact.value.untyped_storage().data_ptr() == memory:
                self._facts[place] = replace(fact, sources=fact.sources | sources)
        if not known:
            self._unknown.add(memory)

    def _all_known(self, name: str, tensors: list[torch.Tensor], leaves: list[Any]) -> bool:
        if any(isinstance(leaf, (torch.SymFloat, torch.SymBool)) for leaf in leaves):
            return False
        if not all(symbols_of(leaf) <= self._sized_by.keys() for leaf in leaves):
            return False
        if any(isinstance(leaf, torch.SymInt) and as_hinted(leaf) is None for leaf in leaves):
            return False  # it was of what a mask selects, before torch found it to be of others
        if not tensors:
            return name in FACTORIES
        return all(self._value(tensor) is not None for tensor in tensors)

    def _really(self, func: Any, args: Any, kwargs: Any) -> Any:
        real_args, real_kwargs = pytree.tree_map(self._for_real, (args, kwargs))
        with outside_tracing():
            return func(*real_args, **real_kwargs)

    def _for_real(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self._value(leaf)
        return as_hinted(leaf) if isinstance(leaf, torch.SymInt) else leaf

    def _remembered(self, result: Any, real: Any, sources: frozenset[str]) -> Any:
        """The result; its tensors with their values. real: None if the result is real itself, or nothing is known."""
        leaves, values = pytree.tree_leaves(result), pytree.tree_leaves(real)
        for place, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            value = values[place] if len(values) == len(leaves) else None
            if value is None and real is None and type(leaf) is torch.Tensor and not leaf.is_floating_point():
                with outside_tracing():
                    value = leaf.clone()
            if value is not None and (not isinstance(value, torch.Tensor) or value.numel() > LARGEST):
                value = None
            self._facts[id(leaf)] = _Fact(leaf, value, sources)
        return result


def _asks(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call's result depends on values in its kind or size."""
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8) for item in index)
    if name == "repeat_interleave":
        counts = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return isinstance(counts, torch.Tensor) and kwargs.get("output_size") is None
    if name == "where":
        return len(args) + len(kwargs) == 1
    return name in ASKS
