"""Errors for models that cannot be traced: what the model did, at which line, and where csc itself failed."""

from __future__ import annotations

import inspect
import os
import re
import traceback

from torch import nn

from csc.errors import CscError, InputError, is_of_libraries, raised_in_csc, user_line
from csc.torch_private.symbolic_sizes import GuardOnDataDependentSymNode

# What torch.export says when a parameter's `.data`, or a tensor from elsewhere, was written to. With three dimensions
# a linear map of torch's gives a view of what it has made within itself, which is such a tensor.
CONSTANT = r"fake tensor in the exported program constant's list.*model attribute: model((?:\.\w+)*?)\.lifted_tensor"

STALE = "attempting to assign a gradient"
UNHASHABLE = "unhashable type: non-nested SymInt"
WRAPPED = ("storage of TensorWrapper", "functorch tensor")  # tensors within a function that torch.func transforms
TURNS = "which is traced turn by turn"
# Operators that take functions, by their files in torch: what models call them, and what to write in their place.
HIGHER_ORDER = {
    "cond": (
        "torch.cond",
        "compute both sides and choose with torch.where; or write `if` where the batch alone decides, which is a "
        "capture for each answer",
    ),
    "while_loop": (
        "while_loop",
        f"write a loop in Python whose number of turns the batch's sizes or plain values give, {TURNS}",
    ),
    "scan": ("scan", "write the loop in Python, or with torch.cumsum and its like"),
    "associative_scan": ("associative_scan", f"write the loop in Python, {TURNS}"),
    "map": ("map", f"call the function on the whole tensor, or write the loop in Python, {TURNS}"),
}
TRANSFORMS = os.path.join("_functorch", "eager_transforms.py")
TRACED_TRANSFORMS = os.path.join("_functorch", "predispatch.py")  # of vmap too, which can be traced


def untraceable(
    error: Exception,
    model: nn.Module,
    asked: frozenset[str] = frozenset(),
    gradients: str = "",
    transformed: str = "",
) -> CscError:
    """The sentence for a model that export cannot trace: the cause, the user's line, the remedy. Where csc's own code
    raised the error, the sentence says so.

    asked: the batch entries whose values the model asked for last. gradients: the line that asked autograd for some.
    transformed: the first line that ran within a function that torch.func transforms.
    """
    root = _root_cause(error)
    where = _traced_line(error) or user_line(error)
    first = str(root).strip().splitlines()[0] if str(root).strip() else type(root).__name__
    asks = ("data-dependent", "cannot cast faketensor")
    if isinstance(root, GuardOnDataDependentSymNode) or any(words in str(root).lower() for words in asks):
        entries = f", computed from {', '.join(sorted(asked))}" if asked else ""
        return InputError(
            f"the model takes a Python decision that depends on the values of a tensor{entries} ({first})",
            where,
            "replace the branch by torch.where or masking; or compute its condition in the data loader and pass it as "
            "a plain Python value in the batch; or keep the module out of the trace with csc.opaque(module)",
        )
    changed = re.search(CONSTANT, str(root))
    if changed is not None:
        return _changes(where or changed[1].lstrip(".") or "model", gradients)
    if (of_higher_order := _higher_order(error)) is not None:
        called, remedy = of_higher_order
        return InputError(
            f"the model calls {called}, an operator on functions, which csc does not take apart", where, remedy
        )
    within = traceback.extract_tb(root.__traceback__)
    if any(words in str(root) for words in WRAPPED) or any(map(_differentiates, within)):
        return InputError(
            "the model differentiates a function in its forward (torch.func.grad, vjp, jvp, jacrev), which cannot be "
            "traced",
            where or user_line(root) or transformed,
            "ask torch.autograd.grad for that gradient, write it with tensor operations, or keep the module out of the "
            "trace with csc.opaque(module)",
        )
    if STALE in str(root):
        return InputError(
            f"a parameter's .grad is not of the parameter's size or dtype any more ({first})", "model",
            "it was left by a step before the parameter changed (resize_token_embeddings, .to): call "
            "model.zero_grad(set_to_none=True) behind the change",
        )  # fmt: skip
    if UNHASHABLE in str(root):
        return InputError(
            "the model looks up a size of its batch by its hash (functools.lru_cache, a key of a dict), and in a trace "
            "a size stands for any number",
            where,
            "call the function behind the cache (function.__wrapped__); or make the table for the longest length once, "
            "in __init__, and take a part of it",
        )
    return _of_csc(root, first, where or _forward_line(model)) or InputError(
        f"the model cannot be traced: {type(root).__name__}: {first}",
        where or _forward_line(model),
        "run model(**batch) in eager mode first; if that works, make the named line traceable by torch.export",
    )


def _of_csc(root: BaseException, first: str, where: str) -> CscError | None:
    """The sentence for an error that csc's own code raised; None for any other. first: its first line."""
    place = raised_in_csc(root)
    if not place:
        return None
    return CscError(
        f"csc itself failed while it traced the model, at {place}: {type(root).__name__}: {first}",
        where,
        "This is a fault of csc, not of the model: please report it with the named line of the model, the whole "
        "traceback (CSC_DEBUG=1 prints it) and the versions of torch and csc. Until it is mended, "
        "csc.opaque(module) keeps the module of that line out of the trace",
    )


def _forward_line(model: nn.Module) -> str:
    """`file:line: code` where a model's forward begins; its class's name if that is in no file."""
    forward = inspect.unwrap(type(model).forward)
    try:
        code, line = inspect.getsourcelines(forward)
    except (OSError, TypeError):
        return type(model).__name__
    return f"{inspect.getsourcefile(forward)}:{line}: {code[0].strip()}"


def _changes(where: str, gradients: str) -> InputError:
    """What was taken for a constant is another one at the end of the trace. gradients: as in `untraceable`."""
    if gradients:
        return InputError(
            "the model asks for gradients in its forward (torch.autograd.grad), of an operation that keeps more for "
            "them than its arguments",
            gradients,
            "write that gradient with tensor operations, in a torch.autograd.Function, or keep the module out of the "
            "trace with csc.opaque(module)",
        )
    return InputError(
        "the model changes a parameter while it runs, or a part of what a linear map gave (y[:, 0] = ...)",
        where,
        "leave its forward without side effects: clamp or normalise the parameter itself where it is used "
        "(weight.clamp(...), not weight.data.clamp_(...)), or change it after the optimizer's step; write to a "
        "copy of the linear map's result (y = linear(x).clone())",
    )


def _higher_order(error: BaseException) -> tuple[str, str] | None:
    """What a call of an operator on functions, such as torch.cond, is called, and what to write in its place."""
    last: BaseException | None = error
    while last is not None:
        for frame in traceback.extract_tb(last.__traceback__):
            folder, file = os.path.split(frame.filename)
            known = HIGHER_ORDER.get(file.removesuffix(".py"))
            if known is not None and os.path.basename(folder) == "_higher_order_ops":
                return known
        last = last.__cause__ or last.__context__
    return None


def _differentiates(frame: traceback.FrameSummary) -> bool:
    """Whether it is torch's own within torch.func.grad, jvp and their like."""
    traced = TRACED_TRANSFORMS in frame.filename and ("grad" in frame.name or "jvp" in frame.name)
    return traced or TRANSFORMS in frame.filename


def _traced_line(error: BaseException) -> str:
    """`file:line` out of the traceback that fx prints for a node ("Original traceback"); "" if there is none."""
    frames = re.findall(r'File "([^"\n]+)", line (\d+)', str(error).partition("Original traceback:")[2])
    outside = [f"{file}:{line}" for file, line in frames if not is_of_libraries(file)]
    return outside[-1] if outside else ""


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
