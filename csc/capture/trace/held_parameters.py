"""Parameters that a module holds beside the ones it has registered.

`nn.LSTM` computes with a list of its parameters, and a user's module may have one. A tracer puts what it traces in the
place of registered parameters alone: the list would be read as constants, and nothing in it trained.

    held = Held(model)                  which list, at which place, holds which parameter
    held.put(named)                     in a trace: what stands for the parameters, by name, in their place
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


class Held:
    """Places in the lists and dicts that modules of a model have as attributes. Whoever calls `put` brings them back
    as they were (csc.capture.trace.mutations).
    """

    def __init__(self, model: nn.Module) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._places: list[tuple[list[Any] | dict[Any, Any], Any, str]] = []
        for module in model.modules():
            for attribute, held in vars(module).items():
                if not attribute.startswith("_parameters") and type(held) in (list, dict):
                    for place, one in enumerate(held) if isinstance(held, list) else held.items():
                        if isinstance(one, nn.Parameter) and id(one) in names:
                            self._places.append((held, place, names[id(one)]))

    def put(self, named: Mapping[str, torch.Tensor]) -> None:
        """Put what is called by a parameter's name wherever that parameter is held."""
        for held, place, name in self._places:
            if name in named:  # not hidden from the trace
                held[place] = named[name]
