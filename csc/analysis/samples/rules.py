"""Rules of single operations for following samples, where the table of links does not say all.

RULES: {operation: rule}        rule(following, node) -> State; Lost if the call mixes samples
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from csc.analysis.operators.made import MADE
from csc.analysis.operators.moves import LOOK_UPS
from csc.analysis.operators.products import PRODUCTS
from csc.analysis.operators.reductions import BATCH_NORMS, RECURRENT
from csc.analysis.operators.table import LINEAR
from csc.analysis.samples.arithmetic_rules import (
    cast_rule,
    choice_rule,
    clamp_rule,
    linear_rule,
    power_rule,
    product_rule,
    sum_rule,
)
from csc.analysis.samples.function_rules import hooked_rule, incoming_rule, own_gradient_rule
from csc.analysis.samples.layer_rules import (
    attention_rule,
    batch_norm_rule,
    broadcast_rule,
    item_rule,
    recurrent_rule,
)
from csc.analysis.samples.loss_rules import LOSS_RULES
from csc.analysis.samples.move_rules import (
    index_put_rule,
    join_rule,
    look_up_rule,
    order_rule,
    overwritten_rule,
    repeat_each_rule,
    scatter_in_order_rule,
    slice_rule,
    split_rule,
    typed_rule,
)
from csc.analysis.samples.product_rules import contraction_rule, reduction_rule
from csc.analysis.samples.propagation import Following, State
from csc.analysis.samples.size_rules import (
    expand_rule,
    filled_rule,
    number_rule,
    number_sum_rule,
    range_rule,
    same_number_rule,
    size_rule,
)

Rule = Callable[[Following, fx.Node], State]

_NUMBERS: dict[str, Rule] = {
    "mul": number_rule(1),
    "truediv": number_rule(-1),
    "floordiv": number_rule(-1),
    **dict.fromkeys(("add", "sub"), number_sum_rule),
    **dict.fromkeys(("sym_float", "int", "sym_int", "neg"), same_number_rule),
}

RULES: dict[str, Rule] = {
    **_NUMBERS,
    **dict.fromkeys(MADE, filled_rule),
    **dict.fromkeys(LINEAR, linear_rule),
    **dict.fromkeys(PRODUCTS, contraction_rule),
    **LOSS_RULES,
    "aten::sym_size": size_rule,
    "aten::arange": range_rule,
    "aten::expand": expand_rule,
    "aten::repeat": expand_rule,
    "aten::mul": product_rule(1),
    "aten::div": product_rule(-1),
    "aten::add": sum_rule,
    "aten::sub": sum_rule,
    "aten::rsub": sum_rule,
    "aten::pow": power_rule,
    "aten::reciprocal": power_rule,
    "aten::clamp": clamp_rule,
    "aten::clamp_min": clamp_rule,
    "aten::_to_copy": cast_rule,
    "aten::to": cast_rule,
    "aten::where": choice_rule,
    "aten::masked_fill": choice_rule,
    "aten::sum": reduction_rule,
    "aten::mean": reduction_rule,
    "aten::sum_to_size": reduction_rule,
    "aten::einsum": contraction_rule,
    "aten::slice": slice_rule,
    "aten::split": split_rule,
    "aten::split_with_sizes": split_rule,
    "aten::chunk": split_rule,
    "aten::unsafe_split": split_rule,
    "aten::cat": join_rule,
    **dict.fromkeys(LOOK_UPS, look_up_rule),
    "aten::index_put": index_put_rule,
    "aten::masked_scatter": scatter_in_order_rule,
    "aten::repeat_interleave": repeat_each_rule,
    "aten::scaled_dot_product_attention": attention_rule,
    **dict.fromkeys(BATCH_NORMS, batch_norm_rule),
    **dict.fromkeys(RECURRENT, recurrent_rule),
    "aten::argsort": order_rule,
    "aten::slice_scatter": overwritten_rule,
    "aten::type_as": typed_rule,
    "aten::broadcast_tensors": broadcast_rule,
    "csc::incoming": incoming_rule,
    "csc::own_gradient": own_gradient_rule,
    "csc::with_hooks": hooked_rule,
    "getitem": item_rule,
}
