"""What the functions of one stage call things: values, gradients, what F saves and B keeps, tables, lists of prefixes.

Terms: see csc.codegen.segments; a *companion* of a variable is its gradient, or what F saves or B keeps of it.
"""

from __future__ import annotations

import re

from csc.codegen.index import ProgramNames
from csc.codegen.layer_file import signature
from csc.codegen.python import quoted
from csc.codegen.segments import Segment, segments
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import identifier
from csc.ir.program import LOSS, Region, Stage, Template, Variant


class StageNames:
    """The variables of one stage's functions. A value keeps one name in all of them.

    claimed: names that the file's earlier stages have at module level.
    """

    def __init__(self, index: ProgramNames, stage: Stage, claimed: set[str]) -> None:
        self.index = index
        self.program = index.program
        self.stage = stage
        self.claimed = claimed
        self.segments = segments(index, stage)
        self.made = {value for s in self.segments for region in s.regions for value in region.outputs}
        self.taken: set[str] = set()
        self.variables: dict[str, str] = {}
        self.loop_names: dict[int, str] = {}
        for segment in self.segments:
            if segment.loops:
                self.taken |= _companions(self.carried(segment))
        for number, segment in enumerate(self.segments):
            if segment.loops:
                self.loop_names[number] = self._claim(self._span(segment))
        self.saved = [
            f"saved_{self.loop_names.get(number) or self.variable(segment.first.outputs[0])}"
            for number, segment in enumerate(self.segments)
        ]
        self.table_variables = {name: self._claim(identifier(name)) for name in stage.shared}
        self.seeds = {self.table_variables[name] for name in stage.shared if name in index.seeds}

    def _claim(self, wanted: str) -> str:
        name, count = wanted, 0
        while not self.taken.isdisjoint(_companions(name)) or name.upper() in self.claimed:
            count += 1
            name = f"{wanted}_{count}"
        self.taken |= _companions(name)
        return name

    def _span(self, segment: Segment) -> str:
        first, last = _short(segment.first.name), _short(segment.last.name)
        return f"{first}_to_{last.rpartition('_')[2]}"

    def variable(self, value: str) -> str:
        """The variable that holds a value."""
        if value not in self.variables:
            self.variables[value] = self._claim("loss" if value == LOSS else _short(value))
        return self.variables[value]

    def template(self, segment: Segment) -> Template:
        return self.index.templates[segment.first.template]

    def variant(self, segment: Segment) -> Variant:
        return self.index.variants[segment.first.variant]

    def stashed_name(self, index: int) -> str:
        return self.saved[index].replace("saved_", "stashed_", 1)

    def prefixes_name(self, index: int) -> str:
        return self.loop_names[index].upper()

    def weights_of(self, region: Region) -> str:
        prefix = f"{region.module}." if region.module and region.kind != "container" else ""
        return f"under(weights, {quoted(prefix)})"

    def carried(self, segment: Segment) -> str:
        """The variable that a loop over equal layers carries from one to the next."""
        return self.template(segment).activations[segment.carried]

    def saved_names(self) -> list[str]:
        """What the stage's F keeps: the tables that B and W read, then what each segment saved."""
        tables: list[str] = []
        for segment in self.segments:
            variant = self.variant(segment)
            for part in (variant.backward_input, variant.backward_weight):
                if part is not None:
                    tables += self.tables_of(segment, part)
        saving = [self.saved[i] for i, s in enumerate(self.segments) if self.variant(s).backward_input is not None]
        return [*dict.fromkeys(tables), *saving]

    def tables_of(self, segment: Segment, part: fx.Graph) -> list[str]:
        """The stage's variables of the tables that one part of a segment takes, in the order it takes them."""
        placed = g.placeholders(self.template(segment).graph)
        labels = [node.meta["role"][1] for node in placed if node.meta["role"][0] == "shared"]
        own = dict(zip(labels, segment.first.shared))
        return [self.table_variables[own[label]] for label in signature(part).tables]

    def stashed_names(self) -> list[str]:
        """What the stage's B keeps: the tables that W reads, then what each segment stashed."""
        tables: list[str] = []
        keeping = []
        for index, segment in enumerate(self.segments):
            part = self.variant(segment).backward_weight
            if part is not None:
                tables += self.tables_of(segment, part)
                keeping.append(self.stashed_name(index))
        return [*dict.fromkeys(tables), *keeping]


def _companions(name: str) -> set[str]:
    """A variable and those that are named after it: its gradient, what its F saves for B and its B keeps for W."""
    return {name, f"d_{name}", f"saved_{name}", f"stashed_{name}"}


def _short(value: str) -> str:
    """A variable name from the end of a region's name: `layers_3`, `embed_tokens`, `merge`."""
    words = re.split(r"[.:#]", value)
    start = len(words) - 1
    while start > 0 and words[start].isdigit():
        start -= 1
    return identifier("_".join(words[start:]))
