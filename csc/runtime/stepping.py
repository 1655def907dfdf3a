"""Optimizers over what this process trains, which may be shards of parameters.

    make_optimizer(trainer, make, parameters, **options) -> torch.optim.Optimizer

Where ranks divide parameters (tp, zero), it is proven first that the optimizer works entry by entry. What is returned
is torch's own object: schedulers, groups and hooks are those of any optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from csc.errors import InputError
from csc.runtime import elementwise
from csc.runtime.trainer import Trainer

Make = Callable[..., torch.optim.Optimizer]


def make_optimizer(trainer: Trainer, make: Make, parameters: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
    """make: a class of torch.optim, or a function that takes parameters as one does. parameters: as torch.optim takes
    them. options: for `make`. InputError for an optimizer that does not work entry by entry where ranks divide
    parameters, and for parameters that are not those of this process.
    """
    manifest = trainer.program.manifest
    if not isinstance(make, type) and not callable(make):
        raise InputError(
            f"{type(make).__name__} makes no optimizer", "optimizer",
            "pass the class and its options: compiled.optimizer(torch.optim.AdamW, lr=1e-4)",
        )  # fmt: skip
    given = list(parameters)
    if manifest.zero or manifest.mesh.tp > 1:
        of_groups = [{k: v for k, v in one.items() if k != "params"} for one in given if isinstance(one, Mapping)]
        elementwise.check(_named(make, options), _different(of_groups) or [{}], trainer.device)
    made = make(given, **options)
    if trainer.own.data is not None:
        data = trainer.own.data
        _check_own(made, trainer)
        made.register_step_pre_hook(lambda *_: data.check_current())
        made.register_step_post_hook(lambda *_: data.stepped())
        made.register_load_state_dict_pre_hook(_check_state)
    return made


def _named(make: Make, options: Mapping[str, Any]) -> Make:
    made = partial(make, **options)
    made.__name__ = getattr(make, "__name__", type(make).__name__)  # type: ignore[attr-defined]
    return made


def _different(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for one in groups:
        if one not in found:
            found.append(one)
    return found


def _check_own(made: torch.optim.Optimizer, trainer: Trainer) -> None:
    """Whole parameters would be stepped by no gradient."""
    own = {id(one) for one in trainer.parameters()}
    for group in made.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in own and parameter.numel():
                raise InputError(
                    f"the optimizer was given a parameter of shape {list(parameter.shape)} that this process does not "
                    f"step: with zero={trainer.program.manifest.zero} a rank steps its shard of each",
                    "optimizer",
                    "take parameters from compiled.parameters() or compiled.named_parameters(), not from the model",
                )


def _check_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """A state of other shards would be loaded as it is, and broadcast by the next step."""
    saved = [number for group in state["param_groups"] for number in group["params"]]
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in zip(saved, own):
        for key, value in state["state"].get(number, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise InputError(
                    f"{key!r} of parameter {number} is {list(value.shape)} there, and this rank's shard "
                    f"{list(parameter.shape)}",
                    "load_state_dict",
                    "it is the state of another rank or mesh: save it with compiled.save(directory, optimizer=...), "
                    "which any mesh loads",
                )
