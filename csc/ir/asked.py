"""Small functions of a batch alone, as data: what a model asks of its tokens before a step.

Terms
  step        one call of a torch function: its name, arguments and keyword arguments, as trees of tuples
  tree        ("step", number, place) for the place-th tensor that a step gave; ("entry", name) for a batch entry;
              ("constant", dtype, shape, values); ("size", expression in sizes of entries); plain values
  expression  steps, the last of which gives the result
  decision    an expression that gives plain values, and what it gave when the model was traced

    expression.of({name: tensor}) -> tensors, or plain values           any exception where it does not fit the batch
    decision.holds({name: tensor}) -> bool                              whether the answer is the same for a batch
    as_tuples(JSON) -> tree                                             trees are JSON but for tuples

An expression does not change the batch: where one of its steps writes, it works on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from csc.ir.miss import Miss
from csc.ir.sizes import evaluated, expression_from_tree
from csc.torch_private.traces import outside_tracing, pytree

Tree = Any
OBJECTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


@dataclass(frozen=True)
class QueryStep:
    """function: its name, from `torch` on. writes: whether it changes its first argument."""

    function: str
    args: Tree
    kwargs: Tree
    writes: bool = False

    def tree(self) -> Tree:
        """As one tuple."""
        return self.function, self.args, self.kwargs, self.writes


@dataclass(frozen=True)
class Expression:
    """At least one step."""

    steps: tuple[QueryStep, ...]

    @property
    def entries(self) -> tuple[str, ...]:
        """The batch entries that it reads, sizes included."""
        return tuple(sorted({name for step in self.steps for name in _entries((step.args, step.kwargs))}))

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """What the last step gives for these entries."""
        given = {name: tensors[name] for name in self.entries}
        device = next(iter(given.values())).device
        results: list[list[Any]] = []
        found: Any = None
        with outside_tracing():
            if any(step.writes for step in self.steps):
                given = {name: tensor.clone() for name, tensor in given.items()}
            for step in self.steps:
                args, kwargs = _value(step.args, given, results, device), _value(step.kwargs, given, results, device)
                found = function(step.function)(*args, **kwargs)
                results.append([leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, torch.Tensor)])
        return found

    def text(self) -> str:
        """Such as `any(eq(input_ids, 99))`."""
        texts: list[str] = []
        for step in self.steps:
            given = [_text(one, texts) for one in step.args[1:]]
            given += [f"{name}={_text(one, texts)}" for _, name, one in step.kwargs[1:]]
            texts.append(f"{step.function.removesuffix('.__get__').rpartition('.')[2].strip('_')}({', '.join(given)})")
        return texts[-1]


@dataclass(frozen=True)
class Decision:
    """answer: plain values: numbers, bools, lists of them."""

    expression: Expression
    answer: Any

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether a batch has the same answer."""
        return self.miss(tensors) is None

    def miss(self, tensors: Mapping[str, torch.Tensor]) -> Miss | None:
        """The other answer that a batch has, if it has one. A batch that the question does not fit has another."""
        try:
            found = repr(self.expression.of(tensors))
        except Exception as error:
            found = f"no answer ({type(error).__name__})"
        return Miss(self.expression.text(), repr(self.answer), found) if found != repr(self.answer) else None

    def text(self) -> str:
        """Such as `any(eq(input_ids, 99)) is True`."""
        return f"{self.expression.text()} is {self.answer!r}"


@cache
def function(name: str) -> Callable[..., Any]:
    """The torch function of a name. AttributeError if there is none."""
    found: Any = torch
    for part in name.removeprefix("torch.").split("."):
        found = getattr(found, part)
    return found


def _value(tree: Tree, given: Mapping[str, torch.Tensor], results: list[list[Any]], device: torch.device) -> Any:
    """What a tree stands for. Tensors are made on the device of the batch."""
    if not isinstance(tree, tuple):
        return tree
    kind, *rest = tree
    if kind == "step":
        return results[rest[0]][rest[1]]
    if kind == "entry":
        return given[rest[0]]
    if kind == "constant":
        dtype, shape, values = rest
        return torch.tensor(values, dtype=getattr(torch, dtype), device=device).reshape(shape)
    if kind == "size":
        return _size(rest[0], given)
    if kind == "device":
        return device
    if kind in OBJECTS:
        return getattr(torch, rest[0])
    if kind == "...":
        return ...
    if kind == "dict":
        return {name: _value(one, given, results, device) for _, name, one in rest}
    values = [_value(one, given, results, device) for one in rest]
    return slice(*values) if kind == "slice" else tuple(values) if kind == "tuple" else values


def _size(tree: Tree, given: Mapping[str, torch.Tensor]) -> int:
    expression = expression_from_tree(tree)
    sizes = {}
    for symbol in expression.free_symbols:
        name, _, dim = str(symbol).rpartition(":")
        sizes[str(symbol)] = given[name].shape[int(dim)]
    return int(evaluated(expression, sizes))


def _entries(tree: Tree) -> set[str]:
    if not isinstance(tree, tuple) or not tree:
        return set()
    if tree[0] == "entry":
        return {tree[1]}
    if tree[0] == "size":
        return {str(one).rpartition(":")[0] for one in expression_from_tree(tree[1]).free_symbols}
    return set().union(*map(_entries, tree)) if tree[0] != "constant" else set()


def _text(tree: Tree, texts: list[str]) -> str:
    if not isinstance(tree, tuple):
        return repr(tree)
    kind, *rest = tree
    if kind == "step":
        return texts[rest[0]] + (f"[{rest[1]}]" if rest[1] else "")
    if kind in ("list", "tuple", "slice"):
        return f"{kind if kind == 'slice' else ''}({', '.join(_text(one, texts) for one in rest)})"
    if kind == "constant":
        return str(rest[2])
    return str(rest[0]) if rest else kind


def to_tree(expression: Expression) -> Tree:
    """Plain JSON, but for tuples."""
    return [step.tree() for step in expression.steps]


def from_tree(tree: Tree) -> Expression:
    """The inverse, of what JSON has made of it. TypeError or ValueError for a tree that is none."""
    return Expression(tuple(QueryStep(*step) for step in as_tuples(tree)))


def as_tuples(tree: Tree) -> Tree:
    """With tuples for lists."""
    return tuple(map(as_tuples, tree)) if isinstance(tree, (list, tuple)) else tree
