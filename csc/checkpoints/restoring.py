"""A checkpoint read again: everything that this process needs is checked first, then it is put in its place.

Terms: a process needs the parts that have entries in common with what its ranks hold, whatever mesh wrote them.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from csc.checkpoints import files
from csc.checkpoints.files import FILE, OLDER, StepIndex, Stored
from csc.errors import InputError
from csc.runtime import optimizer as optimizer_state
from csc.runtime.loaded_program import read_text, within
from csc.runtime.specs import Box, overlap, sizes, whole_box

NO_STEP = "Give the weights alone: load(only=['weights'])"


class Expected(NamedTuple):
    """Of a parameter or buffer of the model."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def check_model(index: StepIndex, expected: Mapping[str, Expected]) -> None:
    """All names, shapes and dtypes are those of the model."""
    where = str(index.folder / FILE)
    for name, wanted in expected.items():
        stored = index.parameters.get(name)
        if stored is None:
            close = difflib.get_close_matches(name, list(index.parameters), 3, 0.6)
            fault = f"parameter {name!r} is not in it" + (f"; close names there: {', '.join(close)}" if close else "")
            raise InputError(fault, where, _of_another(index))
        if stored.shape != wanted.shape:
            fault = f"parameter {name!r} has shape {list(stored.shape)} there, {list(wanted.shape)} in the model"
            raise InputError(fault, where, _of_another(index))
        if stored.dtype != str(wanted.dtype).removeprefix("torch."):
            fault = (
                f"parameter {name!r} is {stored.dtype} there, {str(wanted.dtype).removeprefix('torch.')} in the model"
            )
            raise InputError(fault, where, "Make the model in the dtype that it was trained in")
    more = [name for name in index.parameters if name not in expected]
    if more:
        raise InputError(f"it has {more[0]!r}, which the model does not have", where, _of_another(index))


def _of_another(index: StepIndex) -> str:
    return f"It is the checkpoint of a {index.about['model']}: make the model as it was made then"


def verify(index: StepIndex, needed: Iterable[tuple[str, Box]]) -> None:
    """InputError, with the file and the parameter, if a byte of what will be read is not what was saved."""
    for name, box in needed:
        stored = index.parameters[name]
        for part in stored.parts:
            if any(True for _ in overlap(box, part.box)):
                files.read_part(index.folder, part, stored.dtype, repr(name))


def damaged(index: StepIndex) -> Iterator[InputError]:
    """Of everything that was saved, what is not there any more as it was."""
    for name, stored in index.tensors():
        for part in stored.parts:
            try:
                files.read_part(index.folder, part, stored.dtype, name)
            except InputError as error:
                yield error
    for process in range(len(index.states)):
        try:
            state(index, process)
        except InputError as error:
            yield error


def fill(index: StepIndex, name: str, box: Box, target: torch.Tensor) -> None:
    """target: of the sizes of the box."""
    _fill(index, index.parameters[name], box, target, repr(name))


def whole(index: StepIndex, stored: Stored, what: str) -> torch.Tensor:
    """A tensor with all its entries. what: its name in sentences."""
    target = torch.empty(stored.shape, dtype=getattr(torch, stored.dtype))
    _fill(index, stored, whole_box(stored.shape), target, what)
    return target


def _fill(index: StepIndex, stored: Stored, box: Box, target: torch.Tensor, name: str) -> None:
    filled = 0
    for part in stored.parts:
        blocks = list(overlap(box, part.box))
        if not blocks:
            continue
        tensor = files.read_part(index.folder, part, stored.dtype, name)
        for here, source in blocks:
            target[here] = tensor[source].to(target.device)
            filled += tensor[source].numel()
    if filled != target.numel():
        raise InputError(f"{name} is not all there", str(index.folder / FILE), OLDER)


def optimizer(
    index: StepIndex, made: torch.optim.Optimizer, own: Sequence[optimizer_state.SteppedParameter]
) -> dict[str, Any]:
    """With the tensors of this process' entries."""

    def unfit(fault: str) -> InputError:
        remedy = "Make the optimizer as it was made for that save, or begin a new one: load(only=['weights'])"
        return InputError(fault, str(index.folder / FILE), remedy)

    def assemble(parameter: optimizer_state.SteppedParameter, key: str, stored: Stored) -> torch.Tensor:
        if stored.shape != parameter.spec.shape:
            optimizer_state.check_whole(parameter, key, stored.shape, unfit)
            return whole(index, stored, f"{key!r} of {parameter.name!r}").to(parameter.parameter.device)
        target = torch.empty(sizes(parameter.box), dtype=getattr(torch, stored.dtype))
        _fill(index, stored, parameter.box, target, f"{key!r} of {parameter.name!r}")
        return target.to(parameter.parameter.device)

    table = index.optimizer
    if table is None:
        raise InputError("it has no state of an optimizer", str(index.folder), NO_STEP)
    optimizer_state.fits(table, made, unfit)
    return optimizer_state.restored(table, made, own, assemble, unfit)


def state(index: StepIndex, process: int) -> dict[str, Any]:
    """What a process, counted around if there were fewer, has written of what is no tensor of the model."""
    state_row = index.states[process % len(index.states)]

    def fail(fault: str) -> InputError:
        return InputError(fault, str(index.folder / state_row["file"]), OLDER)

    text = read_text(within(index.folder, state_row["file"], fail), fail)
    if hashlib.sha256(text.encode()).hexdigest() != state_row["sha256"]:
        raise fail("its bytes are not those that were saved")
    return dict(json.loads(text))
