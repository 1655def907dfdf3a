"""PyTorch's own tracers on the same model: what each needs to arrive at its graph. All sizes are fixed for them.

    RIVALS = {name: trace};  trace(model, batch) -> None

The model's check that placeholders fit its images reads values, which only export can leave to run time; it is taken
out for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors
from torch.distributed.pipelining import SplitPoint, pipeline
from transformers.models.llava import modeling_llava

from csc.capture.capture import standing_in

Batch = Mapping[str, torch.Tensor]


class Loss(nn.Module):
    """The model's loss alone, of a batch as one argument."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor]:
        return (self.model(**batch, use_cache=False).loss,)


@contextmanager
def traceable(model: nn.Module) -> Iterator[nn.Module]:
    """The model as Loss, with fake parameters and without the check."""
    check = modeling_llava.torch_compilable_check
    modeling_llava.torch_compilable_check = lambda *args, **kwargs: None
    try:
        with standing_in(model, torch.device("cpu")):
            yield Loss(model)
    finally:
        modeling_llava.torch_compilable_check = check


def export(model: nn.Module, batch: Batch) -> None:
    """torch.export alone, non-strict, no decompositions."""
    with traceable(model) as loss:
        torch.export.export(loss, (dict(batch),), strict=False)


def joint(model: nn.Module, batch: Batch) -> None:
    """Forward and backward of the whole model in one graph."""
    with traceable(model) as loss, ExitStack() as stack:
        given = _all_fake(loss, batch)
        with _mode(loss):
            exported = torch.export.export(loss, (given,), strict=False).module()
            aot_export_joint_with_descriptors(stack, exported, (given,))


def compiled(model: nn.Module, batch: Batch) -> None:
    """torch.compile: dynamo and AOTAutograd, no code generation; forward and backward once, on fake tensors."""
    with traceable(model) as loss:
        given = _all_fake(loss, batch)
        with _mode(loss):
            (result,) = torch.compile(loss, backend="aot_eager")(given)
            result.backward()


def stages(model: nn.Module, batch: Batch) -> None:
    """torch.distributed.pipelining: an export, split at hand-picked layers into 16 stages, or as many as layers."""
    layers = len(model.model.language_model.layers)  # type: ignore[union-attr, arg-type]
    count = min(16, layers)
    cuts = {layers * place // count for place in range(1, count)}
    path = "model.model.language_model.layers"
    with traceable(model) as loss:
        pipeline(loss, (dict(batch),), split_spec={f"{path}.{cut}": SplitPoint.BEGINNING for cut in sorted(cuts)})


def _mode(loss: nn.Module) -> Any:
    return next(loss.parameters()).fake_mode  # type: ignore[attr-defined]


def _all_fake(loss: nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
    """The batch in the parameters' fake mode, and the buffers too."""
    mode = _mode(loss)
    for module in loss.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)
    return {name: mode.from_tensor(tensor) for name, tensor in batch.items()}


RIVALS: dict[str, Callable[[nn.Module, Batch], None]] = {
    "torch.export": export,
    "aot_export_joint": joint,
    "torch.compile aot_eager": compiled,
    "torch pipelining": stages,
}
