"""Values that are known while a model is traced, so that Python decisions can be taken from them.

Terms
  known      a tensor of whole numbers whose values are there beside the traced one: batch entries that are no tokens
             (image sizes, grids), and what is computed from them and from plain numbers alone
  deciding   a batch entry whose values decided something: `.tolist()`, an `if`, a size. The capture holds for these
             values; others are another capture.
  sources    the batch entries that a tensor was computed from

    watch = Watching({"image_grid_thw": tensor})
    with watch.entries(batch, asked): model(**batch)   under torch.export, batch holds traced tensors
    watch.deciding -> {"image_grid_thw"}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from csc.capture.values.batch_alone import MISSING, Alone
from csc.capture.values.call_log import Recording, writes
from csc.capture.values.counts import TensorCounts
from csc.capture.values.hit_loop import HitLoops
from csc.capture.values.lazy_split import LazyChunks, LazyNumbers, length
from csc.capture.values.row_index import RowIndices
from csc.ir.capture_guards import Expression
from csc.torch_private.symbolic_sizes import as_hinted, assume_several, symbols_of
from csc.torch_private.traces import in_functorch_transform, lists_from, outside_tracing, pytree

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
INDICES = frozenset({"nonzero", "argwhere", "where", "unique", "unique_consecutive", "_unique2", "bincount"})
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
        self.deciding: set[str] = set()
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
        whole = self._chunks.joined(name, args, kwargs)
        if whole is not None:
            return whole
        chunk = self._chunks.reshaped(name, args, kwargs)
        if chunk is not None:
            return chunk
        chunks = self._chunks.cut(name, args, kwargs, lambda args, kwargs: self._run(func, name, args, kwargs))
        return self._run(func, name, args, kwargs) if chunks is None else chunks

    def real(self, value: Any) -> Any:
        """Arguments of a call with what chunks and rows in it stand for (see csc.capture.values.lazy_split,
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
        expression = self.alone.expression(func, args, kwargs) if name in INDICES else None
        found = self._hoisted(expression, name) if expression is not None else None
        return MISSING if found is None else found

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

    def _listed(self, tensor: torch.Tensor, own: Callable[[], Any]) -> Any:
        """`tensor.tolist()`, which is own() if its values are not known."""
        value, sources = self._value(tensor), self._sources(tensor)
        if in_functorch_transform():
            return own()
        listed = tensor.dim() == 1 and not tensor.is_floating_point()
        count = as_hinted(tensor.shape[0]) if sources and listed else None
        if value is None and count is None and not (self._decides and sources):
            return own()

        def read() -> Any:
            if value is None:
                self._asked(sources)
                answer = self._of_batch_alone(torch.Tensor.tolist, "tolist", (tensor,), {})
                if answer is not MISSING:
                    return answer
                self.asked_last = sources
                return own()
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
            if not any(isinstance(one, slice) for one in index):
                return args, kwargs
            bounds = tuple(
                slice(number(one.start), number(one.stop), number(one.step)) if isinstance(one, slice) else one
                for one in index
            )
            return (args[0], bounds), kwargs
        if name not in SIZED or name in ("tensor", "as_tensor"):
            return args, kwargs
        first = 0 if name in FACTORIES else 1
        return (*args[:first], *pytree.tree_map(number, args[first:])), pytree.tree_map(number, kwargs)

    def _consult(self, sources: frozenset[str]) -> None:
        self.deciding |= sources

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
        return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in index)
    if name == "repeat_interleave":
        counts = kwargs.get("repeats", args[1] if len(args) > 1 else args[0])
        return isinstance(counts, torch.Tensor) and kwargs.get("output_size") is None
    if name == "where":
        return len(args) + len(kwargs) == 1
    return name in ASKS
