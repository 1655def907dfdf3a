"""csc compiles the training step of a multimodal LLM into one readable Python program per rank.

    @csc.compile(mesh=csc.Mesh(pp=3), example=batch, freeze=["vision_tower"])
    def model(): return LlavaForConditionalGeneration(config)

Names are looked up on first use, so that an emitted program imports the runtime and not the compiler.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from csc import installation

__version__ = "0.1.0"
__all__ = [
    "CheckpointManager",
    "CompiledModel",
    "CscError",
    "DifferenceError",
    "FeatureCache",
    "InputError",
    "Mask",
    "Mesh",
    "Pass",
    "Program",
    "Survive",
    "attention",
    "balanced",
    "compile",
    "compose",
    "energy",
    "meta_init",
    "opaque",
    "pipeline",
    "search",
]  # fmt: skip

if TYPE_CHECKING:
    from csc.api import compile, pipeline
    from csc.balance.balanced import balanced
    from csc.cache.feature_entries import FeatureCache
    from csc.capture.trace.meta_init import meta_init
    from csc.composition import compose
    from csc.driver.checkpoint_manager import CheckpointManager
    from csc.driver.compiled import CompiledModel
    from csc.errors import CscError, DifferenceError, InputError
    from csc.ir.mesh import Mesh
    from csc.ir.program import Pass, Program
    from csc.kernels.attention import attention
    from csc.kernels.mask import Mask
    from csc.kernels.opaque import opaque
    from csc.model_search import search
    from csc.reports.energy_report import energy
    from csc.runtime.survival import Survive

__path__ += installation.top_folders(__path__[0])
installation.warn_of_untried()

_HOMES = {
    "balanced": "csc.balance.balanced",
    "FeatureCache": "csc.cache.feature_entries",
    "compile": "csc.api",
    "pipeline": "csc.api",
    "CheckpointManager": "csc.driver.checkpoint_manager",
    "CompiledModel": "csc.driver.compiled",
    "compose": "csc.composition",
    "energy": "csc.reports.energy_report",
    "Mesh": "csc.ir.mesh",
    "Survive": "csc.runtime.survival",
    "Pass": "csc.ir.program",
    "Program": "csc.ir.program",
    "attention": "csc.kernels.attention",
    "Mask": "csc.kernels.mask",
    "opaque": "csc.kernels.opaque",
    "search": "csc.model_search",
    "meta_init": "csc.capture.trace.meta_init",
    "CscError": "csc.errors",
    "DifferenceError": "csc.errors",
    "InputError": "csc.errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'csc' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
