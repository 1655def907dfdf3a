"""Pass `precision`: compute in bfloat16, keep parameters, norms and losses in float32.

Terms
  stored    the dtype that a parameter has for its owner: the optimizer, checkpoints, `.grad`
  lowered   a float32 value rounded to bfloat16
  kept      a module whose own work stays in float32 because the user says so (`keep_fp32`)
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
from torch import fx

from csc.analysis.operators.execution import COMPUTE, FLOAT32, LOSSES, is_random, serves_in_low
from csc.analysis.operators.table import QUANTISED
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import Writer
from csc.ir.program import Options, Pass, Program
from csc.torch_private.exported import OpOverload

aten = torch.ops.aten
BF16 = "bf16"
LOW, HIGH = torch.bfloat16, torch.float32


def _serves(node: fx.Node) -> bool:
    """Whether bfloat16 has the operation, and the numbers among its arguments: the least float32 it has not."""
    numbers = [entry for entry in (*node.args, *node.kwargs.values()) if isinstance(entry, float)]
    beyond = any(math.isfinite(number) and abs(number) > torch.finfo(LOW).max for number in numbers)
    return not beyond and serves_in_low(g.op_name(node))


def _as_it_is(used: fx.Node, reader: fx.Node) -> bool:
    """Whether a value belongs to a quantised weight: the product takes it in any precision."""
    return g.op_name(reader) in QUANTISED and used is not reader.args[0]


@dataclass(frozen=True)
class PrecisionPass(Pass):
    """Insert the casts of a mixed-precision step.

    Ensures   with precision="bf16": operands of matmuls, convolutions and attention are bfloat16; norms, softmax,
              powers and losses compute in float32; what leaves a module is bfloat16, except losses and what follows
              them; parameters come in bfloat16 where a call outside the float32 table reads them. A model without
              float32 parameters stays as it is.
    Before    %n = layer_norm(%x : f32, ..) : f32;    %y = mm(%n, %w : f32) : f32
    After     %n = layer_norm(%x_f32, ..) : f32;      %n_bf16 = _to_copy(%n, bf16);  %y = mm(%n_bf16, %w : bf16) : bf16
    """

    requires: ClassVar = ("captured", "unweighed", "sized")
    establishes: ClassVar = ("precision",)

    precision: str = "model"
    keep_fp32: tuple[str, ...] = ()

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        if options.precision != BF16:
            if options.keep_fp32:
                raise InputError("keep_fp32 is given without precision='bf16'", "keep_fp32", "give both, or neither")
            return program
        parameters = [n for n in g.placeholders(program.graph) if n.meta["role"][0] == "parameter"]
        if not any(n.meta["val"].dtype is HIGH for n in parameters):
            return program
        lowering = _Lowering(program, _kept(program, options.keep_fp32))
        graph = lowering.graph()
        held = sum(
            node.meta["val"].dtype is HIGH for node in g.placeholders(graph) if node.meta["role"][0] == "parameter"
        )
        note = f"computes in bfloat16; {held} of {len(parameters)} parameters are used in float32"
        return replace(program, graph=graph, notes=(*program.notes, note))


def _kept(program: Program, patterns: Collection[str]) -> set[str]:
    """The paths of the modules that the patterns name: a component, a dotted part of the path, or a glob."""
    names: set[str] = set()
    for pattern in patterns:
        matched = {path for path in program.modules if _matches(pattern, path, program)}
        if not matched:
            raise InputError(
                f"no module of {program.name} matches {pattern!r}", "keep_fp32",
                "give a component, a part of a module's path such as 'norm', or a glob over paths",
            )  # fmt: skip
        names |= matched
    return names


def _matches(pattern: str, path: str, program: Program) -> bool:
    if re.search(r"[*?\[]", pattern):
        return fnmatchcase(path, pattern)
    return f".{pattern}." in f".{path}." or program.modules[path].component == pattern


class _Lowering:
    """Copies a graph; each call gets its operands in the dtype that the tables say."""

    def __init__(self, program: Program, kept: set[str]) -> None:
        self.program = program
        self.kept = kept
        self.new = fx.Graph()
        self.writer = Writer(self.new, program.fake_mode)
        self.made: dict[fx.Node, fx.Node] = {}  # old nodes to new ones
        self.casts: dict[Any, fx.Node] = {}
        self.losses: set[fx.Node] = set()  # old: losses and what is made of them
        self.tables: set[fx.Node] = set()  # old: values that depend on no parameter
        self.last_placeholder: fx.Node | None = None

    def graph(self) -> fx.Graph:
        """The rewritten graph."""
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                self._placeholder(node)
            elif node.op == "output":
                self.new.output(fx.map_arg(node.args[0], self.made.__getitem__))
            else:
                self._call(node)
        g.erase_dead(self.new)
        return self.new

    def _placeholder(self, node: fx.Node) -> None:
        val, role = node.meta["val"], node.meta["role"]
        if role[0] != "parameter":
            self.tables.add(node)
        elif val.dtype is HIGH and not self._only_in_float32(node):
            with self.program.fake_mode:
                val = torch.empty_strided(val.shape, val.stride(), dtype=LOW, device=val.device)
        self.made[node] = self.last_placeholder = g.add_placeholder(self.new, node.name, val, role)

    def _only_in_float32(self, parameter: fx.Node) -> bool:
        readers = parameter.users
        return all(
            reader.op == "call_function" and (self._raises(reader) or _as_it_is(parameter, reader))
            for reader in readers
        )

    def _raises(self, node: fx.Node) -> bool:
        return g.op_name(node) in FLOAT32 or node.meta.get("module", "") in self.kept

    def _call(self, node: fx.Node) -> None:
        inputs = node.all_input_nodes
        if all(used in self.tables for used in inputs) and not is_random(node):
            self.tables.add(node)
        if g.op_name(node) in LOSSES or any(used in self.losses for used in inputs):
            self.losses.add(node)
        raises = self._raises(node) or node in self.losses
        if node in self.tables:
            operands = {used: self.made[used] for used in inputs}  # what the batch alone decides keeps its precision
        else:
            operands = {used: self._operand(used, node, raises) for used in inputs}
        if self._mixed(node, operands):
            operands = {used: self._cast(new, HIGH, node) for used, new in operands.items()}
        if not _serves(node):
            operands = {used: self._cast(new, HIGH, node) for used, new in operands.items()}
        self.made[node] = g.copy_node(self.new, node, operands)
        self.writer.evaluate(self.made[node])

    def _operand(self, used: fx.Node, reader: fx.Node, raises: bool) -> fx.Node:
        """The value as the reader takes it."""
        new = self.made[used]
        if used in self.losses:
            return new
        parameter = used.op == "placeholder" and used.meta["role"][0] == "parameter"
        leaves = used.op == "placeholder" or used.meta.get("module", "") != reader.meta.get("module", "")
        exact = raises and used in self.tables  # nothing is gained by rounding what every stage has
        if not parameter and not exact and (leaves or (g.op_name(reader) in COMPUTE and not raises)):
            new = self._cast(new, LOW, None)
        return self._cast(new, HIGH, reader) if raises and not _as_it_is(used, reader) else new

    def _mixed(self, node: fx.Node, operands: dict[fx.Node, fx.Node]) -> bool:
        """True for a call that promotes no operands by itself and has some of each dtype."""
        if not isinstance(node.target, OpOverload) or torch.Tag.pointwise in node.target.tags:
            return False
        operands = {used: new for used, new in operands.items() if not _as_it_is(used, node)}
        return {LOW, HIGH} <= {v.dtype for new in operands.values() if (v := g.tensor_value(new)) is not None}

    def _cast(self, new: fx.Node, dtype: torch.dtype, reader: fx.Node | None) -> fx.Node:
        """A value of one dtype in the other: lowered where it is made, raised in the module that reads it."""
        val = g.tensor_value(new)
        if val is None or val.dtype is dtype or val.dtype not in (LOW, HIGH):
            return new
        home = new if reader is None else reader
        key = (new, dtype, None if reader is None else reader.meta.get("module", ""))
        if key not in self.casts:
            place = self.last_placeholder if new.op == "placeholder" else new
            assert place is not None
            with self.new.inserting_after(place) if reader is None else nullcontext():
                name = f"{new.name}_{'bf16' if dtype is LOW else 'f32'}"
                self.casts[key] = self.writer.named(name, home, aten._to_copy.default, new, dtype=dtype)
        return self.casts[key]
