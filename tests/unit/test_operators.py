"""What the table says of an operation holds when the operation runs: an entry that is changed changes the entries that
walk along with it, and no other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from csc.kernels import attention as _operators  # noqa: F401  registers csc::attention
from torch import fx

from csc.analysis.operators.table import RULES, Use, links, relation
from csc.ir import graph as g

aten = torch.ops.aten
generator = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=generator, dtype=torch.float64) + 0.1


def whole(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=generator)


def called(target: Any, *args: Any, **kwargs: Any) -> tuple[fx.Node, dict[fx.Node, torch.Tensor]]:
    """A call, and the values of its operands."""
    graph = fx.Graph()
    values: dict[fx.Node, torch.Tensor] = {}

    def placed(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [placed(one) for one in value]
        if not isinstance(value, torch.Tensor):
            return value
        node = g.add_placeholder(graph, f"x{len(values)}", value, ("input", "x"))
        values[node] = value
        return node

    given = [placed(one) for one in args]
    node = graph.call_function(target, tuple(given), kwargs)
    node.meta["val"] = run(node, values)
    return node, values


def run(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def first(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result  # type: ignore[no-any-return]


def changed(node: fx.Node, values: dict[fx.Node, torch.Tensor], used: fx.Node, dim: int, place: int) -> torch.Tensor:
    """Which entries of the result are others once the operand's entries at a place of a dimension are."""
    other = values[used].clone()
    at = other.select(dim, place)
    at.copy_((at + 1) % at.max().clamp(min=1) if not at.dtype.is_floating_point else at.flip(0) * 1.7 + 0.3)
    return first(run(node, values)) != first(run(node, {**values, used: other}))


def check(node: fx.Node, values: dict[fx.Node, torch.Tensor], use: Use) -> None:
    shape = values[use.node].shape
    for dim, size in enumerate(shape):
        end = use.end(dim)
        if size == 1 or (end is not None and end.how not in ("unread", "cut", "joined", "contracted", "broadcast")):
            continue
        assert end is None or end.how != "broadcast"
        if end is not None and end.how == "contracted":
            halves = [torch.arange(size) < size // 2, torch.arange(size) >= size // 2, torch.zeros(size)]
            masks = [half.to(values[use.node].dtype).view([-1 if d == dim else 1 for d in range(len(shape))])
                     for half in halves]  # fmt: skip
            low, high, none = (first(run(node, {**values, use.node: values[use.node] * mask})) for mask in masks)
            torch.testing.assert_close(low + high - none, first(run(node, values)))
            continue
        for place in range(size):
            found = changed(node, values, use.node, dim, place)
            if end is not None and (end.how == "unread" or end.dim is None):
                assert end.how == "cut" or not found.any()
                continue
            along = use.link.index(dim) if end is None else end.dim
            assert along is not None
            at = place if end is None else place - end.start if end.how == "cut" else place + end.start
            if 0 <= at < found.shape[along]:
                found.select(along, at).fill_(False)
            assert not found.any(), (use.link, end, dim, place)


PRODUCTS = [
    (aten.linear.default, (random(2, 3, 4), random(5, 4), random(5))),
    (aten.linear.default, (random(4), random(5, 4))),
    (aten.mm.default, (random(3, 4), random(4, 5))),
    (aten.matmul.default, (random(2, 1, 3, 4), random(6, 4, 5))),
    (aten.matmul.default, (random(2, 3, 4), random(4))),
    (aten.matmul.default, (random(4), random(2, 4, 5))),
    (aten.addmm.default, (random(5), random(3, 4), random(4, 5))),
    (aten.bmm.default, (random(2, 3, 4), random(2, 4, 5))),
    (aten.mv.default, (random(3, 4), random(4))),
    (aten.dot.default, (random(4), random(4))),
    (aten.einsum.default, ("...i,ji->j...", [random(2, 3, 4), random(5, 4)])),
    (aten.einsum.default, ("bij,kj->bki", [random(2, 3, 4), random(5, 4)])),
]
MOVES = [
    (aten.transpose.int, (random(2, 3, 4), 0, -1)),
    (aten.permute.default, (random(2, 3, 4), [2, 0, 1])),
    (aten.unsqueeze.default, (random(2, 3), 1)),
    (aten.squeeze.dim, (random(2, 1, 3), 1)),
    (aten.expand.default, (random(2, 1, 3), [4, 2, 5, 3])),
    (aten.select.int, (random(2, 3, 4), 1, 2)),
    (aten.slice.Tensor, (random(2, 6, 3), 1, 2, 5)),
    (aten.slice.Tensor, (random(2, 6, 3), 1, 0, 6)),
    (aten.slice.Tensor, (random(2, 6, 3), 1, -3)),
    (aten.split.Tensor, (random(2, 6), 2, 1)),
    (aten.cat.default, ([random(2, 3), random(2, 1), random(2, 2)], 1)),
    (aten.masked_scatter.default, (random(2, 3, 4), whole(2, 2, 3, 1).bool(), random(6, 4))),
    (aten.stack.default, ([random(2, 3), random(2, 3)], 1)),
    (aten.index.Tensor, (random(4, 2, 3), [whole(4, 5, 1), None, whole(3, 6)])),
    (aten.index.Tensor, (random(4, 5, 3), [None, whole(5, 2, 6)])),
    (aten.index_select.default, (random(4, 3), 1, whole(3, 7))),
    (aten.embedding.default, (random(4, 3), whole(4, 2, 5))),
    (aten.gather.default, (random(3, 4), 1, whole(4, 2, 6))),
    (aten.scatter.src, (random(3, 4), 1, whole(4, 2, 3), random(2, 3))),
    (aten.select_scatter.default, (random(2, 3, 4), random(2, 4), 1, 2)),
    (aten.constant_pad_nd.default, (random(2, 3), [1, 1])),
    (aten.repeat.default, (random(2, 3), [2, 1, 2])),
    (aten.unfold.default, (random(2, 6), 1, 2, 2)),
    (aten.one_hot.default, (whole(4, 2, 3), 5)),
    (aten.new_zeros.default, (random(2, 3), [2, 3])),
]
OTHERS = [
    (aten.add.Tensor, (random(2, 1, 3), random(4, 1))),
    (aten.where.self, (whole(2, 3).bool(), random(2, 3), random(2, 1))),
    (aten.type_as.default, (random(2, 3), random(2, 3))),
    (aten._softmax.default, (random(2, 3, 4), 1, False)),
    (aten.cumsum.default, (random(2, 3), 1)),
    (aten.sum.dim_IntList, (random(2, 3, 4), [1], False)),
    (aten.mean.dim, (random(2, 3, 4), [-1], True)),
    (aten.amax.default, (random(2, 3, 4), [0])),
    (aten.sum_to_size.default, (random(2, 3, 4), [3, 1])),
    (aten.layer_norm.default, (random(2, 3, 4), [4], random(4), random(4))),
    (aten.sort.default, (random(2, 3), 0)),
    (aten.flip.default, (random(2, 3), [1])),
    (aten.prelu.default, (random(2, 3, 4) - 0.5, random(3))),
    (aten.cross_entropy_loss.default, (random(4, 5, 2), whole(5, 4, 2), None, 0)),
    (aten.mse_loss.default, (random(3, 2), random(2), 0)),
    (aten.cosine_similarity.default, (random(2, 3, 4), random(3, 4), 1)),
    (aten.cdist.default, (random(2, 3, 5), random(4, 5))),
    (aten.bilinear.default, (random(2, 3), random(2, 4), random(5, 3, 4), None)),
    (aten.tril.default, (random(2, 3, 3),)),
    (aten.std_mean.correction, (random(2, 3), [1])),
    (aten.index_add.default, (random(2, 4), 1, whole(4, 3), random(2, 3))),
    (aten.conv1d.default, (random(2, 3, 6), random(4, 3, 2))),
    (aten.group_norm.default, (random(2, 4, 3), 2)),
    (aten.avg_pool2d.default, (random(2, 3, 4, 4), [2, 2])),
    (aten.grid_sampler.default, (random(2, 3, 4, 4), random(2, 5, 6, 2) - 0.5, 0, 0, True)),
    (aten.scaled_dot_product_attention.default, (random(2, 4, 3, 5), random(2, 4, 6, 5), random(2, 4, 6, 5))),
    (aten.scaled_dot_product_attention.default,
     (random(2, 4, 3, 5), random(2, 4, 6, 5), random(2, 4, 6, 5), random(1, 4, 3, 6))),
]  # fmt: skip


@pytest.mark.parametrize(("target", "args"), [*PRODUCTS, *MOVES, *OTHERS], ids=lambda one: getattr(one, "_name", ""))
def test_what_walks_along_changes_together(target: Any, args: Any) -> None:
    node, values = called(target, *args)
    found = relation(node)
    assert found is not None
    assert {use.node for use in found.uses} <= set(values)
    scalar = not first(node.meta["val"]).shape
    assert scalar or any(any(d is not None for d in use.link) or use.rest.how == "unread" for use in found.uses)
    for use in found.uses:
        check(node, values, use)


def test_heads_of_keys_are_the_outer_factor_of_those_of_queries() -> None:
    args = (random(2, 4, 3, 8).float(), random(2, 2, 6, 8).float(), random(2, 2, 6, 8).float())
    node, _ = called(torch.ops.csc.attention.default, *args, None, 0, False, 0, 0, 1.0, 0.0)
    found = relation(node)
    assert found is not None
    query, key, value = found.uses
    assert query.link == (0, 1, 2, None) and value.link == (0, None, None, 3)
    for use in (key, value):
        end = use.end(1)
        assert end is not None and (end.how, end.dim) == ("grouped", 1)
    ends = [use.end(3) for use in (query, key)]
    assert ends[0] == ends[1] and ends[0] is not None and ends[0].how == "blocked"


def test_places_of_causal_attention_are_not_free() -> None:
    """What a query sees is told by its place, so it may not be in another."""
    args = (random(1, 1, 3, 4), random(1, 1, 3, 4), random(1, 1, 3, 4))
    for causal, along in ((False, 2), (True, None)):
        node, _ = called(aten.scaled_dot_product_attention.default, *args, None, 0.0, causal)
        assert links(node)[0][1][2] == along


@pytest.mark.parametrize(
    "call",
    [
        lambda: called(aten.nonzero.default, random(2, 3)),
        lambda: called(aten.index.Tensor, random(2, 3), [torch.tensor([True, False])]),
        lambda: called(aten.einsum.default, "ii->i", [random(3, 3)]),
        lambda: called(aten.trace.default, random(3, 3)),
    ],
)
def test_nothing_is_said_of_what_is_not_known(call: Callable[[], tuple[fx.Node, Any]]) -> None:
    assert relation(call()[0]) is None


def test_every_rule_is_of_an_operation_that_exists() -> None:
    for name in RULES:
        space, _, operation = name.partition("::")
        assert space == "csc" or hasattr(getattr(torch.ops, space), operation), name
