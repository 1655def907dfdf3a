"""Runs a template's forward under autograd, so that what is traced of it says where it comes from.

Marking(graph).run(*inputs)       traced nodes have `{"csc": {name, source, module, backward}}` under "custom" in
                                  their meta, of the forward node that they are of; so have those of the backward
tagging(origin)                   context: nodes that are traced in it carry `origin`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from csc.kernels import own_gradient as _own_gradient  # noqa: F401  registers them
from torch import fx

from csc.analysis import gradient_flow
from csc.ir import graph as g
from csc.torch_private.traces import fx_traceback


class Marking(fx.Interpreter):
    """Every traced node, of the backward too, knows the forward node it comes from."""

    def __init__(self, graph: fx.Graph) -> None:
        self._backwards = gradient_flow.backwards(graph)  # they read what has been computed long before
        super().__init__(torch.nn.Module(), garbage_collect_values=not self._backwards, graph=graph)
        self._later = {node for part in self._backwards.values() for node in part}
        self.seen: set[Any] = set()

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        if n in self._later:
            return None
        with tagging(_origin(n, backward=False)):
            arguments, keywords = self.fetch_args_kwargs_from_env(n)
            result = self._own(n, *arguments) if n in self._backwards else _called(n, arguments, keywords)
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        stack = [t.grad_fn for t in tensors if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        while stack:
            function = stack.pop()
            if function not in self.seen:
                self.seen.add(function)
                _tag_backward(function, _origin(n, backward=True))
                stack.extend(parent for parent, _ in function.next_functions if parent is not None)
        return result

    def _own(self, n: fx.Node, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *_: Any) -> Any:
        return list(_Computed.apply(partial(self._backward, n), len(outputs), *outputs, *inputs))

    def _backward(self, n: fx.Node, incoming: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of a function's inputs, for those of its outputs."""
        made: dict[fx.Node, Any] = {}

        def value(node: fx.Node) -> Any:
            return made[node] if node in made else self.env[node]

        for node in self._backwards[n]:
            with tagging(_origin(node, backward=True)):
                if g.op_name(node) == gradient_flow.INCOMING:
                    made[node] = incoming[node.args[1]].to(node.meta["val"].dtype)  # type: ignore[index]
                else:
                    made[node] = _called(node, fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value))
        ends: Any = n.args[2]
        return [value(one) for one in ends]


class _Computed(torch.autograd.Function):
    """Values that have been computed, and their inputs' gradients: run(gradients of the values) gives those."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Sequence[torch.Tensor]], Any], count: int, *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.count = run, count
        return tuple(one.detach() for one in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor) -> Any:
        return None, None, *[None] * ctx.count, *ctx.run(incoming)


def _called(n: fx.Node, arguments: Any, keywords: Any) -> Any:
    try:
        return n.target(*arguments, **keywords)  # type: ignore[operator]
    except (RuntimeError, ValueError):
        if g.op_name(n) not in ("aten::view", "aten::_unsafe_view"):
            raise
        # Attention with a mask that trains runs another kernel than at capture, and gradients come in other layouts
        # than values have: copy if needed.
        return torch.ops.aten.reshape.default(*arguments, **keywords)


def _origin(n: fx.Node, backward: bool) -> dict[str, Any]:
    where = {"source": n.meta.get("source", ""), "module": n.meta.get("module", "")}
    return {"name": n.name, **where, "backward": backward}


def _tag_backward(function: Any, origin: dict[str, Any]) -> None:
    open_tags: list[tagging] = []

    def enter(*_: Any) -> None:
        open_tags.append(tagging(origin))
        open_tags[-1].__enter__()

    def leave(*_: Any) -> None:
        open_tags.pop().__exit__()

    function.register_prehook(enter)
    function.register_hook(leave)


class tagging:
    """Within the block, nodes that are traced carry `origin` (fx copies the entry "custom" of the current meta)."""

    def __init__(self, origin: dict[str, Any]) -> None:
        self.meta = {"custom": {"csc": origin}}

    def __enter__(self) -> None:
        self.before = fx_traceback.current_meta
        fx_traceback.current_meta = self.meta

    def __exit__(self, *_: object) -> None:
        fx_traceback.current_meta = self.before
