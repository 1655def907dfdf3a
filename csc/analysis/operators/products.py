"""Calls that multiply and sum: products of matrices, attention, distances.

RULES: {operation: rule}        see csc.analysis.operators.table
PRODUCTS: {operation: places of the two factors}
GROUPED: {operation: arguments}  rows by the matrix of their group, matrices, where each group ends
GROUPED_BACKWARD                 gradients of rows and matrices, of these, and that of the result
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from csc.analysis.operators.relation import Call, End, Link, Rule, Use, alike, same, shape_of

PRODUCTS = {"aten::mm": (0, 1), "aten::bmm": (0, 1), "aten::matmul": (0, 1), "aten::linear": (0, 1),
            "aten::addmm": (1, 2), "aten::baddbmm": (1, 2), "aten::addmv": (1, 2), "aten::mv": (0, 1),
            "aten::dot": (0, 1), "aten::vdot": (0, 1)}  # fmt: skip
GROUPED = {"transformers::grouped_mm_fallback": ("input", "weight", "offs"),
           "aten::_grouped_mm": ("self", "mat2", "offs")}  # fmt: skip
GROUPED_BACKWARD = "transformers::grouped_mm_fallback_backward"
ATTENTION = "csc::attention"
CONTEXT_ATTENTION = "csc::context_attention"  # of a shard of the tokens: queries and keys are the rank's own
SDPA = "aten::scaled_dot_product_attention"
_SUMMED = End("contracted", walk=0)


def product(call: Call) -> list[Use]:
    """[.., M, K] and [.., K, N], or [N, K] of `linear`; vectors have no M, or no N."""
    left, right = (call.node.args[place] for place in PRODUCTS[call.name])
    assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
    rank, right_rank = len(call.out), len(shape_of(right))
    vector = right_rank == 1
    kept = call.out if vector else call.out[:-1]
    own: Link = (*same(shape_of(left)[:-1], kept, from_right=True), *(() if vector else (None,)))
    uses = [Use(left, own, ends={len(shape_of(left)) - 1: _SUMMED})]
    if vector:
        uses.append(Use(right, (None,) * rank, ends={0: _SUMMED}))
    elif call.name == "aten::linear":
        uses.append(Use(right, (*(None for _ in range(rank - 1)), 0), ends={1: _SUMMED}))
    else:
        rows = len(shape_of(left)) > 1  # a vector's result has no dimension for them
        batch = same(shape_of(right)[:-2], call.out[: -2 if rows else -1], from_right=True)
        link = (*batch, *((None,) if rows else ()), right_rank - 1)
        uses.append(Use(right, link, ends={right_rank - 2: _SUMMED}))
    added = [used for used in call.tensors() if used not in (left, right)]
    return uses + [Use(used, same(shape_of(used), call.out, from_right=True)) for used in added]


def grouped(call: Call) -> list[Use]:
    """[rows, K] and [groups, K, N], for what divides other dimensions than rows: which matrix a row is multiplied by is
    a matter of its place, so that the rule is not among RULES (csc.analysis.routing follows rows).
    """
    rows, matrices, ends = (call.bound[name] for name in GROUPED[call.name])
    if (len(shape_of(rows)), len(shape_of(matrices))) != (2, 3):
        return []
    blocked = End("blocked")
    return [
        Use(rows, (None, None), blocked, ends={1: _SUMMED}),
        Use(matrices, (None, 2), blocked, ends={1: _SUMMED}),
        Use(ends, (None, None), blocked),
    ]


def einsum(call: Call) -> list[Use]:
    """Letters that the result lacks are summed. Nothing is known of a letter that one term has twice."""
    operands = call.bound["tensors"]
    terms, result = spelled_out(call.bound["equation"], [len(shape_of(one)) for one in operands])
    if any(len(set(term)) < len(term) for term in terms):
        return []
    uses = []
    for term, operand in zip(terms, operands):
        shape, at = shape_of(operand), {letter: d for d, letter in enumerate(term)}
        link = tuple(at[one] if one in at and alike(shape[at[one]], size) else None
                     for one, size in zip(result, call.out))  # fmt: skip
        ends = {d: End("contracted", walk=ord(one)) for d, one in enumerate(term) if one not in result}
        uses.append(Use(operand, link, ends=ends))
    return uses


def spelled_out(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The terms and the result of an einsum, each dimension a letter: those behind `...` are digits, counted from the
    right; a result that is left out has the letters that occur once, in alphabetical order.
    """
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    most = max((rank - len(term) + 3 for term, rank in zip(terms, ranks) if "..." in term), default=0)
    dots = "0123456789"[:most]
    if not arrow:
        once = sorted(letter for letter in set(given) - set(",.") if given.count(letter) == 1)
        result = ("..." if "..." in given else "") + "".join(once)
    shown = [
        term.replace("...", dots[len(dots) - (rank - len(term) + 3) :]) if "..." in term else term
        for term, rank in zip(terms, ranks)
    ]
    return shown, result.replace("...", dots)


def attention(call: Call) -> list[Use]:
    """[samples, heads, tokens, width]; keys and values may have fewer heads. What else is read says what is seen."""
    query, key, value, *rest = call.node.args
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node) and isinstance(value, fx.Node)
    heads, tokens, width = End("grouped", 1), End("blocked", walk=1), End("blocked", walk=0)
    uses = [
        Use(query, (0, 1, 2, None), ends={3: width}),
        Use(key, (0, None, None, None), ends={1: heads, 2: tokens, 3: width}),
        Use(value, (0, None, None, 3), ends={1: heads, 2: tokens}),
    ]
    masks = [used for used in rest if isinstance(used, fx.Node)]
    return uses + [Use(mask, (None,) * 4, End("blocked")) for mask in masks]


def written_attention(call: Call) -> list[Use]:
    """SDPA: samples and heads; of queries and of the mask's rows also the places. Keys may have fewer heads."""
    rank, keys, width = len(call.out), End("blocked", walk=1), End("blocked", walk=0)
    causal = [rank - 2] if call.bound["is_causal"] else []  # what a query sees depends on its place
    lost = {"query": [rank - 1, *causal], "key": [rank - 1, rank - 2], "value": [rank - 2], "attn_mask": [rank - 1]}
    last = {"query": width, "key": width, "attn_mask": keys}
    found = []
    for which, without in lost.items():
        for used in call.given(which):
            own = len(shape_of(used))
            link = same(shape_of(used), call.out, from_right=True, without=without)
            ends = {own - 2: keys, own - 1: last.get(which, keys)}
            if which in ("key", "value") and own >= 3 and link[rank - 3] is None:
                ends[own - 3] = End("grouped", rank - 3)
            found.append(Use(used, link, ends=ends))
    return found


def distance(call: Call) -> list[Use]:
    """A number for each pair of vectors along `dim` (the last one of pairwise_distance), once they are broadcast."""
    found = []
    most = max(len(shape_of(used)) for used in call.tensors())
    for used in call.tensors():
        shape = shape_of(used)
        dim = call.bound.get("dim", -1) % most - most + len(shape)
        rest = [d for d in range(len(shape)) if d != dim]
        link = same([shape[d] for d in rest], call.out, from_right=True)
        found.append(Use(used, tuple(None if d is None else rest[d] for d in link), ends={dim: End("summed", walk=0)}))
    return found


def bilinear(call: Call) -> list[Use]:
    """Two vectors each, in the last dimension."""
    return [Use(one, (*range(len(call.out) - 1), None), _SUMMED) for one in call.given("input1", "input2")]


def pairs(call: Call) -> list[Use]:
    """`cdist`: [*, P, M] and [*, R, M] to [*, P, R]."""
    uses = []
    for which, where in (("x1", (True, False)), ("x2", (False, True))):
        used = call.bound[which]
        rank = len(shape_of(used))
        batch = same(shape_of(used)[:-2], call.out[:-2], from_right=True)
        uses.append(Use(used, (*batch, *(rank - 2 if own else None for own in where)), End("summed", walk=0)))
    return uses


RULES: dict[str, Rule] = {
    **dict.fromkeys(PRODUCTS, product),
    "aten::einsum": einsum,
    **dict.fromkeys((ATTENTION, CONTEXT_ATTENTION), attention),
    SDPA: written_attention,
    "aten::bilinear": bilinear,
    "aten::cdist": pairs,
    **dict.fromkeys(("aten::cosine_similarity", "aten::pairwise_distance"), distance),
}
