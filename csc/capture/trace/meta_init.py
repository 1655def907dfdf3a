"""Models without weights: 70 billion parameters that take no memory.

Terms
  meta_init   a model whose parameters are on the meta device: names, shapes and dtypes. Its buffers are real, since
               what they hold is part of the program (position tables).

    meta_init()                        context: modules made in it have no weights
    with_weights(model, what)           the model, or an InputError
    standing_in(model, device)          context: the parameters are fake tensors of a real device, for a trace
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from csc.errors import InputError
from csc.torch_private.traces import FakeTensor, FakeTensorMode

META = torch.device("meta")


@contextmanager
def meta_init() -> Iterator[None]:
    """A context in which modules get their parameters on the meta device, without values; buffers keep theirs.

        with csc.meta_init():
            model = LlavaForConditionalGeneration(config)

    Such a model is compiled, planned and simulated as any other. It trains once weights have been loaded into the
    compiled model. `torch.device("meta")` would leave buffers without values, too.
    """
    register = nn.Module.register_parameter
    parameters = WeakIdKeyDictionary()  # by the parameter with data, which may be set in several places

    def without_data(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None and param.device != META:
            if param not in parameters:
                parameters[param] = nn.Parameter(param.detach().to(META), requires_grad=param.requires_grad)
                parameters[param].__dict__.update(param.__dict__)
            self._parameters[name] = parameters[param]

    nn.Module.register_parameter = without_data  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def with_weights(model: nn.Module, what: str) -> nn.Module:
    """The model. InputError if it has no weights, which `what` needs."""
    for name, parameter in model.named_parameters():
        if parameter.device == META:
            raise InputError(
                f"{name!r} has no data, and {what} runs the model",
                type(model).__name__,
                "make the model with its weights (without --fake, outside of csc.meta_init())",
            )
    return model


@contextmanager
def standing_in(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Parameters on the meta device are fake tensors of another one, tied ones still one. PyTorch's own meta device
    cannot be traced: some losses have no gradient there. InputError for a buffer without values.
    """
    for name, buffer in model.named_buffers():
        if buffer.device == META:
            raise InputError(
                f"the buffer {name!r} is on the meta device, and its values are part of the program",
                type(model).__name__,
                "make the model inside `with csc.meta_init():`, which leaves out parameters alone",
            )
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    stand_ins_by_id: dict[int, nn.Parameter] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.device == META:
                    if id(parameter) not in stand_ins_by_id:
                        fake = FakeTensor(mode, parameter.detach(), device)
                        stand_ins_by_id[id(parameter)] = nn.Parameter(fake, requires_grad=parameter.requires_grad)
                    replaced.append((module, name, parameter))
        for module, name, parameter in replaced:
            module._parameters[name] = stand_ins_by_id[id(parameter)]
        yield
    finally:
        for module, name, parameter in replaced:
            module._parameters[name] = parameter
