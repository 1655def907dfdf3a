"""A compiled model of what a user gives: nothing is compiled yet, but for a mesh that csc is to choose."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from csc.cache.feature_entries import FeatureCache
from csc.check.compiling import checks
from csc.driver.batches import Divide, Dividing, Widths
from csc.driver.compiled import CompiledModel
from csc.driver.compiler import Compiler
from csc.driver.features import FeaturesAhead, KeptFeatures
from csc.driver.mesh_choice import with_chosen_mesh
from csc.driver.model_programs import Example, Factory, GivenBatches, ModelPrograms, Settings
from csc.driver.options import of_fewer, refuse_beside_survive, shown
from csc.driver.programs import MadeFeatures
from csc.errors import InputError
from csc.ir.program import Options
from csc.runtime.survival import Survive
from csc.runtime.survival import check as check_mesh


def compiled_model(
    model: nn.Module | Factory,
    options: Options,
    example: Example | Callable[[], Example] | None,
    directory: Path | None = None,
    compiler: Compiler | None = None,
    cache: bool = True,
    check: bool | int | None = None,
    timeout: float = 600.0,
    divide: Divide | None = None,
    features: MadeFeatures | None = None,
    widths: Any = None,
    survive: int | Survive | None = None,
) -> CompiledModel:
    """As `csc.compile` takes them. compiler: of the model, if there is one already. InputError for what it does not."""
    _refuse(model, cache, timeout)
    dividing = Dividing(divide)
    settings = Settings(cache, checks(check), timeout, features, dividing.axes, _survived(survive))
    programs = ModelPrograms(model, settings, directory, compiler)
    batches = GivenBatches(example, dividing, programs, Widths.of(widths))
    if settings.survive is not None:
        refuse_beside_survive(options, features is not None, settings.survive.mirror)
    if options.mesh.is_open:
        options = with_chosen_mesh(programs, batches, options)
    if settings.survive is not None:
        check_mesh(options.mesh, settings.survive, options.zero)
        if settings.survive.mirror:
            of_fewer(options)
    return CompiledModel(programs, batches, options)


def made_features(kept: str | Path | FeatureCache | None, ahead: bool) -> MadeFeatures | None:
    """How features of frozen encoders come before a step, as `csc.compile` is told: from disk, from the step before, or
    not at all.
    """
    if not isinstance(ahead, bool):
        raise InputError(f"encode_ahead is {shown(ahead)}", "compile", "pass True or False")
    if ahead and kept is not None:
        raise InputError(
            "features cannot both be kept on disk and be made ahead", "compile",
            "use cache_features where the same images come again, else encode_ahead",
        )  # fmt: skip
    if ahead:
        return lambda _: FeaturesAhead()
    if kept is None:
        return None
    return partial(KeptFeatures, kept if isinstance(kept, FeatureCache) else FeatureCache(kept))


def _survived(survive: object) -> Survive | None:
    """What ranks may be lost; None: none. InputError for what says nothing of that."""
    if survive is None:
        return None
    found = survive if isinstance(survive, Survive) else Survive(survive)  # type: ignore[arg-type]
    return found if found.failures else None


def _refuse(model: object, cache: object, timeout: object) -> None:
    """InputError for what can be none of these."""
    if isinstance(model, CompiledModel):
        raise InputError(
            "the model is compiled already", "compile",
            "compiled.with_options(...) compiles it in another way; the model itself is compiled.model",
        )  # fmt: skip
    if not callable(model):
        raise InputError(f"the model is {shown(model)}", "compile", "pass an nn.Module, or a function that makes one")
    if not isinstance(cache, bool):
        raise InputError(
            f"cache is {shown(cache)}", "compile",
            "pass True or False; where programs are kept is said by the environment, in CSC_CACHE_DIR",
        )  # fmt: skip
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise InputError(f"timeout is {shown(timeout)}", "compile", "pass a number of seconds above 0, such as 600")
