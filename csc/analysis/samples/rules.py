"""Rules of single operations for following samples, where the table of links does not say all.

RULES: {operation: rule}        rule(following, node) -> State; Lost if the call mixes samples
OF_TERMS: operations that keep terms of a loss, which are divided by different numbers, apart
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from csc.analysis.operators.table import BATCH_NORMS, LINEAR, LOOK_UPS, MADE, PRODUCTS, RECURRENT
from csc.analysis.samples import arithmetic_rules as arithmetic
from csc.analysis.samples import function_rules as functions
from csc.analysis.samples import layer_rules as layers
from csc.analysis.samples import move_rules as moves
from csc.analysis.samples import product_rules as products
from csc.analysis.samples import size_rules as sizes
from csc.analysis.samples.loss_rules import LOSS_RULES
from csc.analysis.samples.propagation import SamplePropagation
from csc.analysis.samples.states import State

Rule = Callable[[SamplePropagation, fx.Node], State]


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return {f"aten::{name}": rule for name in names.split()}


_SCALED = _each("mul", arithmetic.product_rule(1)) | _each("div", arithmetic.product_rule(-1))
RULES: dict[str, Rule] = {
    "mul": sizes.number_rule(1),
    **dict.fromkeys(("truediv", "floordiv"), sizes.number_rule(-1)),
    **dict.fromkeys(("add", "sub"), sizes.number_sum_rule),
    **dict.fromkeys(("sym_float", "int", "sym_int", "neg"), sizes.same_number_rule),
    **dict.fromkeys(MADE, sizes.filled_rule),
    **dict.fromkeys(LINEAR, arithmetic.linear_rule),
    **dict.fromkeys(PRODUCTS, products.contraction_rule),
    **dict.fromkeys(BATCH_NORMS, layers.batch_norm_rule),
    **dict.fromkeys(RECURRENT, layers.recurrent_rule),
    **dict.fromkeys(LOOK_UPS, moves.look_up_rule),
    **LOSS_RULES,
    **_each("sym_size", sizes.size_rule),
    **_each("arange", sizes.range_rule),
    **_each("expand repeat", sizes.expand_rule),
    **_SCALED,
    **_each("add sub rsub", arithmetic.sum_rule),
    **_each("stack", arithmetic.stack_rule),
    **_each("pow reciprocal", arithmetic.power_rule),
    **_each("clamp clamp_min", arithmetic.clamp_rule),
    **_each("_to_copy to", arithmetic.cast_rule),
    **_each("where masked_fill", arithmetic.choice_rule),
    **_each("sum mean sum_to_size", products.reduction_rule),
    **_each("einsum", products.contraction_rule),
    **_each("slice", moves.slice_rule),
    **_each("split split_with_sizes chunk unsafe_split", moves.split_rule),
    **_each("cat", moves.join_rule),
    **_each("index_put", moves.index_put_rule),
    **_each("masked_scatter", moves.scatter_in_order_rule),
    **_each("repeat_interleave", moves.repeat_each_rule),
    **_each("argsort", moves.order_rule),
    **_each("slice_scatter", moves.overwritten_rule),
    **_each("type_as", moves.typed_rule),
    **_each("scaled_dot_product_attention", layers.attention_rule),
    **_each("broadcast_tensors", layers.broadcast_rule),
    "csc::incoming": functions.incoming_rule,
    "csc::own_gradient": functions.own_gradient_rule,
    "csc::with_hooks": functions.hooked_rule,
    "getitem": layers.item_rule,
}
_OF_TERMS = (
    arithmetic.linear_rule, arithmetic.sum_rule, arithmetic.stack_rule, arithmetic.cast_rule, products.reduction_rule,
)  # fmt: skip
OF_TERMS = frozenset({*_SCALED, *(name for name, rule in RULES.items() if rule in _OF_TERMS)})
