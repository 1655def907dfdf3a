"""From a shallow copy of a model to the whole: equal layers make equal regions, so one that is there stands for many.

Terms
  stack     the layers of one component: regions of kind "layer", one behind the other, each reading the one before it
  captured  the stack of the shallow copy: a first layer, the `period` layers that repeat, and the others to the last

    expand(program, stacks) -> Program      stacks: component -> Stack(layers, period)

The Program must have passed `differentiate`. Its regions, parameters and modules become those of the deep model; its
templates are shared, and its whole-model graph stays that of the shallow copy. The passes from `freeze` to `split` and
the costs read the former only, so they work on the result as on a capture at full depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from csc.errors import InputError
from csc.ir.program import Program, Region

Item = TypeVar("Item")
REMEDY = "capture this model at full depth"


@dataclass(frozen=True)
class Stack:
    """layers: how many the whole model has; period: after how many they repeat."""

    layers: int
    period: int = 1


@dataclass(frozen=True)
class _Layers:
    """The layers of one stack. path: of their module list; sources[i]: the captured layer that layer i is a copy of."""

    path: str
    captured: int
    sources: tuple[int, ...]

    def layer_of(self, name: str) -> int | None:
        """The layer that a module, parameter or value belongs to; None if it is outside the stack."""
        if not name.startswith(f"{self.path}."):
            return None
        return int(name[len(self.path) + 1 :].split(".")[0].split(":")[0])

    def renamed(self, name: str, layer: int, to: int) -> str:
        """The name of the same thing in another layer."""
        return self.path + f".{to}" + name.removeprefix(f"{self.path}.{layer}")


def expand(program: Program, stacks: Mapping[str, Stack]) -> Program:
    """The Program of the deep model. Linear in its regions, parameters and modules.

    Raises InputError for a component whose layers are not a plain chain, too few to tell the kinds of layers apart, or
    would end in one of another kind; and if anything but the next layer reads a layer that is not the last.
    """
    for component, stack in stacks.items():
        program = _with_layers(program, _layers(program, component, stack))
    return program


def _layers(program: Program, component: str, stack: Stack) -> _Layers:
    places = [i for i, r in enumerate(program.regions) if r.component == component and r.kind == "layer"]
    captured, period = len(places), stack.period
    modules = [program.regions[i].module.rpartition(".") for i in places]
    in_a_row = not places or places[-1] - places[0] == captured - 1
    if (
        len({path for path, _, _ in modules}) != 1
        or [n for _, _, n in modules] != [*map(str, range(captured))]
        or not in_a_row
    ):
        raise InputError(f"the layers of {component} are not one region each, one behind the other", "expand", REMEDY)
    extra = stack.layers - captured
    if captured < period + 2 or extra < 0 or extra % period:
        raise InputError(
            f"{captured} layers of {component} cannot stand for {stack.layers} that repeat after {period}",
            "expand",
            f"capture {period + 2} layers, or more by a multiple of {period}",
        )
    repeated = [1 + i % period for i in range(extra)]
    return _Layers(modules[0][0], captured, (*range(period + 1), *repeated, *range(period + 1, captured)))


def _with_layers(program: Program, layers: _Layers) -> Program:
    regions = [
        region if layers.layer_of(region.module) is not None else _reading_the_last(region, layers)
        for region in program.regions
    ]
    modules = _spread(
        list(program.modules.values()),
        layers,
        lambda module: module.path,
        lambda module, source, to: replace(module, path=layers.renamed(module.path, source, to)),
    )
    return replace(
        program,
        regions=_spread(
            regions, layers, lambda region: region.module, lambda region, s, to: _copied(region, layers, s, to)
        ),
        parameters=_spread(
            program.parameters,
            layers,
            lambda parameter: parameter.name,
            lambda parameter, source, to: replace(parameter, name=layers.renamed(parameter.name, source, to)),
        ),
        modules={module.path: module for module in modules},
    )


def _spread(
    items: Sequence[Item],
    layers: _Layers,
    name: Callable[[Item], str],
    copy: Callable[[Item, int, int], Item],
) -> tuple[Item, ...]:
    """The items, with copy(item, source, layer) for every layer in the place of those of the captured layers."""
    of_layer: dict[int | None, list[Item]] = {}
    for item in items:
        of_layer.setdefault(layers.layer_of(name(item)), []).append(item)
    result: list[Item] = []
    before = True
    for item in items:
        if layers.layer_of(name(item)) is None:
            result.append(item)
        elif before:
            before = False
            for to, source in enumerate(layers.sources):
                result += [copy(one, source, to) for one in of_layer[source]]
    return tuple(result)


def _copied(region: Region, layers: _Layers, source: int, to: int) -> Region:
    """Layer `to` as a copy of layer `source`: it reads layer `to - 1` where that reads the one before it."""

    def read(value: str) -> str:
        layer = layers.layer_of(value)
        if layer is None:
            return value
        if layer != source - 1:
            raise _not_a_chain(region, layers, layer)
        return layers.renamed(value, layer, to - 1)

    def own(name: str) -> str:
        return layers.renamed(name, source, to) if layers.layer_of(name) == source else name

    return replace(
        region,
        name=own(region.name),
        module=own(region.module),
        activations=tuple(map(read, region.activations)),
        parameters=tuple(map(own, region.parameters)),
        outputs=tuple(map(own, region.outputs)),
    )


def _reading_the_last(region: Region, layers: _Layers) -> Region:
    """A region outside the stack: what it reads of the last captured layer is now of the last layer."""

    def read(value: str) -> str:
        layer = layers.layer_of(value)
        if layer is None:
            return value
        if layer != layers.captured - 1:
            raise _not_a_chain(region, layers, layer)
        return layers.renamed(value, layer, len(layers.sources) - 1)

    return replace(region, activations=tuple(map(read, region.activations)))


def _not_a_chain(region: Region, layers: _Layers, layer: int) -> InputError:
    return InputError(f"{region.name} reads layer {layer} of {layers.path}, which others read too", "expand", REMEDY)
