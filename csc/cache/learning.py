"""What traces of a model have shown about its batches, as text; and what then decides which program a batch needs.

signature(learned, microbatch) -> tuple           of a completed microbatch: names, shapes, dtypes, consulted values
to_tree(learned, model) -> JSON                   Unstorable if a host function is called with what has no text
from_tree(tree, model) -> Learned
extends(more, less) -> bool                       whether one knows all that the other knows
snapshot(learned) -> Learned                      as it is now
together(more, less) -> Learned                   what both know
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from csc.capture.batch import split_batch
from csc.capture.capture import Learned
from csc.capture.guards import Guard
from csc.capture.trace.export import Host
from csc.capture.trace.replay import Way
from csc.capture.values.hoist import Function, HostCall
from csc.capture.values.hoisted import Hoisted
from csc.ir import asked, calls, sizes
from csc.ir.stored import Unstorable

PLAIN = (bool, int, float, str, type(None))


def signature(learned: Learned, microbatch: Mapping[str, Any]) -> Any:
    """What decides which program a completed microbatch needs."""
    tensors, extra = split_batch(microbatch)
    shapes = tuple((name, str(t.dtype), tuple(t.shape)) for name, t in sorted(tensors.items()))
    values = tuple((n, repr(tensors[n].tolist())) for n in sorted(learned.consulted) if n in tensors)
    return shapes, values, repr(sorted(extra.items(), key=lambda item: item[0]))


def snapshot(learned: Learned) -> Learned:
    """As it is now; `learned` itself grows with every capture."""
    return replace(learned, consulted=set(learned.consulted), written=set(learned.written))


def extends(more: Learned, less: Learned) -> bool:
    """Whether `more` came after `less`."""
    hosted = more.host.calls[: len(less.host.calls)]
    return hosted == less.host.calls and more.consulted >= less.consulted


def together(more: Learned, less: Learned) -> Learned:
    """What both know, `more` extending `less`: that has ways which the other never met."""
    met = [way.calls for way in more.ways]
    ways = (*more.ways, *(way for way in less.ways if way.calls not in met))
    known = [_guard_tree(guard) for guard in more.guards]
    guards = (*more.guards, *(guard for guard in less.guards if _guard_tree(guard) not in known))
    written = more.written | less.written
    return replace(
        more,
        consulted=set(more.consulted),
        ways=ways,
        guards=guards,
        decides=more.decides or less.decides,
        written=written,
        runs=less.runs,
    )


def to_tree(learned: Learned, model: nn.Module) -> Any:
    """Plain JSON. Arguments of host functions that are objects of the model are kept as where the model has them."""
    hosted = [_call_tree(call, model) for call in learned.host.calls]
    tried = [_place(function) for function in learned.host.tried]
    return {
        "calls": hosted, "tried": tried, "consulted": sorted(learned.consulted), "replayed": learned.replayed,
        "moves": learned.moves, "ways": list(map(_way_tree, learned.ways)),
        "written": sorted(map(list, learned.written)), "decides": learned.decides,
        "guards": list(map(_guard_tree, learned.guards)),
    }  # fmt: skip


def from_tree(tree: Any, model: nn.Module) -> Learned:
    """The inverse. AttributeError, KeyError, TypeError or ValueError for a tree that is not one of this model."""
    hosted = tuple(_call_from(call, model) for call in tree["calls"])
    tried = tuple(Function(*function) for function in tree["tried"])
    ways = tuple(map(_way_from, tree["ways"]))
    written = {(path, name) for path, name in tree["written"]}
    guards = tuple(map(_guard_from, tree["guards"]))
    consulted, decides = set(tree["consulted"]), tree["decides"]
    return Learned(
        Host(hosted, (), tried), consulted, ways, tree["replayed"], tree["moves"], decides, guards, written
    )  # fmt: skip


def _call_tree(call: HostCall | Hoisted, model: nn.Module) -> Any:
    if isinstance(call, Hoisted):
        return [asked.to_tree(call.expression), call.prefix]
    plain = [[name, _argument(value, model)] for name, value in call.plain]
    return [_place(call.function), [list(pair) for pair in call.arguments], plain, call.prefix]


def _call_from(tree: Any, model: nn.Module) -> HostCall | Hoisted:
    if len(tree) == 2:
        return Hoisted(asked.from_tree(tree[0]), tree[1])
    function, arguments, plain, prefix = tree
    return HostCall(
        Function(*function),
        tuple((parameter, entry) for parameter, entry in arguments),
        tuple((name, _value(value, model)) for name, value in plain),
        prefix,
    )


def _guard_tree(guard: Guard) -> Any:
    return {
        "sizes": _sizes_tree(guard.sizes), "fixed": _values_tree(guard.fixed),
        "decisions": [[asked.to_tree(one.expression), one.answer] for one in guard.decisions],
    }  # fmt: skip


def _guard_from(tree: Any) -> Guard:
    decisions = tuple(asked.Decision(asked.from_tree(question), answer) for question, answer in tree["decisions"])
    return Guard(sizes.from_tree(tree["sizes"]), _values_from(tree["fixed"]), decisions)


def _way_tree(way: Way) -> Any:
    try:
        made = calls.to_tree(way.calls)
    except sizes.Unknown as reason:
        raise Unstorable(str(reason)) from reason
    return {
        "calls": made, "sizes": _sizes_tree(way.sizes), "consulted": _values_tree(way.consulted),
        "decided": list(way.decided),
    }  # fmt: skip


def _way_from(tree: Any) -> Way:
    assumed, values = sizes.from_tree(tree["sizes"]), _values_from(tree["consulted"])
    return Way(calls.from_tree(tree["calls"]), assumed, values, tuple(tree["decided"]))


def _sizes_tree(assumed: sizes.SizeGuards) -> Any:
    try:
        return sizes.to_tree(assumed)
    except sizes.Unknown as reason:
        raise Unstorable(str(reason)) from reason


def _values_tree(values: Mapping[str, torch.Tensor]) -> Any:
    return {name: [str(tensor.dtype), tensor.tolist()] for name, tensor in values.items()}


def _values_from(tree: Any) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(values, dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (dtype, values) in tree.items()
    }


def _place(function: Function) -> list[Any]:
    return [function.owner, function.name, function.of_module]


def _argument(value: Any, model: nn.Module) -> Any:
    if type(value) in PLAIN:
        return ["value", value]
    if type(value) in (list, tuple):
        return [type(value).__name__, *(_argument(one, model) for one in value)]
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return ["dict", *([key, _argument(one, model)] for key, one in value.items())]
    for path, module in model.named_modules():
        if module is value:
            return ["module", path]
        for name, held in vars(module).items():
            if held is value:
                return ["attribute", path, name]
            for inner, deeper in getattr(held, "__dict__", {}).items():
                if deeper is value and not isinstance(held, nn.Module):
                    return ["attribute", path, name, inner]
    raise Unstorable(f"a {type(value).__name__} that a function on the host is called with")


def _value(tree: Any, model: nn.Module) -> Any:
    kind, *rest = tree
    if kind == "value":
        return rest[0]
    if kind in ("list", "tuple"):
        values = [_value(one, model) for one in rest]
        return values if kind == "list" else tuple(values)
    if kind == "dict":
        return {key: _value(one, model) for key, one in rest}
    path, *names = rest
    found: Any = model.get_submodule(path)
    for name in names:
        found = vars(found)[name]
    return found
