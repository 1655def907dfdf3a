"""Work and traffic of a head and its loss in one call (csc.ir.graph.HEADS), whose logits are values of no graph.

products(node)   matrix products: the logits, and one each for the gradients of x and weight
flops(node)      of these products
traffic(node)    bytes read and written besides the operands and results that the graph shows, once each
"""

from __future__ import annotations

from torch import fx

from csc.ir import graph as g

# Times that each logit is read or written: made, its softmax a few rows at a time between two maxima; its gradient.
LOSS_PASSES, GRADIENT_PASSES = 5, 2


def products(node: fx.Node) -> int:
    _, to_x, to_weight, _ = g.bind(node)["output_mask"]
    return 1 + to_x + to_weight


def flops(node: fx.Node) -> int:
    tokens, classes, width, _ = _sizes(node)
    return 2 * tokens * classes * width * products(node)


def traffic(node: fx.Node) -> int:
    """The logits of all chunks, and for each chunk again the weight and the sum of its gradient."""
    bound = g.bind(node)
    tokens, classes, width, wide = _sizes(node)
    _, to_x, to_weight, to_bias = bound["output_mask"]
    passes = LOSS_PASSES + (GRADIENT_PASSES if to_x or to_weight or to_bias else 0) + to_x + to_weight + to_bias
    again = max(0, -(-tokens // bound["rows"]) - 1)
    weight = classes * width * bound["weight"].meta["val"].itemsize
    return tokens * classes * wide * passes + again * ((1 + to_x) * weight + 2 * to_weight * classes * width * wide)


def _sizes(node: fx.Node) -> tuple[int, int, int, int]:
    """(tokens, classes, width, bytes of a logit)."""
    bound = g.bind(node)
    classes, width = bound["weight"].meta["val"].shape
    return bound["labels"].meta["val"].numel(), classes, width, max(4, bound["weight"].meta["val"].itemsize)
