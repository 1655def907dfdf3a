"""Models that another library has in its hands already.

refuse_wrapped(model)        InputError that says which model to pass
"""

from __future__ import annotations

import torch
from torch import nn

from csc.errors import InputError

WRAPPERS = ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")  # have .module
PARALLEL = "pass the model itself: the mesh says what is parallel, zero= what data-parallel ranks divide"


def refuse_wrapped(model: nn.Module) -> None:
    """InputError for a model whose parameters or calls are not its own any more."""
    name = type(model).__name__
    if "_orig_mod" in dict(model.named_children()):
        raise InputError(
            "the model is in torch.compile already, which names its parameters anew", "compile",
            "pass the model itself: csc compiles it",
        )  # fmt: skip
    if name in WRAPPERS:
        raise InputError(f"the model is in {name} already", "compile", f"{PARALLEL}; here it is model.module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError("the model is compiled by TorchScript already", "compile", "pass the model itself")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                "this module is compiled by TorchScript already",
                path,
                "put the module itself in the model's place for it",
            )
    for path, parameter in model.named_parameters():
        if type(parameter.data).__name__ == "DTensor":
            raise InputError(
                f"the parameter {path!r} is a DTensor: the model is divided over ranks already (fully_shard, "
                "parallelize_module)", "compile", PARALLEL,
            )  # fmt: skip
