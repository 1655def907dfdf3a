"""The sizes of a model's batch that can vary, and the Program at other sizes than the example's.

Terms
  length   dimensions of the batch that grow together, under one symbol; `traced`: one capture serves all its values
  sampler  lowers the model at other sizes: other values of traced lengths need no new capture
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from csc.capture.batch import split_batch
from csc.capture.capture import capture, name_of, with_sizes_of
from csc.capture.guards import Guards
from csc.driver.compiled import CompiledModel
from csc.errors import CscError
from csc.ir import graph as g
from csc.ir.mesh import Mesh
from csc.ir.program import Options, Program
from csc.passes.pipeline import dividing, tracing
from csc.passes.recompute import AUTO, saves_of
from csc.passes.runner import CAPTURE, run

Dimension = tuple[str, int]  # batch entry, dimension
TEXT_STEP = 8  # of traced lengths; keeps what is left over when a kernel pads to multiples of 8
MODALITIES = {"image": r"imag|pixel|vision|visual|video", "audio": r"audio|sound|speech|wave|mel|feature"}


@dataclass(frozen=True)
class Length:
    """One symbol. size: its value in the example; step: how far apart the values that csc tries are."""

    name: str
    dimensions: tuple[Dimension, ...]
    size: int
    step: int
    traced: bool

    @property
    def meaning(self) -> str:
        """`input_ids.shape[1], labels.shape[1]`."""
        return ", ".join(f"{entry}.shape[{dimension}]" for entry, dimension in self.dimensions)


@dataclass
class Sampler:
    """Programs of one model, after pass `split`, at sizes of choice. `microbatch`: the example's, with real tensors."""

    model: nn.Module
    microbatch: Mapping[str, Any]
    options: Options
    progress: Callable[[str], None] = lambda name: None
    captures: dict[Any, Program] = field(default_factory=dict)
    guards: Guards = field(default_factory=Guards)
    programs: dict[Any, Program] = field(default_factory=dict)

    def program(self, copies: int = 1, sizes: Mapping[Length, int] | None = None) -> Program:
        """The Program for `copies` times the example's rows, lengths at `sizes` (others as in the example).

        Raises CscError if the model does not take these sizes.
        """
        grown = {length: size for length, size in (sizes or {}).items() if size != length.size}
        key = _key(copies, grown)
        if key not in self.programs:
            self.programs[key] = self._lowered(copies, grown)
        return self.programs[key]

    def of(self, microbatch: Mapping[str, Any]) -> Program:
        """The Program of a microbatch of the same entries."""
        return self._divided(self._captured(microbatch))

    def _lowered(self, copies: int, grown: Mapping[Length, int]) -> Program:
        captured = self.captured(copies, {length: size for length, size in grown.items() if not length.traced})
        of_dimension = {d: size for length, size in grown.items() for d in length.dimensions}
        inputs = tuple(
            replace(item, shape=tuple(of_dimension.get((item.name, d), size) for d, size in enumerate(item.shape)))
            for item in captured.inputs
        )
        return self._divided(replace(captured, inputs=inputs))

    def _divided(self, captured: Program) -> Program:
        options = replace(self.options, microbatches=1, mesh=Mesh(), context=())
        return run([captured], (*tracing(options), *dividing(options)), options, self.progress)[-1]

    def captured(self, copies: int = 1, grown: Mapping[Length, int] | None = None) -> Program:
        """The capture for so many rows, with these lengths grown to these sizes."""
        grown = grown or {}
        key = _key(copies, grown)
        if key not in self.captures:
            tensors, extra = split_batch(self.microbatch)
            for name, tensor in tensors.items():
                if tensor.dim():
                    tensors[name] = _resized(tensor, 0, copies * tensor.shape[0])
            for length, size in grown.items():
                for name, dimension in length.dimensions:
                    tensors[name] = _resized(tensors[name], dimension, size)
            self.captures[key] = self._captured({**tensors, **extra})
        return self.captures[key]

    def _captured(self, microbatch: Mapping[str, Any]) -> Program:
        """An earlier capture that serves the microbatch, or a new one."""
        match = self.guards.match(self.model, microbatch)
        for program in self.captures.values():
            if match.capture is not None and match.capture.name == name_of(program):
                return with_sizes_of(program, split_batch(match.batch)[0])
        self.progress(CAPTURE)
        return capture(self.model, microbatch, self.guards)


def sampler(compiled: CompiledModel) -> Sampler:
    """Lowers the model of a CompiledModel at sizes of choice; starts from one microbatch of its example."""
    options = compiled.options
    if any(choice == AUTO for _, choice in options.recompute):  # decided for the mesh; here there is none
        options = replace(options, recompute=saves_of(compiled.program))
    return Sampler(compiled.model, compiled.inspected.microbatch, options, compiled.inspected.progress)


def _key(copies: int, grown: Mapping[Length, int]) -> Any:
    return copies, tuple(sorted((length.dimensions, size) for length, size in grown.items()))


def _resized(tensor: torch.Tensor, dimension: int, size: int) -> torch.Tensor:
    """The tensor with its own entries repeated, in order, along a dimension."""
    if size == tensor.shape[dimension]:
        return tensor
    chosen = torch.arange(size, device=tensor.device) % tensor.shape[dimension]
    return tensor.index_select(dimension, chosen)


def rows(program: Program) -> int:
    """The value of `batch`: rows of the batch's first entry of whole numbers, else of its first entry."""
    entries = [item for item in program.inputs if item.shape]
    tokens = [item for item in entries if not item.dtype.is_floating_point]
    return (tokens or entries)[0].shape[0] if entries else 1


def lengths(sampler: Sampler) -> list[Length]:
    """What really varies: every candidate is tried at another size, and dropped if the model does not take it.

    Candidates are the traced dimensions of equal size (token ids, masks, labels), those together with others of that
    size if they do not grow alone, and then every other dimension, the first of each batch entry that can.
    """
    captured = sampler.captured()
    traced: dict[int, list[Dimension]] = {}
    other: dict[int, list[Dimension]] = {}
    symbolic = {
        (node.meta["role"][1], d)
        for node in g.placeholders(captured.graph)
        if node.meta["role"][0] == "input"
        for d, size in enumerate(node.meta["val"].shape)
        if not isinstance(size, int)
    }
    for item in captured.inputs:
        for d, size in enumerate(item.shape[1:], start=1):
            (traced if (item.name, d) in symbolic else other).setdefault(size, []).append((item.name, d))
    lengths_found: list[Length] = []
    for size, dimensions in traced.items():
        alone = Length("text", tuple(dimensions), size, TEXT_STEP, True)
        joined = Length("text", tuple(dimensions + other.get(size, [])), size, size, False)
        lengths_found += next(([length] for length in (alone, joined) if _varies(sampler, length)), [])
    taken = {d for length in lengths_found for d in length.dimensions}
    entries = {name for name, _ in taken}
    for size, dimensions in other.items():
        for dimension in dimensions:
            length = Length("", (dimension,), size, size, False)
            if dimension not in taken and dimension[0] not in entries and _varies(sampler, length):
                lengths_found.append(length)
                entries.add(dimension[0])
    return _named(lengths_found)


def _varies(sampler: Sampler, length: Length) -> bool:
    logging.disable(logging.ERROR)  # torch logs what it raises, and here a failure is an answer
    try:
        sampler.program(1, {length: length.size + length.step})
    except CscError:
        return False
    finally:
        logging.disable(logging.NOTSET)
    return True


def _named(lengths_found: Sequence[Length]) -> list[Length]:
    """By what the batch entries are called; numbered from the second of a name on."""
    named: list[Length] = []
    for length in lengths_found:
        entry = length.dimensions[0][0]
        base = next((name for name, words in MODALITIES.items() if re.search(words, entry.lower())), "")
        base = base or length.name or re.sub(r"\W", "_", entry)
        count = sum(re.fullmatch(rf"{re.escape(base)}(_\d+)?", other.name) is not None for other in named)
        named.append(replace(length, name=f"{base}_{count + 1}" if count else base))
    return named
