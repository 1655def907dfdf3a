"""A compiled model of what a user gives: nothing is compiled yet.

compiled_model(model, options, example) -> CompiledModel
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from csc.cache.feature_entries import FeatureCache
from csc.check.when import checks
from csc.driver.compiled import CompiledModel
from csc.driver.compiler import Compiler
from csc.driver.dividing import Divide, Dividing
from csc.driver.given_batches import Example, GivenBatches
from csc.driver.model_programs import Factory, ModelPrograms, Settings
from csc.ir.program import Options


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
    features: FeatureCache | None = None,
) -> CompiledModel:
    """As `csc.compile` takes them. compiler: of the model, if there is one already."""
    programs = ModelPrograms(model, Settings(cache, checks(check), timeout, features), directory, compiler)
    return CompiledModel(programs, GivenBatches(example, Dividing(divide), programs), options)
