"""torch.export of the whole model, returning only the loss.

The step traced is `loss = model(**batch).loss` in training mode, with the sequence dimensions symbolic.
"""

from __future__ import annotations

import io
import keyword
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from csc.capture.batch import NOTHING_TOLD, dynamic_dimensions, sample_axis, symbolic_dimensions
from csc.capture.dedup.layers import CannotRepeat, Layers, NotHidden
from csc.capture.diagnostics import untraceable
from csc.capture.trace.mutations import Changes, Slot
from csc.capture.trace.symbolic_lengths import symbolic_lengths
from csc.capture.trace.traced_model import HoistedCalls, HostFunctionFound, LossOnly
from csc.capture.trace.training_mode import as_traced
from csc.errors import CscError, InputError
from csc.ir.capture_guards import Call, Decision
from csc.torch_private.hooks import no_new_registration_hooks
from csc.torch_private.symbolic_sizes import conditions_of_models, one_is_no_special_size


@dataclass(frozen=True)
class Exported:
    """deciding: the batch entries whose values the program was traced for; host: what is known to run there now;
    calls: what the model called; asked: conditions on sizes that its code made, as sympy relations, None: not known;
    gradients: the line that asked autograd for some; asked_flags: the first that asked whether a tensor needs any;
    transformed: the first within a function that torch.func transforms;
    changes: what the model wrote to itself; written_beside: and beside it; undecided: whether it asked of the batch
    alone what was not answered; decisions: what was.
    """

    program: torch.export.ExportedProgram
    deciding: frozenset[str]
    host: HoistedCalls
    calls: tuple[Call, ...]
    asked: tuple[Any, ...] | None
    gradients: str
    asked_flags: str
    transformed: str
    changes: Changes
    written_beside: frozenset[Slot]
    undecided: bool
    decisions: tuple[Decision, ...]


class Undecided(Exception):
    """Ends a trace that asked of its batch alone what was not answered: with answers it may go on."""


def _check_names(model: nn.Module, entries: Iterable[str]) -> None:
    """Refuse names that would not stay names: torch.export writes them, as they are, into code that it executes."""
    named = (model.named_modules, model.named_parameters, model.named_buffers)
    parts = (part for names in named for path, _ in names(remove_duplicate=False) for part in path.split("."))
    named_parts = ((part, "a module, parameter or buffer") for part in parts)
    for name, what in chain(named_parts, ((entry, "a batch entry") for entry in entries)):
        if re.search(r"[\"'\\]", name) or not name.isprintable() or keyword.iskeyword(name):
            raise InputError(
                f"{what} is called {name!r}, which torch.export would take for code",
                type(model).__name__,
                "rename it: no quotes, backslashes, line breaks or Python keywords",
            )


def export(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    host: HoistedCalls,
    layers: Layers | None = None,
    rows: bool = False,
    decides: bool = False,
    axes: Mapping[str, int] = NOTHING_TOLD,
) -> Exported:
    """Export the training step of the model on an example microbatch, with these functions run on the host, and equal
    ones of these layers traced once (see csc.capture.dedup.layers). rows: the microbatch has numbers of rows (see
    csc.capture.values.row_index). decides: what is asked of the batch alone is answered, and the program is for these
    answers. axes: along which dimension samples lie, where it is told.

    Raises CscError with the user's source line; HostFunctionFound, NotHidden, CannotRepeat or Undecided if it
    has to be done again.
    """
    layers = Layers.of(model, ()) if layers is None else layers
    _check_names(model, tensors)
    # Export takes one tensor under two names (labels=input_ids) for one input, also in later batches where they differ.
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def wrap() -> LossOnly:
        return LossOnly(model, extra, host, tensors, layers, rows, decides=decides)

    with symbolic_lengths(model) as asked:
        try:
            return _attempts(tensors, wrap, layers, axes)
        except CscError:
            if not asked():
                raise
    return _attempts(tensors, wrap, layers, axes)  # the model's code may need a plain number


def _attempts(
    tensors: Mapping[str, torch.Tensor], wrap: Callable[[], LossOnly], layers: Layers, axes: Mapping[str, int]
) -> Exported:
    """With numbers of samples symbolic; else with those at hand."""
    for symbolic, ones in ((symbolic_dimensions, True), (symbolic_dimensions, False), (dynamic_dimensions, True)):
        wrapped = wrap()
        try:
            exported = _exported(wrapped, tensors, partial(_along, symbolic, tensors, axes), layers, ones)
            wrapped.refuse_changing()
            return exported
        except (HostFunctionFound, NotHidden, CannotRepeat):
            raise
        except CscError as error:
            if wrapped.watching.undecided:
                raise Undecided from error
            raise
        except Exception as error:  # some code cannot do with a symbolic number of samples; then with the one at hand
            if layers.hidden:  # perhaps it fails for something that was hidden from it
                raise NotHidden(layers.hidden) from error
            autograd = wrapped.autograd
            failed = untraceable(error, wrapped.watching.asked_last, autograd.gradients, autograd.transformed)
            failed.__cause__ = error
            if wrapped.watching.undecided:
                raise Undecided from failed
    raise failed


def _along(
    symbolic: Callable[[torch.Tensor, int], tuple[int, ...]],
    tensors: Mapping[str, torch.Tensor],
    axes: Mapping[str, int],
    name: str,
) -> tuple[int, ...]:
    return symbolic(tensors[name], sample_axis(name, tensors, axes))


def _exported(
    wrapped: LossOnly,
    tensors: Mapping[str, torch.Tensor],
    symbolic: Callable[[str], tuple[int, ...]],
    layers: Layers,
    ones: bool,
) -> Exported:
    """ones: whether sizes may turn out to be 1, which not every operation takes without values."""
    automatic = torch.export.Dim.AUTO
    shapes = {name: dict.fromkeys(symbolic(name), automatic) or None for name in tensors}
    model = wrapped.model
    said = io.StringIO()  # when torch gives up it prints the half-traced graph, which helps nobody
    asked: list[Any] = []
    with (
        as_traced(model, layers),
        no_new_registration_hooks(),
        one_is_no_special_size(ones),
        conditions_of_models(lambda condition, sizes: asked.append(condition)),
        warnings.catch_warnings(),
        redirect_stderr(said),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, about its own pytree classes
        warnings.filterwarnings("ignore", "The tensor attribute", UserWarning)  # see attributes_kept
        exported = torch.export.export(
            wrapped,
            (dict(tensors),),
            dynamic_shapes=(shapes,),
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )
    sys.stderr.write(said.getvalue())
    calls = wrapped.recording.needed(wrapped.loss)
    deciding = frozenset(wrapped.watching.deciding)
    return Exported(
        exported,
        deciding,
        wrapped.host,
        calls,
        tuple(asked) if ones else None,
        wrapped.autograd.gradients,
        wrapped.autograd.flags,
        wrapped.autograd.transformed,
        wrapped.changes,
        wrapped.written_beside,
        wrapped.watching.undecided,
        tuple(wrapped.watching.alone.decisions),
    )
