"""What the captures of a model assumed, as text.

to_tree(guards, model) -> JSON        Unstorable if a host function is called with what has no text
from_tree(tree, model) -> Guards
"""

from __future__ import annotations

from typing import Any

from torch import nn

from csc.capture.guards import Guards
from csc.capture.trace.traced_model import HoistedCalls
from csc.capture.values.hoist import Function, Hoisted, HostCall
from csc.ir import capture_guards
from csc.ir.capture_guards import Unstorable

FORMAT = 2
PLAIN = (bool, int, float, str, type(None))


def to_tree(known: Guards, model: nn.Module) -> Any:
    """Plain JSON. Arguments of host functions that are objects of the model are kept as where the model has them."""
    return {
        "format": FORMAT,
        "calls": [_call_tree(call, model) for call in known.host.calls],
        "tried": [_place(function) for function in known.host.tried],
        "deciding": sorted(known.deciding), "captures": list(map(capture_guards.to_tree, known.captures)),
        "replayed": known.replayed, "moves": known.moves, "decides": known.decides,
        "written": sorted(map(list, known.written)),
    }  # fmt: skip


def from_tree(tree: Any, model: nn.Module) -> Guards:
    """The inverse. AttributeError, KeyError, TypeError or ValueError for a tree that is not one of this model."""
    if tree["format"] != FORMAT:
        raise ValueError(f"guards of format {tree['format']}")
    hosted = tuple(_call_from(call, model) for call in tree["calls"])
    tried = tuple(Function(*function) for function in tree["tried"])
    captures = tuple(map(capture_guards.from_tree, tree["captures"]))
    written = {(path, name) for path, name in tree["written"]}
    return Guards(
        HoistedCalls(hosted, (), tried), set(tree["deciding"]), captures, tree["replayed"], tree["moves"],
        tree["decides"], written,
    )  # fmt: skip


def _call_tree(call: HostCall | Hoisted, model: nn.Module) -> Any:
    if isinstance(call, Hoisted):
        return [capture_guards.question_to_tree(call.expression), call.prefix]
    plain = [[name, _argument(value, model)] for name, value in call.plain]
    return [_place(call.function), [list(pair) for pair in call.arguments], plain, call.prefix]


def _call_from(tree: Any, model: nn.Module) -> HostCall | Hoisted:
    if len(tree) == 2:
        return Hoisted(capture_guards.question_from_tree(tree[0]), tree[1])
    function, arguments, plain, prefix = tree
    return HostCall(
        Function(*function),
        tuple((parameter, entry) for parameter, entry in arguments),
        tuple((name, _value(value, model)) for name, value in plain),
        prefix,
    )


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
