"""What a model's code does with another batch: whether that is what a trace has, and which rows it moves where.

Some models decide by sizes of images how they lay out features. A trace holds for all batches with which their code
makes the same calls (see csc.capture.values.batch_alone). To know that, the code is run once more, on tensors without
data and with the values that it decides by: milliseconds where a trace takes seconds. Guards compare its calls with
those of each capture (csc.ir.capture_guards).
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from csc.capture.batch import device_of
from csc.capture.dedup.layers import Layers, NotHidden
from csc.capture.module_tree import describe
from csc.capture.quantised_weights import stand_ins
from csc.capture.trace.export import as_traced
from csc.capture.trace.traced_model import HoistedCalls, LossOnly, metadata
from csc.capture.values.row_index import PREFIX
from csc.ir.capture_guards import Call, Decision
from csc.torch_private.traces import replaying

log = logging.getLogger("csc")

LATEST = 256  # replays kept


@dataclass(frozen=True)
class Replay:
    """calls: what the model called; rows: numbers of rows that it moved, by names of batch entries; decisions: what it
    asked of its batch alone.
    """

    calls: tuple[Call, ...]
    rows: Mapping[str, torch.Tensor]
    decisions: tuple[Decision, ...] = ()

    def holds(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Whether the code does the same with a batch of these sizes and values, its tokens aside."""
        return all(decision.holds(tensors) for decision in self.decisions)


def replay(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    host: HoistedCalls,
    layers: Layers,
    rows: bool,
    decides: bool = False,
) -> Replay | None:
    """The model's code on a completed microbatch. rows: with numbers of rows; decides: with answers about the batch
    alone. None if it does not run on tensors that
    have no data. Raises NotHidden if it has to be done again.
    """
    device = device_of(model)
    entries = {name: tensor for name, tensor in tensors.items() if not name.startswith(PREFIX)}
    wrapped = LossOnly(model, extra, host, entries, layers, rows, replayed=True, decides=decides)
    try:
        with stand_ins(model), as_traced(model, layers), warnings.catch_warnings(), replaying() as fake:
            warnings.simplefilter("ignore")
            loss = wrapped({name: fake(tensor).to(device) for name, tensor in entries.items()})
    except NotHidden:
        raise
    except Exception as reason:  # whatever model code raises on tensors without data
        log.info("the model's code does not run without data: %s: %s", type(reason).__name__, reason)
        return None
    return Replay(wrapped.recording.needed(loss), wrapped.made, tuple(wrapped.watching.alone.decisions))


class LatestReplays:
    """The latest replays of one model."""

    def __init__(self) -> None:
        self._layers: Layers | None = None
        self._known: OrderedDict[Any, list[Replay | None]] = OrderedDict()

    def of(
        self,
        model: nn.Module,
        tensors: Mapping[str, torch.Tensor],
        extra: Mapping[str, Any],
        host: HoistedCalls,
        rows: bool,
        decides: bool = False,
    ) -> Replay | None:
        """What `replay` gives; at once if it has been asked for a batch of these sizes and values lately."""
        if self._layers is None:
            paths = [path for path, info in describe(model).items() if info.role == "layer"]
            self._layers = Layers.of(model, paths)
        values = metadata(tensors, host)
        key = (
            tuple((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()),
            repr({name: tensor.tolist() for name, tensor in values.items()}),
            repr(extra), host.calls, rows, decides,
        )  # fmt: skip
        several = self._known.setdefault(key, [])
        self._known.move_to_end(key)
        if len(self._known) > LATEST:
            self._known.popitem(last=False)
        for one in several:
            if one is None or one.holds(tensors):
                return one
        while True:
            try:
                several.append(replay(model, tensors, extra, host, self._layers, rows, decides))
                return several[-1]
            except NotHidden as needed:
                self._layers = self._layers.without_hidden(needed.paths)
