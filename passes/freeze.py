"""Pass `freeze`: which parameters train."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import ClassVar

from csc.errors import InputError
from csc.ir.program import ModuleInfo, Options, Parameter, Pass, Program


@dataclass(frozen=True)
class FreezePass(Pass):
    """Mark the parameters that `options.freeze` names as frozen.

    Ensures   every parameter says whether it trains; at least one does, with `options.forward_only` none; every pattern
              matched at least one.
    Before    freeze=("vision_tower",)
    After     model.vision_tower.*: frozen; every other parameter: as its requires_grad says
    """

    requires: ClassVar = ("differentiated",)
    establishes: ClassVar = ("frozen",)

    freeze: tuple[str, ...] | None = None

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        if options.forward_only:
            return replace(program, parameters=tuple(replace(p, trainable=False) for p in program.parameters))
        frozen: set[str] = set()
        for pattern in options.freeze or ():
            matched = {p.name for p in program.parameters if matches(pattern, p, program.modules)}
            if not matched:
                raise InputError(
                    f"the pattern {pattern!r} matches no parameter of {program.name}",
                    "freeze",
                    _suggestion(pattern, program),
                )
            frozen |= matched
        parameters = tuple(
            replace(
                p, trainable=p.trainable and (p.dtype.is_floating_point or p.dtype.is_complex) and p.name not in frozen
            )
            for p in program.parameters
        )
        if not any(p.trainable for p in parameters):
            raise InputError(
                f"nothing is left to train: all {len(parameters)} parameters of {program.name} are frozen",
                "freeze",
                "freeze fewer components, or set requires_grad on the parameters that should train",
            )
        _check_checkpoints(program, {p.name for p in parameters if p.trainable})
        _check_flags(program, {p.name for p in parameters if not p.trainable})
        return replace(program, parameters=parameters)


def _check_checkpoints(program: Program, trainable: Set[str]) -> None:
    """What trains in a reentrant checkpoint gets a gradient in eager mode only if one of its inputs does."""
    for checkpoint in program.checkpoints:
        lost = sorted(trainable & set(checkpoint.inside))
        if lost and not checkpoint.anyway and trainable.isdisjoint(checkpoint.before):
            raise InputError(
                f"a reentrant checkpoint is given nothing that needs a gradient, so that eager PyTorch gives none to "
                f"{lost[0]!r} inside it",
                checkpoint.where,
                "checkpoint with use_reentrant=False, or call model.enable_input_require_grads()",
            )


def _check_flags(program: Program, frozen: Set[str]) -> None:
    """A forward that asks for requires_grad is another graph for another frozen set, and is asked with the model's."""
    flags = program.guards.flags if program.guards is not None else None
    miss = flags.miss(frozen) if flags is not None else None
    if flags is not None and miss is not None:
        raise InputError(
            f"the model's forward asks whether a tensor requires a gradient, and freeze= changes the answer: {miss}",
            flags.where,
            "leave freeze= out, and call requires_grad_(False) on those parameters before csc.compile or between steps",
        )


def matches(pattern: str, parameter: Parameter, modules: Mapping[str, ModuleInfo]) -> bool:
    """True if a component name, a dotted part of a name, or a glob pattern covers the parameter (or an alias)."""
    names = (parameter.name, *parameter.aliases)
    if re.search(r"[*?\[]", pattern):
        return any(fnmatchcase(name, pattern) for name in names)
    return any(f".{pattern}." in f".{name}." or component_of(name, modules) == pattern for name in names)


def component_of(name: str, modules: Mapping[str, ModuleInfo]) -> str:
    """The component of the module that owns a parameter."""
    path = name.rpartition(".")[0]
    known = modules.get(path)
    return known.component if known else ""


def _suggestion(pattern: str, program: Program) -> str:
    components = sorted({component_of(p.name, program.modules) for p in program.parameters})
    names = components + [p.name for p in program.parameters]
    close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    return f"{hint}components are {', '.join(components)}; globs such as '*.bias' match parameter names"
