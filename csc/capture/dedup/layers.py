"""Equal layers, traced once: their operations are copied for those that do the same."""

from __future__ import annotations

import functools
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from csc.capture.dedup.equality import Counterparts, Looked, Read, attributes_read, structure
from csc.ir import graph as g
from csc.torch_private.traces import pytree, unwatched

# --- Equal layers in the graph: the operations of the one that was traced, copied for those that do the same ---------
#
# Terms: see csc.capture.dedup.layers, which puts the marks into the trace.
#   body     the operations of a first, between its inputs and its outputs


NOT_COPIED = frozenset({"csc::opaque"})  # names the one module that it runs


class CannotRepeat(Exception):
    """A layer was not a function of its arguments after all: the model has to be traced whole."""


@dataclass(frozen=True)
class Body:
    """The operations of the first at `path`, in order."""

    path: str
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def is_first(node: fx.Node) -> bool:
    """Whether a call marks a layer that was traced."""
    return node.op == "call_function" and g.op_name(node) == "csc::layer_first"


def is_again(node: fx.Node) -> bool:
    """Whether a call stands for a layer that does what another one did."""
    return node.op == "call_function" and g.op_name(node) == "csc::layer_again"


def bodies(
    graph: fx.Graph, module_of: Callable[[fx.Node], str], batch: Collection[fx.Node] = ()
) -> dict[fx.Node, Body]:
    """What each first that is repeated does, by its mark in a flat functional graph. module_of: path of the module that
    ran a node; batch: the placeholders of batch entries. CannotRepeat if one reads or gives away what it should not.
    """
    marks: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if is_first(node) and node.users and marks.setdefault(node.args[2], node) is not node:
            raise CannotRepeat(f"{node.args[2]} is called in several ways")
    inside: dict[Any, set[fx.Node]] = {path: set() for path in marks}
    position: dict[fx.Node, int] = {}
    for place, node in enumerate(graph.nodes):
        position[node] = place
        path = _around(module_of(node), marks) if node.op == "call_function" and not is_first(node) else None
        if path is not None:
            inside[path].add(node)
    return {mark: _body(mark, inside[path], position, module_of, batch) for path, mark in marks.items()}


def _around(module: str, paths: Collection[Any]) -> str | None:
    """The one of these paths that a module is at or below."""
    while module and module not in paths:
        module = module.rpartition(".")[0]
    return module or None


def _body(
    mark: fx.Node,
    inside: set[fx.Node],
    position: Mapping[fx.Node, int],
    module_of: Callable[[fx.Node], str],
    batch: Collection[fx.Node],
) -> Body:
    """inside: the calls that modules at and below the first's path ran."""
    marked: Any = mark.args
    inputs, outputs, path = tuple(marked[0]), tuple(marked[1]), marked[2]
    found: set[fx.Node] = set()
    stack = [node for node in outputs if node not in inputs]
    while stack:
        node = stack.pop()
        if node in found or node in inputs or (node.op == "placeholder" and node not in batch):
            continue
        if node in inside:
            found.add(node)
            stack.extend(node.all_input_nodes)
        elif isinstance(node.meta.get("val"), torch.Tensor):
            raise CannotRepeat(f"{path} reads {node.name}, which it was not given")
    for node in inside.difference(outputs):
        if g.op_name(node) in NOT_COPIED:
            raise CannotRepeat(f"{path} runs {g.op_name(node)}")
        for user in node.users:
            if user is not mark and user not in inside and isinstance(node.meta.get("val"), torch.Tensor):
                raise CannotRepeat(f"{module_of(user) or 'the model'} reads {node.name} of {path}")
    return Body(path, tuple(sorted(found, key=position.__getitem__)), inputs, outputs)


def copied(
    again: fx.Node,
    body: Body,
    mapping: Mapping[fx.Node, Any],
    own: Callable[[fx.Node, str, str], Any],
    copy: Callable[[fx.Node, Callable[[fx.Node], Any]], fx.Node],
) -> list[Any]:
    """Copies a first's body for a layer that repeats it; returns what stands for its results.

    mapping: from the nodes before it. own(placeholder, path, of): the parameter or buffer of the layer at path `of`
    that a placeholder is for the layer at `path`. copy(node, lookup): appends a copy of an operation.
    """
    called: Any = again.args
    _, _, inputs, path = called
    inner: dict[fx.Node, Any] = {}
    for place, now in zip(body.inputs, inputs, strict=True):
        if inner.setdefault(place, mapping[now]) is not mapping[now]:
            raise CannotRepeat(f"two arguments of {body.path} are one tensor, those of {path} are two")

    def lookup(node: fx.Node) -> Any:
        if node in inner:
            return inner[node]
        return own(node, body.path, path) if node.op == "placeholder" else mapping[node]

    for node in body.nodes:
        inner[node] = copy(node, lookup)
        inner[node].meta["module"] = path + inner[node].meta["module"].removeprefix(body.path)
    return [inner[node] if node in inner else mapping[node] for node in body.outputs]


# --- Equal layers, traced once ---------------------------------------------------------------------------------------
#
# Eighty equal layers need eighty copies in the graph, but not eighty traces of the same Python code. The model's own
# loop over its layers runs as it is; a layer that does what an earlier one did becomes one call in the trace, which is
# replaced by a copy of the earlier one's operations once the graph is flat.
#
# Terms
#   first    a layer that was traced, with what it was called with and what it looked at
#   again    a call of a layer that does the same as a first: equal in structure and in all attributes that the first
#            read, called with equal plain values and tensors of the same shapes, dtypes and strides
#
# A first counts only if it is a function of its arguments and its own parameters and buffers: if it writes neither to
# its inputs nor to its attributes nor to what else it looks at (csc.capture.dedup.equality), reads no tensor
# computed elsewhere, and gives away none but its outputs. The first are seen while it runs, the last two in the graph.
# It stands for others as long as what it looked at is what it was.


@torch.library.custom_op("csc::layer_first", mutates_args=())
def _first(inputs: list[torch.Tensor], outputs: list[torch.Tensor], path: str) -> torch.Tensor:
    """Marks, in a trace, where a first begins and ends; what it returns names it to the calls that repeat it."""
    raise RuntimeError("csc::layer_first stands in traces only")


@_first.register_fake
def _(inputs: list[torch.Tensor], outputs: list[torch.Tensor], path: str) -> torch.Tensor:
    return outputs[0].new_empty(0, dtype=torch.int64)


@torch.library.custom_op("csc::layer_again", mutates_args=())
def _again(first: torch.Tensor, like: list[torch.Tensor], inputs: list[torch.Tensor], path: str) -> list[torch.Tensor]:
    """The layer at `path` does with these inputs what the first did; like: what the first returned."""
    raise RuntimeError("csc::layer_again stands in traces only")


@_again.register_fake
def _(first: torch.Tensor, like: list[torch.Tensor], inputs: list[torch.Tensor], path: str) -> list[torch.Tensor]:
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) for t in like]


class NotHidden(Exception):
    """Ends a trace: the parameters of the layers at `paths` are needed in it."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(paths)))
        self.paths = paths


@dataclass(frozen=True)
class Layers:
    """The layers by path. `hidden`: those that are likely to repeat one before them. A tracer pays for every parameter
    that it sees, so it does not see theirs; should something ask for one, the trace starts again with it.
    """

    by_path: Mapping[str, nn.Module]
    structures: Mapping[str, Any]
    hidden: frozenset[str]
    tensors: Mapping[str, frozenset[int]]  # identities of the parameters and buffers, as they are outside of traces

    @classmethod
    def of(cls, model: nn.Module, paths: Iterable[str]) -> Layers:
        """The layers at these paths, all but the first of each structure hidden. Not those that share a parameter or
        buffer with another module: which of its names a tracer keeps is up to it.
        """
        uses = _uses(model)
        by_path: dict[str, nn.Module] = {}
        structures: dict[str, Any] = {}
        first: dict[Any, str] = {}
        tensors: dict[str, frozenset[int]] = {}
        for path in paths:
            layer = model.get_submodule(path)
            if "forward" in layer.__dict__:  # replaced in this one alone, perhaps
                continue
            layer_uses = _uses(layer)
            if all(uses[key] == count for key, count in layer_uses.items()):
                tensors[path] = frozenset(layer_uses)
                by_path[path], structures[path] = layer, structure(layer)
                first.setdefault(structures[path], path)
        return cls(by_path, structures, frozenset(by_path).difference(first.values()), tensors)

    def without_hidden(self, shown: Collection[str]) -> Layers:
        """With some of the hidden layers shown."""
        return Layers(self.by_path, self.structures, self.hidden.difference(shown), self.tensors)

    @contextmanager
    def kept_out(self, tensors: Callable[[str], dict[str, Any]] = lambda path: {}) -> Iterator[None]:
        """The hidden layers have `tensors(path)` in place of their parameters and buffers."""
        replaced = [
            (path, module, module.__dict__["_parameters"], module.__dict__["_buffers"])
            for path in self.hidden for module in self.by_path[path].modules()
        ]  # fmt: skip
        try:
            for path, module, _, _ in replaced:
                module.__dict__["_parameters"], module.__dict__["_buffers"] = tensors(path), tensors(path)
            yield
        finally:
            for _, module, parameters, buffers in replaced:
                module.__dict__["_parameters"], module.__dict__["_buffers"] = parameters, buffers


def _uses(module: nn.Module) -> Counter[int]:
    """How often each parameter and buffer is registered, by its identity."""
    named = (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return Counter(id(tensor) for several in named for _, tensor in several)


class _HiddenParameter(dict[str, Any]):
    """Stands for the parameters of a hidden layer while the model runs: whoever looks at them ends the trace."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__()
        self._paths = paths

    def _ask(self, *args: Any) -> Any:
        raise NotHidden(self._paths)

    __getitem__ = __contains__ = __iter__ = __len__ = get = items = keys = values = _ask
    __setitem__ = __delitem__ = setdefault = clear = _ask
    pop = update = _ask  # type: ignore[assignment]


@dataclass(frozen=True)
class _Own:
    """What a layer is made of in a trace, by identity."""

    modules: tuple[int, ...]
    tensors: frozenset[int]

    @classmethod
    def of(cls, layer: nn.Module) -> _Own:
        """The modules and, but for what is hidden, the parameters and buffers of a layer."""
        modules = [module.__dict__ for module in layer.modules()]
        held = (module[kind] for module in modules for kind in ("_parameters", "_buffers"))
        tensors = frozenset(
            id(tensor) for attributes in held for tensor in dict.values(attributes) if tensor is not None
        )
        return cls(tuple(map(id, modules)), tensors)


@dataclass(frozen=True)
class _Called:
    """The leaves of a call's arguments. `kinds` has a tensor's metadata, and which earlier leaf is the same tensor."""

    leaves: tuple[Any, ...]
    structure: Any
    kinds: tuple[Any, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class _First:
    path: str
    layer: nn.Module
    called: _Called
    read: Read
    looked: Looked
    attributes: list[tuple[str, int]]
    token: torch.Tensor
    outputs: tuple[Any, ...]  # leaves: a tensor, the index of the input that it is, or a plain value in a tuple
    structure: Any

    def is_like(self, layer: nn.Module, tensors: Set[int], leaves: Iterable[tuple[Any, Any]] = ()) -> bool:
        """Whether another layer of its structure does the same, as far as what it looked at tells. tensors: identities
        of the parameters and buffers of both; leaves: what it was called with, and what the other is.
        """
        pairs = Counterparts(self.layer, layer)
        return (
            all(_equal_leaf(mine, its, pairs) for mine, its in leaves)
            and self.attributes == _attributes(self.layer)
            and self.looked.unchanged()
            and pairs.same(self.read)
            and not self.looked.shared.leads_to(pairs.shared, pairs.identities | tensors)
        )


def _called(args: Any, kwargs: Any) -> _Called:
    leaves, tree = pytree.tree_flatten((args, kwargs))
    places: dict[int, int] = {}
    with unwatched():
        kinds = tuple(
            (
                tuple(map(str, leaf.shape)), tuple(map(str, leaf.stride())), leaf.dtype, leaf.device,
                leaf.requires_grad, places.setdefault(id(leaf), place),
            ) if isinstance(leaf, torch.Tensor) else None
            for place, leaf in enumerate(leaves)
        )  # fmt: skip
    return _Called(tuple(leaves), tree, (torch.is_grad_enabled(), *kinds))


class Repeats:
    """Watches the layers of a model during one trace. known(tensor): whether its values may have been looked at, so
    that another tensor in its place may lead to other operations. real(arguments): with tensors for their stand-ins.
    """

    def __init__(self, layers: Layers, known: Callable[[torch.Tensor], bool], real: Callable[[Any], Any]) -> None:
        self._known, self._real = known, real
        self._layers = layers
        self._firsts: dict[Any, list[_First]] = {}
        self._own: dict[str, _Own] = {}

    @contextmanager
    def patched(self) -> Iterator[None]:
        """Layers trace their first call of a kind, and repeat it after that."""
        self._firsts.clear()
        layers = self._layers.by_path
        before = {layer: layer.__dict__.get("forward") for layer in layers.values()}
        try:
            for path, layer in layers.items():
                layer.__dict__["forward"] = self._forward(path, layer, layer.forward)
            with self._layers.kept_out(lambda path: _HiddenParameter(self._layers.hidden)):
                self._own = {path: _Own.of(layer) for path, layer in layers.items()}
                yield
        finally:
            for layer, forward in before.items():
                if forward is None:
                    layer.__dict__.pop("forward", None)
                else:
                    layer.__dict__["forward"] = forward

    def _forward(self, path: str, layer: nn.Module, real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def forward(*args: Any, **kwargs: Any) -> Any:
            original = (args, kwargs)
            args, kwargs = self._real(original)
            called = _called(args, kwargs)
            if torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"):
                return real(*args, **kwargs)
            if self._own[path] != _Own.of(layer):  # replaced: by torch.func.functional_call, say
                if path in self._layers.hidden:
                    raise NotHidden(frozenset({path}))
                return real(*args, **kwargs)
            firsts = self._firsts.setdefault(self._layers.structures[path], [])
            for first in firsts:
                if self._serves(first, path, layer, called):
                    return _repeated(first, called, path)
            if path in self._layers.hidden:
                raise NotHidden(self._unlike(path, firsts))
            return self._traced(firsts, path, layer, real, called, original)

        return forward

    def _serves(self, first: _First, path: str, layer: nn.Module, called: _Called) -> bool:
        if called.structure != first.called.structure or called.kinds != first.called.kinds:
            return False
        pairs = []
        for mine, its in zip(first.called.leaves, called.leaves):
            if not isinstance(mine, torch.Tensor):
                pairs.append((mine, its))
            elif mine is not its and (self._known(mine) or self._known(its)):
                return False
        return first.is_like(layer, self._tensors(first.path, path), pairs)

    def _tensors(self, *paths: str) -> set[int]:
        """Identities of the parameters and buffers of these layers, as they are and as a trace has them."""
        tensors = (self._layers.tensors[path] | self._own[path].tensors for path in paths)
        return set().union(*tensors)

    def _unlike(self, path: str, firsts: list[_First]) -> frozenset[str]:
        """A hidden layer that is not served, and those of its structure that will not be because of what they are."""
        return frozenset(
            other for other in self._layers.hidden if other == path or (
                self._layers.structures[other] == self._layers.structures[path]
                and not any(
                    first.is_like(self._layers.by_path[other], self._tensors(first.path, other)) for first in firsts
                )
            )
        )  # fmt: skip

    def _traced(
        self,
        firsts: list[_First],
        path: str,
        layer: nn.Module,
        real: Callable[..., Any],
        called: _Called,
        original: Any,
    ) -> Any:
        args, kwargs = pytree.tree_unflatten(list(called.leaves), called.structure)
        versions = [tensor._version for tensor in called.tensors]
        attributes = _attributes(layer)
        looked = Looked()
        with attributes_read(layer) as read, looked.watching():
            result = real(*args, **kwargs)
        kept = _holds((args, kwargs), called)
        if not kept:
            _given_back(original, (args, kwargs))
        leaves, tree = pytree.tree_flatten(result)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        unchanged = (
            versions == [tensor._version for tensor in called.tensors]
            and attributes == _attributes(layer)
            and self._own[path] == _Own.of(layer)
            and kept
            and looked.unchanged()
            and not looked.shared.asks_for_identity
        )
        inputs = {id(tensor): place for place, tensor in enumerate(called.tensors)}
        fresh = [tensor for tensor in tensors if id(tensor) not in inputs]
        if unchanged and fresh and called.tensors and not any(tensor._is_view() for tensor in fresh):
            token = torch.ops.csc.layer_first(called.tensors, fresh, path)
            outputs = tuple(
                inputs.get(id(leaf), leaf) if isinstance(leaf, torch.Tensor) else (leaf,) for leaf in leaves
            )
            seen = _called(args, kwargs)  # while it ran, sizes may have been found to be equal
            firsts.append(_First(path, layer, seen, read, looked, attributes, token, outputs, tree))
        return result


def _holds(arguments: Any, called: _Called) -> bool:
    """Whether the lists and dicts among a call's arguments hold what they held before."""
    leaves, structure = pytree.tree_flatten(arguments)
    return structure == called.structure and all(now is before for now, before in zip(leaves, called.leaves))


def _given_back(original: Any, used: Any) -> Any:
    """The lists and dicts that a layer was given, with what it wrote to the copies of them that it ran with."""
    if isinstance(original, (list, deque)):
        items = [
            _given_back(original[place], item) if place < len(original) else item for place, item in enumerate(used)
        ]
        original.clear()
        original.extend(items)
    elif isinstance(original, dict):
        entries = {name: _given_back(original[name], item) if name in original else item for name, item in used.items()}
        original.clear()
        original.update(entries)
    elif isinstance(original, tuple) and isinstance(used, tuple):
        for item, other in zip(original, used):
            _given_back(item, other)
    else:
        return used
    return original


def _equal_leaf(left: Any, other: Any, pairs: Counterparts) -> bool:
    symbolic = (torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(left, symbolic) and isinstance(other, symbolic):
        return str(left) == str(other)
    return pairs.equal(left, other)


def _attributes(layer: nn.Module) -> list[tuple[str, int]]:
    """What each attribute of the layer and the modules below is, by identity."""
    return [(name, id(value)) for module in layer.modules() for name, value in module.__dict__.items()]


def _repeated(first: _First, called: _Called, path: str) -> Any:
    like = [leaf for leaf in first.outputs if isinstance(leaf, torch.Tensor)]
    results = iter(torch.ops.csc.layer_again(first.token, like, called.tensors, path))
    leaves = []
    for leaf in first.outputs:
        if isinstance(leaf, torch.Tensor):
            leaves.append(next(results))
        else:
            leaves.append(leaf[0] if isinstance(leaf, tuple) else called.tensors[leaf])
    return pytree.tree_unflatten(leaves, first.structure)
