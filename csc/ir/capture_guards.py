"""What one capture of a model assumed of its batch, and whether another batch is as assumed."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import sympy
import torch

from csc.torch_private.symbolic_sizes import SIZE_FUNCTIONS
from csc.torch_private.traces import outside_tracing, pytree

# --- What has no form in text, and so is not kept on disk nor handed to other ranks ----------------------------------


class Unstorable(ValueError):
    """Says what it is, in words that follow `it holds`."""


# --- Why a capture is not for a batch --------------------------------------------------------------------------------
#
# It is the one assumption that does not hold, with what was assumed and what is there.


@dataclass(frozen=True)
class Miss:
    """what: of the batch, in the words of its entries, such as `input_ids.shape[1]`."""

    what: str
    assumed: str
    found: str

    def __str__(self) -> str:
        return f"{self.what} is {self.found}, and was assumed to be {self.assumed}"


# --- What a capture assumed of the parameters' `requires_grad`, where the model's forward asks for it ----------------
#
# Most models never ask: then one capture serves every frozen set. A forward that asks (`if weight.requires_grad: ...`,
# also of a value that it computed) is another graph for another frozen set.


@dataclass(frozen=True)
class FlagsAsked:
    """where: the line that asked first. frozen: names of the parameters whose requires_grad was False."""

    where: str
    frozen: frozenset[str]

    def miss(self, frozen: Set[str]) -> Miss | None:
        """The first parameter by name that is frozen in one of both sets alone; None where there is none."""
        name = min(self.frozen ^ frozen, default=None)
        if name is None:
            return None
        return Miss(f"requires_grad of {name}", str(name not in self.frozen), str(name not in frozen))


# --- What a captured graph assumes of the sizes of a batch -----------------------------------------------------------
#
# Terms
#   entry      a batch entry: its dtype, and its sizes: whole numbers, or expressions in symbols
#   symbol     a size that may vary; one name stands for one number, wherever it stands
#   relation   a sympy expression in symbols that holds for every batch that the graph is for


LATEST = 256  # answers kept

FUNCTIONS: dict[str, Any] = {
    **{
        one.__name__: one
        for one in (
            sympy.Add, sympy.Mul, sympy.Pow, sympy.Eq, sympy.Ne, sympy.Lt, sympy.Le, sympy.Gt, sympy.Ge, sympy.And,
            sympy.Or, sympy.Not,
        )
    },
    **SIZE_FUNCTIONS,
}  # fmt: skip

Tree = Any


@dataclass(frozen=True)
class SizeGuards:
    """entries: (dtype, sizes) by name. ranges: least and largest value of a symbol, None: any. relations: see above."""

    entries: Mapping[str, tuple[str, tuple[Any, ...]]]
    ranges: Mapping[str, tuple[int, int | None]]
    relations: tuple[Any, ...]
    _matched: dict[Any, dict[str, int] | Miss] = field(default_factory=dict, init=False, compare=False, repr=False)

    def allow(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the graph holds for these batch entries, as far as their names, dtypes and sizes say."""
        return not isinstance(self.match(tensors), Miss)

    def match(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int] | Miss:
        """What the symbols are for these batch entries, or why the graph does not hold for them. At once for sizes that
        were asked for lately.
        """
        signature = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if signature not in self._matched:
            if len(self._matched) >= LATEST:
                self._matched.clear()
            self._matched[signature] = self._match(tensors)
        return self._matched[signature]

    def _match(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, int] | Miss:
        if self.entries.keys() != tensors.keys():
            return Miss("the list of its entries", ", ".join(self.entries), ", ".join(tensors))
        values: dict[str, int] = {}
        expressions: list[tuple[str, Any, int]] = []  # sizes that are expressions, and where
        for name, (dtype, expected) in self.entries.items():
            tensor = tensors[name]
            if str(tensor.dtype) != dtype or tensor.dim() != len(expected):
                return Miss(name, _kind(dtype, len(expected)), _kind(str(tensor.dtype), tensor.dim()))
            for dimension, (size, actual) in enumerate(zip(expected, tensor.shape)):
                place = f"{name}.shape[{dimension}]"
                if isinstance(size, int):
                    fits, assumed = size == actual, str(size)
                elif size.is_Symbol:
                    fits = actual > 0 and values.setdefault(str(size), actual) == actual
                    assumed = str(values.get(str(size), "at least 1"))
                else:
                    expressions.append((place, size, actual))
                    fits, assumed = actual > 0, "at least 1"
                if not fits:
                    return Miss(place, assumed, str(actual))
        for place, size, actual in expressions:
            if not _solved(size, actual, values):
                return Miss(place, self._text(size), str(actual))
        return self._broken(values) or values

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether the graph is for symbols of these values."""
        return self._broken(values) is None

    def _broken(self, values: Mapping[str, int]) -> Miss | None:
        """The range or the relation that does not hold."""
        for name, value in values.items():
            low, high = self.ranges.get(name, (0, None))
            if value < low or (high is not None and value > high):
                return Miss(self._places().get(name, name), f"{low} to {'any' if high is None else high}", str(value))
        for relation in self.relations:
            if evaluated(relation, values) is sympy.false:
                return Miss(self._text(relation), "true", "false")
        return None

    def _places(self) -> dict[str, str]:
        """Where each symbol stands alone."""
        places: dict[str, str] = {}
        for name, (_, sizes) in self.entries.items():
            for dimension, size in enumerate(sizes):
                if not isinstance(size, int) and size.is_Symbol:
                    places.setdefault(str(size), f"{name}.shape[{dimension}]")
        return places

    def _text(self, expression: Any) -> str:
        """In the words of entries."""
        places = self._places()
        named = {
            symbol: sympy.Symbol(places[str(symbol)]) for symbol in expression.free_symbols if str(symbol) in places
        }
        return str(expression.xreplace(named))


def exactly(tensors: Mapping[str, torch.Tensor]) -> SizeGuards:
    """For these sizes alone."""
    return SizeGuards({name: (str(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}, {}, ())


def _kind(dtype: str, dimensions: int) -> str:
    return f"{dtype} of {dimensions} dimensions"


def _solved(size: Any, actual: int, values: dict[str, int]) -> bool:
    """Whether an expression is a number that was found; what that says of its symbol is added to the values."""
    known = evaluated(size, values)
    unknown = known.free_symbols
    if len(unknown) == 1:
        (symbol,) = unknown
        solutions = [
            solution for solution in sympy.solve(known - actual, symbol) if solution.is_Integer and solution >= 1
        ]
        if len(solutions) == 1:
            values[str(symbol)] = int(solutions[0])
        return len(solutions) == 1
    return not unknown and bool(known == actual)


def evaluated(relation: Any, values: Mapping[str, int]) -> Any:
    """An expression in which symbols are these numbers."""
    return relation.subs({symbol: values[str(symbol)] for symbol in relation.free_symbols if str(symbol) in values})


def expression_to_tree(expression: Any) -> Tree:
    """An expression as plain JSON. Unstorable for one of other functions than FUNCTIONS."""
    if expression in (sympy.true, sympy.false):
        return bool(expression)
    if expression.is_Integer:
        return int(expression)
    if expression.is_Symbol:
        return str(expression)
    name = type(expression).__name__
    if name not in FUNCTIONS:
        raise Unstorable(f"a size made by {name}")
    return [name, *map(expression_to_tree, expression.args)]


def expression_from_tree(tree: Tree) -> Any:
    """The inverse."""
    if isinstance(tree, bool):
        return sympy.true if tree else sympy.false
    if isinstance(tree, int):
        return sympy.Integer(tree)
    if isinstance(tree, str):
        return sympy.Symbol(tree, integer=True, positive=True)
    name, *arguments = tree
    return FUNCTIONS[name](*map(expression_from_tree, arguments))


# --- What a model's code called while it was traced, to be compared with what it calls for another batch -------------
#
# Terms
#   call      the name of a torch function, and its arguments as tokens
#   token     of an argument: where a tensor came from, a plain value as text, or a size: a number or an expression in
#             the symbols of csc.ir.capture_guards


Call = tuple[Any, ...]
UNKNOWN = "unknown"  # the kind of a tensor that came from nowhere known


def alike(traced: Sequence[Call], others: Sequence[Call], values: Mapping[str, int]) -> bool:
    """Whether calls with these values of the symbols are those of another run, in which all sizes are numbers. A size
    that only values tell (a symbol without one) is the same in both if it has the same name. A tensor of which nobody
    knows where it came from is never the same.
    """
    known: dict[Any, Any] = {}

    def same(mine: Any, its: Any) -> bool:
        if not isinstance(mine, sympy.Basic):
            return bool(mine == its) and not (isinstance(mine, tuple) and mine[0] == UNKNOWN)
        if mine not in known:
            known[mine] = evaluated(mine, values)
        return bool(known[mine] == its) or str(known[mine]) == str(its)

    return len(traced) == len(others) and all(
        len(call) == len(other) and all(map(same, call, other)) for call, other in zip(traced, others)
    )


def other_call(traced: Sequence[Call], others: Sequence[Call], values: Mapping[str, int]) -> str:
    """What another run does otherwise than calls with these values of the symbols, in a phrase; "" for nothing."""
    counts, other_counts = (Counter(call[0] for call in calls) for calls in (traced, others))
    for name in {**counts, **other_counts}:
        count, other_count = counts[name], other_counts[name]
        if count != other_count:
            named = name.removeprefix("torch.")
            return f"{named} is called {_times(count)} for a microbatch and {_times(other_count)} for the whole batch"
    if not same_functions(traced, others):
        return "what is called for a microbatch is called in another order for the whole batch"
    for (name, _, *mine), (_, _, *its) in zip(traced, others):
        for token, other in zip(mine, its):
            known = evaluated(token, values) if isinstance(token, sympy.Basic) else token
            if not _same_token(known, other):
                named = name.removeprefix("torch.")
                if any(isinstance(one, tuple) and one[0] != "of" for one in (known, other)):
                    return f"{named} computes with another value for a microbatch than for the whole batch"
                one, of_all = (token[1] if isinstance(token, tuple) else token for token in (known, other))
                return f"{named} computes with {one} for a microbatch and with {of_all} for the whole batch"
    return ""


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times" if count else "never"


def same_functions(traced: Sequence[Call], others: Sequence[Call]) -> bool:
    """Whether two runs call the same, one after the other."""
    return [(call[0], len(call)) for call in traced] == [(call[0], len(call)) for call in others]


def _same_token(mine: Any, its: Any) -> bool:
    """As far as is known: sizes that values tell, and tensors from nowhere known, are not."""
    if any(isinstance(token, sympy.Basic) and token.free_symbols for token in (mine, its)):
        return True
    if any(isinstance(token, tuple) and token[0] == UNKNOWN for token in (mine, its)):
        return True
    return bool(mine == its) or (_is_number(mine) and _is_number(its) and float(mine) == float(its))


def _is_number(leaf: Any) -> bool:
    """Whether an argument is a plain number: whole ones stand there as they are, others as text."""
    if isinstance(leaf, str):
        return leaf.lstrip("-").replace(".", "", 1).replace("e-", "", 1).replace("e+", "", 1).isdigit()
    return isinstance(leaf, (int, sympy.Integer))


# --- Small functions of a batch alone, as data: what a model asks of its tokens before a step ------------------------
#
# Terms
#   step        one call of a torch function: its name, arguments and keyword arguments, as trees of tuples
#   tree        ("step", number, place) for the place-th tensor that a step gave; ("entry", name) for a batch entry;
#               ("constant", dtype, shape, values); ("size", expression in sizes of entries); plain values
#   expression  steps, the last of which gives the result
#   decision    an expression that gives plain values, and what it gave when the model was traced
#
# An expression does not change the batch: where one of its steps writes, it works on copies.


OBJECTS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


@dataclass(frozen=True)
class QueryStep:
    """function: its name, from `torch` on. writes: whether it changes its first argument."""

    function: str
    args: Tree
    kwargs: Tree
    writes: bool = False


@dataclass(frozen=True)
class Expression:
    """At least one step."""

    steps: tuple[QueryStep, ...]

    @property
    def entries(self) -> tuple[str, ...]:
        """The batch entries that it reads, sizes included."""
        return tuple(sorted({name for step in self.steps for name in _entries((step.args, step.kwargs))}))

    def of(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Returns what the last step gives for these entries. Raises any exception where it does not fit the batch."""
        inputs = {name: tensors[name] for name in self.entries}
        device = next(iter(inputs.values())).device
        results: list[list[Any]] = []
        value: Any = None
        with outside_tracing():
            if any(step.writes for step in self.steps):
                inputs = {name: tensor.clone() for name, tensor in inputs.items()}
            for step in self.steps:
                args, kwargs = _value(step.args, inputs, results, device), _value(step.kwargs, inputs, results, device)
                value = function(step.function)(*args, **kwargs)
                results.append([leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)])
        return value

    def text(self) -> str:
        """Such as `any(eq(input_ids, 99))`."""
        texts: list[str] = []
        for step in self.steps:
            arguments = [_text(argument, texts) for argument in step.args[1:]]
            arguments += [f"{name}={_text(argument, texts)}" for _, name, argument in step.kwargs[1:]]
            texts.append(
                f"{step.function.removesuffix('.__get__').rpartition('.')[2].strip('_')}({', '.join(arguments)})"
            )
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
            answer = repr(self.expression.of(tensors))
        except Exception as error:
            answer = f"no answer ({type(error).__name__})"
        return Miss(self.expression.text(), repr(self.answer), answer) if answer != repr(self.answer) else None

    def text(self) -> str:
        """Such as `any(eq(input_ids, 99)) is True`."""
        return f"{self.expression.text()} is {self.answer!r}"


@cache
def function(name: str) -> Callable[..., Any]:
    """The torch function of a name. AttributeError if there is none."""
    value: Any = torch
    for part in name.removeprefix("torch.").split("."):
        value = getattr(value, part)
    return value


def _value(tree: Tree, inputs: Mapping[str, torch.Tensor], results: list[list[Any]], device: torch.device) -> Any:
    """What a tree stands for. Tensors are made on the device of the batch."""
    if not isinstance(tree, tuple):
        return tree
    kind, *rest = tree
    if kind == "step":
        return results[rest[0]][rest[1]]
    if kind == "entry":
        return inputs[rest[0]]
    if kind == "constant":
        dtype, shape, values = rest
        return torch.tensor(values, dtype=getattr(torch, dtype), device=device).reshape(shape)
    if kind == "size":
        return _size_given(rest[0], inputs)
    if kind == "device":
        return device
    if kind in OBJECTS:
        return getattr(torch, rest[0])
    if kind == "...":
        return ...
    if kind == "dict":
        return {name: _value(item, inputs, results, device) for _, name, item in rest}
    values = [_value(item, inputs, results, device) for item in rest]
    return slice(*values) if kind == "slice" else tuple(values) if kind == "tuple" else values


def _size_given(tree: Tree, inputs: Mapping[str, torch.Tensor]) -> int:
    expression = expression_from_tree(tree)
    sizes = {}
    for symbol in expression.free_symbols:
        name, _, dim = str(symbol).rpartition(":")
        sizes[str(symbol)] = inputs[name].shape[int(dim)]
    return int(evaluated(expression, sizes))


def _entries(tree: Tree) -> set[str]:
    if not isinstance(tree, tuple) or not tree:
        return set()
    if tree[0] == "entry":
        return {tree[1]}
    if tree[0] == "size":
        return {str(symbol).rpartition(":")[0] for symbol in expression_from_tree(tree[1]).free_symbols}
    return set().union(*map(_entries, tree)) if tree[0] != "constant" else set()


def _text(tree: Tree, texts: list[str]) -> str:
    if not isinstance(tree, tuple):
        return repr(tree)
    kind, *rest = tree
    if kind == "step":
        return texts[rest[0]] + (f"[{rest[1]}]" if rest[1] else "")
    if kind in ("list", "tuple", "slice"):
        return f"{kind if kind == 'slice' else ''}({', '.join(_text(item, texts) for item in rest)})"
    if kind == "constant":
        return str(rest[2])
    return str(rest[0]) if rest else kind


# --- What other sizes of a batch have shown of a capture -------------------------------------------------------------
#
# What is the same in this size is not traced or proven again.
#
# Terms
#   template   csc.ir.program.Template, with its joint graph
#   key        all that decides a joint graph: the forward graph in its sizes, the gradients that come in and are wanted


@dataclass(frozen=True)
class Joints:
    """mode: the FakeTensorMode of all of them. templates: with joint graphs, by key. combinations: how losses combine,
    as proven for every size, by what was assumed of the batch's entries.
    """

    mode: Any
    templates: Mapping[str, Any] = field(default_factory=dict)
    combinations: Mapping[Any, Any] = field(default_factory=dict)


# --- What one capture of a model assumed of its batch, and whether another batch is as assumed -----------------------
#
# Terms
#   plain      batch entries that are no tensors, as text
#   values     of the entries that decide what the graph is: `.tolist()`, an `if`, a size
#   decisions  what the model's code asked of its batch alone, with the answers
#   flags      the frozen set, where that code asks for requires_grad
#   calls      what that code called: where it calls the same for other values, the graph is the same
#   name       a hash of the assumptions: the same in all processes
#
# A model's code is the same up to its first question, and after the same answers up to the next. So a capture whose
# questions have the same answers for a batch is what the code does with that batch. The questions are evaluated on the
# host, on the batch as it comes, before the step.


Tensors = Mapping[str, torch.Tensor]
LONGEST = 60  # characters of a value in a sentence


@dataclass(frozen=True)
class CaptureGuards:
    """calls: None: the capture is for its own values alone. flags: None: the capture is for every frozen set."""

    name: str
    sizes: SizeGuards
    values: Tensors
    decisions: tuple[Decision, ...]
    plain: Mapping[str, str]
    calls: tuple[Call, ...] | None = None
    flags: FlagsAsked | None = None

    @property
    def answers(self) -> tuple[str, ...]:
        """The decisions as texts."""
        return tuple(decision.text() for decision in self.decisions)

    @cached_property
    def kind(self) -> str:
        """A hash of what it assumed but for sizes as such: captures of one kind differ in sizes alone."""
        values, relations = _values_tree(self.values), map(str, self.sizes.relations)
        parts = sorted(self.sizes.entries), sorted(relations), sorted(values.items()), self.answers, sorted(self.plain)
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def match(
        self,
        tensors: Tensors,
        plain: Mapping[str, str],
        calls: tuple[Call, ...] | None,
        frozen: Set[str] = frozenset(),
    ) -> Tensors | Miss:
        """Returns the entries of a completed microbatch as the capture takes them, or the Miss of the first assumption
        that does not hold. The entries have the capture's values where the model's code calls the same for both. calls:
        of that code for this microbatch; None: not known. frozen: names of the model's parameters that do not train,
        wanted where `flags` is something.
        """
        other = self.flags.miss(frozen) if self.flags is not None else None
        if other is not None:
            return other
        miss = self._miss(tensors, plain)
        if miss is None or calls is None or self.calls is None or plain != self.plain:
            return tensors if miss is None else miss
        replaced = {**tensors, **self.values}
        symbols = self.sizes.match(replaced)
        return replaced if not isinstance(symbols, Miss) and alike(self.calls, calls, symbols) else miss

    def _miss(self, tensors: Tensors, plain: Mapping[str, str]) -> Miss | None:
        """Each question may rest on the answers before it, so the first other answer ends it."""
        if plain != self.plain:
            name = next(name for name in {**plain, **self.plain} if plain.get(name) != self.plain.get(name))
            return Miss(name, self.plain.get(name, "absent"), plain.get(name, "absent"))
        symbols = self.sizes.match(tensors)
        if isinstance(symbols, Miss):
            return symbols
        for name, values in self.values.items():
            if not torch.equal(values, tensors[name].to(values.device)):
                return Miss(name, short(values), short(tensors[name]))
        return next(filter(None, (decision.miss(tensors) for decision in self.decisions)), None)


def capture_guards(
    sizes: SizeGuards,
    values: Tensors,
    decisions: tuple[Decision, ...],
    plain: Mapping[str, str],
    calls: tuple[Call, ...] | None,
    flags_asked: FlagsAsked | None = None,
) -> CaptureGuards:
    """Named by what they assume."""
    entries = [(name, dtype, list(map(str, shape))) for name, (dtype, shape) in sorted(sizes.entries.items())]
    parts = (
        entries, sorted(sizes.ranges.items()), sorted(map(str, sizes.relations)), sorted(_values_tree(values).items()),
        decisions, sorted(plain.items()),
        *((flags_asked.where, sorted(flags_asked.frozen)) if flags_asked is not None else ()),
    )  # fmt: skip
    name = hashlib.sha256(repr(parts).encode()).hexdigest()
    return CaptureGuards(name, sizes, values, decisions, plain, calls, flags_asked)


def _values_tree(values: Tensors) -> dict[str, Any]:
    return {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in values.items()}


def short(tensor: torch.Tensor) -> str:
    """Its values, in a sentence."""
    text = str(tensor.tolist())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
