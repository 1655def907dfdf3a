"""Names that a reader knows from the model: of values inside a region, of templates."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Container

from torch import fx, nn

from csc.ir import graph as g

# An op that is what its module is about takes the module's name alone.
MAIN_OPS = frozenset({"linear", "conv1d", "conv2d", "conv3d", "embedding", "layer_norm", "rms_norm", "group_norm"})
SHORTER = {
    "scaled_dot_product_attention": "attention", "context_attention": "attention", "cross_entropy_loss": "loss",
    "linear_cross_entropy": "head", "divided_linear_cross_entropy": "head",
    "context_gather": "whole",
}  # fmt: skip
# What emitted files call by these names themselves: their modules, arguments, local variables and functions.
RESERVED = frozenset(
    {"torch", "aten", "layers", "tables", "under", "layer", "w", "STAGE"}
    | {"batch", "received", "sent", "weights", "constants", "saved", "kept", "gradients"}
    | {"forward", "backward_input", "backward_weight", "backward", "loss_tokens"}
    | {"float", "range", "reversed", "zip"}
)


def identifier(text: str) -> str:
    """A Python identifier that resembles `text`: no keyword, none of RESERVED. Foreign text becomes code only so."""
    cleaned = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "value"
    if cleaned[0].isdigit():
        cleaned = f"_{cleaned}"
    meant = keyword.iskeyword(cleaned) or keyword.issoftkeyword(cleaned) or cleaned in RESERVED
    return f"{cleaned}_" if meant else cleaned


def unique(wanted: str, taken: Container[str]) -> str:
    """`wanted`, or `wanted_1`, `wanted_2`, ... : the first that is not taken."""
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    return name


def snake(class_name: str) -> str:
    """`llama_decoder_layer` for LlamaDecoderLayer, `clip_encoder_layer` for CLIPEncoderLayer."""
    spaced = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", class_name)
    return identifier(re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", spaced).lower())


def value_name(node: fx.Node, module: str) -> str:
    """A name for the result of a call inside the region of `module`: `q_proj`, `self_attn_view`, `act_fn`."""
    op = _said(node)
    own = node.meta.get("module", "")
    relative = own.removeprefix(module).removeprefix(".") if own.startswith(module) else own
    words = [word for word in relative.split(".") if word and not word.isdigit()]
    last = words[-1] if words else ""
    if op in MAIN_OPS and own:
        return identifier(last or own.split(".")[-1])
    if last and _leaves_module(node, own):
        return identifier(last)
    return identifier(f"{last}_{op}" if last else op)


def _said(node: fx.Node) -> str:
    """What a call is called; the first item of a loss with its gradients is the loss."""
    maker = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
    if isinstance(maker, fx.Node) and g.op_name(maker) in g.HEADS:
        return "loss"
    return SHORTER.get(g.short_op(node), g.short_op(node))


def _leaves_module(node: fx.Node, own: str) -> bool:
    """True if the node's result is used outside the module that ran it: it is the module's output."""
    users = [user for user in node.users if user.op == "call_function"]
    return bool(users) and all(not _within(user.meta.get("module", ""), own) for user in users)


def _within(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def template_name(kind: str, path: str) -> str:
    """The class in snake case, or for PyTorch's own classes (Linear, Embedding) the attribute's name: `lm_head`."""
    last = path.split(".")[-1]
    generic = hasattr(nn, kind) and not last.isdigit()
    return identifier(last) if generic else snake(kind)
