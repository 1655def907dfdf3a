"""The tables of `csc cost`: figures of components and regions, as numbers, expressions and seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from csc.analysis import symbolic as poly
from csc.analysis.costs import basis, parameter_bytes, region_costs, stored_dtypes, variant_cost
from csc.analysis.hardware import Hardware
from csc.driver.compiled import CompiledModel
from csc.errors import CscError
from csc.ir.program import Program, compute_dtypes
from csc.reports.varied_sizes import Length, Sampler, lengths, rows, sampler

BATCH = "batch"
Figures = dict[str, Any]  # by name; numbers or sympy expressions


@dataclass(frozen=True)
class CostRow:
    """One region, or a component: the sum of its regions, a parameter that several of them hold counted once.

    figures: numbers at the example's sizes, by name (RegionCost.figures). seconds: of F, B and W.
    """

    name: str
    component: str
    template: str
    figures: Mapping[str, int]
    expressions: Mapping[str, sympy.Expr] = field(default_factory=dict)
    seconds: tuple[float, float, float] | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "component": self.component,
            "template": self.template,
            "figures": dict(self.figures),
            "expressions": {name: str(expression) for name, expression in self.expressions.items()},
            "seconds": dict(zip("FBW", self.seconds)) if self.seconds is not None else None,
        }


@dataclass(frozen=True)
class CostReport:
    """sizes: of the example, by symbol; meanings: what each symbol measures; basis: where the seconds come from."""

    sizes: Mapping[str, int]
    meanings: Mapping[str, str]
    basis: str
    components: Sequence[CostRow]
    regions: Sequence[CostRow]

    def as_dict(self) -> dict[str, Any]:
        return {
            "sizes": dict(self.sizes),
            "symbols": dict(self.meanings),
            "seconds": self.basis,
            "components": [row.as_dict() for row in self.components],
            "regions": [row.as_dict() for row in self.regions],
        }


def report(
    compiled: CompiledModel,
    hardware: Hardware | None = None,
    master: bool = False,
    symbolic: bool = False,
) -> CostReport:
    """What F, B and W of every region cost for one microbatch of the example.

    hardware: adds seconds. master: see csc.analysis.costs. symbolic: adds expressions in the sizes, which
    captures and lowers the model at other sizes too. Raises CscError if a figure has no such expression.
    """
    source, fuse = sampler(compiled), compiled.options.fuse
    program = source.program()
    figures = _figures(program, master)
    expressions: dict[tuple[str, str], sympy.Expr] = {}
    varying: list[Length] = []
    if symbolic:
        varying = lengths(source)
        expressions = _expressions(source, program, varying, master)
    seconds = None
    if hardware is not None:
        seconds = [
            (cost.forward, cost.backward_input, cost.backward_weight)
            for cost in region_costs(program, hardware, fuse=fuse)
        ]
    regions = [
        CostRow(
            region.name,
            region.component,
            region.variant,
            figures[region.name],
            {name: expressions[region.name, name] for name in figures[region.name]} if symbolic else {},
            seconds[position] if seconds is not None else None,
        )
        for position, region in enumerate(program.regions)
    ]
    return CostReport(
        sizes={BATCH: rows(program), **{length.name: length.size for length in varying}},
        meanings={
            BATCH: "rows of a microbatch" + (", two or more" if _least_copies(program) > 1 else ""),
            **{length.name: length.meaning for length in varying},
        },
        basis=basis(program, hardware, fuse) if hardware is not None else "",
        components=_components(program, regions, master),
        regions=regions,
    )


def _figures(program: Program, master: bool) -> dict[str, dict[str, int]]:
    """The figures of every region."""
    stored = stored_dtypes(program)
    of_variant = {name: variant_cost(v, master, stored[name]).figures() for name, v in program.variants.items()}
    return {region.name: of_variant[region.variant] for region in program.regions}


def _expressions(
    source: Sampler, program: Program, varying: Sequence[Length], master: bool
) -> dict[tuple[str, str], sympy.Expr]:
    """The expression of every (region, figure), checked at a point that was not fitted."""
    symbols = [sympy.Symbol(name, integer=True, positive=True) for name in (BATCH, *(v.name for v in varying))]
    count = rows(program)
    start = (count * _least_copies(program), *(length.size for length in varying))
    steps = (count, *(length.step for length in varying))
    points, further = poly.lattice(start, steps), poly.held_out(start, steps)

    def at(point: poly.Point) -> dict[tuple[str, str], int]:
        sized = source.program(point[0] // count, dict(zip(varying, point[1:])))
        if [r.name for r in sized.regions] != [r.name for r in program.regions]:
            raise CscError(
                "the model has other regions at other sizes",
                "csc cost --symbolic",
                "read the numbers at the sizes of your own example instead (without --symbolic)",
            )
        figures = _figures(sized, master)
        return {
            (region, name): value
            for region, region_figures in figures.items()
            for name, value in region_figures.items()
        }

    expressions = poly.fit(symbols, points, [at(point) for point in points])
    poly.check(expressions, symbols, further, at(further))
    return expressions


def _least_copies(program: Program) -> int:
    """One row is special: capture leaves out what a batch of one does not need. Then expressions start at two."""
    return 2 if rows(program) == 1 else 1


def _components(program: Program, regions: Sequence[CostRow], master: bool) -> list[CostRow]:
    members: dict[str, list[int]] = {}
    for position, row in enumerate(regions):
        members.setdefault(row.component, []).append(position)
    return [
        _component(program, name, [regions[i] for i in positions], positions, master)
        for name, positions in members.items()
    ]


def _component(program: Program, name: str, rows: Sequence[CostRow], positions: Sequence[int], master: bool) -> CostRow:
    state = _state(program, positions, master)
    figures = {**_sum(row.figures for row in rows), **state}
    expressions: dict[str, sympy.Expr] = {}
    if rows[0].expressions:
        expressions = {**_sum(row.expressions for row in rows), **{key: sympy.Integer(v) for key, v in state.items()}}
    times = [row.seconds for row in rows if row.seconds is not None]
    return CostRow(
        name,
        name,
        f"{len(rows)} regions",
        figures,
        expressions,
        (sum(t[0] for t in times), sum(t[1] for t in times), sum(t[2] for t in times)) if times else None,
    )


def _state(program: Program, positions: Sequence[int], master: bool) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer, each parameter once."""
    computed = compute_dtypes(program)
    size = {p.name: parameter_bytes(p.numel, computed[p.name], p.dtype, master) for p in program.parameters
            if p.name in computed}  # fmt: skip
    regions = [program.regions[i] for i in positions]
    held = {name for region in regions for name in region.parameters}
    trained = {name for region in regions for name, needed in zip(region.parameters, region.dw) if needed}
    return {
        "parameters": sum(size[name][0] for name in held),
        "gradients": sum(size[name][1] for name in trained),
        "optimizer": sum(size[name][2] for name in trained),
    }


def _sum(rows_: Iterable[Mapping[str, Any]]) -> Figures:
    listed = list(rows_)
    return {name: _total([row[name] for row in listed]) for name in listed[0]}


def _total(values: Sequence[Any]) -> Any:
    return sum(values) if isinstance(values[0], int) else sympy.Add(*values)
