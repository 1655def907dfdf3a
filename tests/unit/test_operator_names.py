"""What is known of operators stands in one table: who else names one looks for a pattern, or makes that call."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.unit.test_imports import MODULES

TABLE = "csc.analysis.operators"
# A file that names operators of ATen, and why they are no knowledge that others could need.
NAMES = {
    "csc.analysis.visibility": (
        "a pattern: the numbers of runs, and an index that counts through all; a pattern: masks written as comparisons"
    ),
    "csc.analysis.tokens": (
        "a pattern: tokens sorted by expert and put back; which calls add tokens up, whatever they are"
    ),
    "csc.analysis.samples.arithmetic_rules": (
        "the rule of one call each, with what the table says of its dimensions; what one call each makes of "
        "the bounds of its operands"
    ),
    "csc.analysis.samples.rules": "the rule of one call; which rule follows samples through which call",
    "csc.analysis.samples.propagation": (
        "calls that make something of mixed samples again; a pattern: an entry of a mask that is set where "
        "none is; where a pattern begins that csc.analysis.tokens follows"
    ),
    "csc.codegen.manifest": "a pattern: the seed of the step, which pass `dropout` cuts out",
    "csc.analysis.placements": "what adds and what scales the terms of a sum",
    "csc.analysis.symbolic": "writes a view as a reshape",
    "csc.analysis.batch_limits": "a pattern: what csc.capture.lower.masked_index writes for a selection",
    "csc.capture.lower.flatten": (
        "a pattern: a smoothed mean over weighted classes; writes casts; which calls of an exported graph are left out"
    ),
    "csc.capture.lower.writes": (
        "which calls are taken apart, and into what; writes copies for values that are written to later; "
        "writes what changes in place as calls that give it"
    ),
    "csc.capture.lower.masked_index": (
        "writes selections as masked calls; writes the calls of rows that a mask selects; writes sums over "
        "rows that a mask selects; which calls select, and which take what was selected in order; which calls"
        " make numbers of numbers; which look something up by numbers"
    ),
    "csc.capture.trace.export": "the one call that asks whether a size is 1",
    "csc.check.eager": "draws by itself: what judges shares no code with what it judges",
    "csc.codegen.python": "how the call of one is written",
    "csc.kernels.cpu": "runs ATen's kernels",
    "csc.kernels.scattered_rows": "runs ATen's kernels",
    "csc.kernels.linear_cross_entropy": "runs ATen's kernels",
    "csc.masks.mask_mod": "indexes while a mask_mod is traced",
    "csc.passes.attention": "writes masks as ranges and kinds; a pattern: attention written out",
    "csc.passes.batch_loss": "views that a loss takes for itself; what no loss has; adds what is handed over",
    "csc.passes.differentiate": "tidies what autograd traced; writes a view as a reshape",
    "csc.passes.dropout": "writes calls that draw from a seed",
    "csc.passes.tensor_graph": (
        "writes sums of parts; the calls that are linear in them; writes the numbers of a rank's entries; "
        "writes a split in other sizes; writes the calls of a shard"
    ),
    "csc.passes.head": "a pattern: logits from the product to the loss",
    "csc.passes.loss": ("which calls scale what a loss is a mean over; writes what a loss is a mean over, and weights"),
    "csc.passes.precision": "writes casts",
    "csc.passes.prune": "writes zeros",
    "csc.passes.regions": "writes copies; which calls leave a value its name",
    "csc.passes.shapes": "writes constants",
    "csc.passes.sharding": (
        "writes the calls between a shard of tokens and the whole; writes the calls of a shard of tokens; "
        "writes the calls of sums over a shard of tokens"
    ),
    "csc.passes.simplify": "a pattern: an expanded value that is scaled",
    "csc.passes.split": "a pattern: the product that ends a gradient",
    "csc.passes.sequence": (
        "a pattern: a sum, its bias and the view behind them; writes the calls of a shard of tokens"
    ),
    "csc.passes.views": "writes views",
    "csc.runtime.compiled_function": "which calls another library computes, and a copy for it",
    "csc.torch_private.dropped_attention": "attention in the parts that torch has for it",
    "csc.torch_private.artifacts": "what Inductor makes no kernel of",
    "csc.torch_private.real_layouts": "how torch lays out the results of single calls",
}
# Their lists of operators: {file: names of the lists}.
LISTS = {
    "csc.analysis.samples.arithmetic_rules": {"MOVES", "RULES"},
    "csc.analysis.samples.propagation": {"BEGIN", "COPIED_FOR_EACH", "SEARCHES", "TYPE_ALONE", "UNLESS"},
    "csc.analysis.tokens": {"UNWRITTEN", "_ADDS"},
    "csc.analysis.placements": {"FACTORS", "NORMS", "OVER_ROWS", "SCATTERS", "TERMS"},
    "csc.capture.lower.writes": {"SCATTERS", "_OTHER_OPERATIONS"},
    "csc.capture.lower.flatten": {"ASSERTIONS"},
    "csc.passes.batch_loss": {"CONVOLUTIONS", "TURNED"},
    "csc.capture.lower.masked_index": {
        "ALONG_ROWS",
        "ARITHMETIC",
        "FINITE",
        "INDICES",
        "LOSSES",
        "REDUCED",
        "SIZED",
        "WRITES",
    },
    "csc.check.eager": {"_FILLED"},
    "csc.codegen.python": {"FUNCTIONS", "OF_SIZES"},
    "csc.passes.head": {"PRODUCTS", "STEPS"},
    "csc.passes.regions": {"CARRIES_NAME"},
    "csc.passes.tensor_graph": {"MAKES_SHARDS", "WITHOUT_BIAS"},
    "csc.torch_private.artifacts": {"AS_THEY_ARE"},
    "csc.torch_private.real_layouts": {"LAYOUTS", "OF_CPU"},
}


def named(tree: ast.AST) -> Iterator[str]:
    """Operators of ATen that code names: "aten::mm", f"aten::{..}", torch.ops.aten.mm; not those that texts tell of."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.startswith("aten::") and " " not in node.value:
                yield node.value
        elif isinstance(node, ast.Attribute):
            chain = ast.unparse(node)
            if chain.startswith(("aten.", "torch.ops.aten.")):
                yield chain


def lists(tree: ast.Module) -> Iterator[str]:
    """The names of constants of a file that hold operators."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and not isinstance(node.value, ast.Constant | ast.Attribute):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and any(named(node)):
                yield target.id


def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(file.read_text()) for name, file in MODULES.items() if not name.startswith(TABLE)}


def test_files_that_name_operators_have_a_reason() -> None:
    assert {name for name, tree in trees().items() if any(named(tree))} == NAMES.keys()


def test_no_other_file_lists_operators() -> None:
    assert {name: found for name, tree in trees().items() if (found := set(lists(tree)))} == LISTS


def test_the_example_of_a_second_table_is_found() -> None:
    tree = ast.parse('"""aten::mm"""\nCHEAP = {"aten::t", "aten::view"}\nONE = "aten::mm"\nMM: dict = {aten.mm: 1}\n')
    assert list(lists(tree)) == ["CHEAP", "MM"]
