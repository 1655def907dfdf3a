"""`with torch.autocast(...)` inside a forward: the casts that it makes, written into the graph.

Terms
  region    the calls of one such block, as export keeps them: without casts, with the results that the casts lead to
  work      what a call does, operation by operation, and the dtypes of operands and results; views and casts left out
            (values without data let an operation take operands of dtypes that it refuses with data)

    write_casts(body, device, dtype, cache)      calls of a region take their operands as torch.autocast gives them

There is no table of what autocast does with which operation: each call is run under it, on values without data, and
what that casts of its operands before it computes anything is tried. If the call then does the same work without
autocast, the graph gets these casts; if not, it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from csc.capture.lower.recorded import source_of
from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.graph import add_traced_call, values_of
from csc.torch_private.exported import OpOverload
from csc.torch_private.traces import TorchDispatchMode, pytree, without_messages

CAST = torch.ops.aten._to_copy.default
Work = list[tuple[str, tuple[torch.dtype, ...]]]
SETTLED = "autocast"  # in a node's meta: of a block within, whose casts are its own


def write_casts(body: fx.Graph, device: str, dtype: torch.dtype, cache: bool) -> None:
    """InputError, with the line, for a call whose casts cannot be written so.

    cache: a parameter that several calls read is cast once, and its gradients are added up in the low dtype, as torch
    does it.
    """
    cast_once: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(body.nodes):
        if isinstance(node.target, OpOverload) and not node.meta.get(SETTLED):
            casts = _casts(node, device, dtype)
            with body.inserting_before(node):
                made = {used: _cast(body, used, to, node, cast_once if cache else {}) for used, to in casts.items()}
            for used, new in made.items():
                node.replace_input_with(used, new)
        node.meta[SETTLED] = True


def _casts(node: fx.Node, device: str, dtype: torch.dtype) -> Mapping[fx.Node, torch.dtype]:
    """What autocast casts of a call's operands."""
    floating = {
        used: val.dtype
        for used in node.all_input_nodes
        if isinstance(val := used.meta.get("val"), torch.Tensor) and val.is_floating_point()
    }
    if not floating:
        return {}
    own = _Work(node)
    with torch.no_grad(), own, torch.autocast(device, dtype, cache_enabled=False):
        own.gave(node.target(*values_of(node.args), **values_of(node.kwargs)))  # type: ignore[operator]
    # What it casts at first may be the operation's own doing; products may cast behind views of their operands.
    for casts in ({}, own.casts, dict.fromkeys(floating, dtype), dict.fromkeys(floating, torch.float32)):
        needed = {used: to for used, to in casts.items() if floating[used] is not to}
        if _work(node, needed) == own.done:
            return needed
    raise InputError(
        f"the model runs part of itself under torch.autocast, where csc cannot tell what is cast in {g.op_name(node)}",
        source_of(node) or "model",
        "cast the tensors there by hand, or compile with precision='bf16' and leave autocast out",
    )


def _work(node: fx.Node, casts: Mapping[fx.Node, torch.dtype]) -> Work | None:
    """Of the call for operands that are cast so, without autocast; None: it refuses them."""

    def value(used: fx.Node) -> Any:
        return used.meta["val"].to(casts[used]) if used in casts else used.meta["val"]

    watching = _Work(node)
    try:
        with torch.no_grad(), without_messages():
            args, kwargs = fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)
            with watching:
                watching.gave(node.target(*args, **kwargs))  # type: ignore[operator]
    except (RuntimeError, TypeError, ValueError):
        return None
    return watching.done


class _Work(TorchDispatchMode):
    """done: the work of one call. casts: those of its operands that it begins with."""

    def __init__(self, node: fx.Node) -> None:
        super().__init__()
        self._given = {id(used.meta["val"]): used for used in node.all_input_nodes}
        self.casts: dict[fx.Node, torch.dtype] = {}
        self.done: Work = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is CAST:
            if not self.done and id(args[0]) in self._given and kwargs.get("dtype") is not None:
                self.casts[self._given[id(args[0])]] = kwargs["dtype"]
        elif func.namespace != "prim" and not any(one.alias_info for one in func._schema.returns):
            self._add(str(func), (args, kwargs, result))
        return result

    def gave(self, result: Any) -> None:
        """What the call returns belongs to its work."""
        self._add("return", result)

    def _add(self, what: str, values: Any) -> None:
        dtypes = [one.dtype for one in pytree.tree_leaves(values) if isinstance(one, torch.Tensor)]
        self.done.append((what, tuple(dtypes)))


def _cast(
    body: fx.Graph,
    used: fx.Node,
    dtype: torch.dtype,
    reader: fx.Node,
    known: dict[tuple[fx.Node, torch.dtype], fx.Node],
) -> fx.Node:
    """The operand in a dtype, where the graph's insertion point is."""
    kept = used.op == "placeholder" and used.meta["val"].requires_grad  # parameters: what torch's cache keeps
    if kept and (used, dtype) in known:
        return known[used, dtype]
    made = add_traced_call(body, torch.ops.aten.to.dtype, (used, dtype), val=used.meta["val"].to(dtype), like=reader)
    made.meta[SETTLED] = True
    if kept:
        known[used, dtype] = made
    return made
