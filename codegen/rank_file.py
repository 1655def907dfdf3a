"""rank_R.py: what one rank holds, receives, computes and sends, top to bottom; position_P.py: what several share."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from csc.codegen import layer_file
from csc.codegen.layer_file import signature
from csc.codegen.python import WIDTH, comment, one_or_tuple, quoted, source, with_note, wrapped
from torch import fx

from csc.ir import graph as g
from csc.ir.graph import identifier
from csc.ir.groups import Group, group_over
from csc.ir.mesh import Mesh
from csc.ir.program import LOSS, Features, Message, Program, Region, Stage, Template, Variant

# --- What the emission looks up in a Program again and again, found once ---------------------------------------------
#
# With it the work is linear in the program.
#
# Terms: tables: what a stage makes from the batch and the constants alone; see csc.codegen.layer_file.


BESIDE = -1  # the stage of what no step runs: see csc.ir.program.Features


@dataclass(frozen=True)
class ProgramNames:
    """A Program by names, what its `features` have included.

    readers: how many regions read a value. types: `f32[2, 20, 48]` of every value between regions. arriving and
    leaving: messages by kind and stage. seeds: tables that are a microbatch's seed. functions: the function of
    layers/tables.py that makes a set of tables.
    """

    program: Program
    templates: Mapping[str, Template]
    variants: Mapping[str, Variant]
    regions: Mapping[str, Region]
    readers: Mapping[str, int]
    types: Mapping[str, str]
    trainable: frozenset[str]
    arriving: Mapping[tuple[str, int], list[Message]]
    leaving: Mapping[tuple[str, int], list[Message]]
    seeds: frozenset[str]
    tables: layer_file.Tables
    functions: Mapping[tuple[str, ...], str]


def index(program: Program) -> ProgramNames:
    """The Index of a scheduled Program."""
    arriving: dict[tuple[str, int], list[Message]] = {}
    leaving: dict[tuple[str, int], list[Message]] = {}
    for message in program.messages:
        arriving.setdefault((message.kind, message.destination), []).append(message)
        leaving.setdefault((message.kind, message.source), []).append(message)
    left_out = program.features
    if left_out is not None:  # what its function returns is what a stage would send
        leaving["F", BESIDE] = [Message("F", BESIDE, BESIDE, left_out.values)]
    regions, templates, variants = program.regions, dict(program.templates), dict(program.variants)
    if left_out is not None:
        regions = (*left_out.regions, *regions)
        templates, variants = {**templates, **left_out.templates}, {**variants, **left_out.variants}
    returned = {name: g.outputs(template.graph) for name, template in templates.items()}
    tables = layer_file.tables(program)
    return ProgramNames(
        program,
        templates,
        variants,
        regions={region.name: region for region in regions},
        readers=Counter(value for region in regions for value in set(region.activations)),
        types={
            value: g.type_text(node.meta["val"])
            for region in regions
            for value, node in zip(region.outputs, returned[region.template])
        },
        trainable=frozenset(p.name for p in program.parameters if p.trainable),
        arriving=arriving,
        leaving=leaving,
        seeds=frozenset(layer_file.seeds(program)),
        tables=tables,
        functions=layer_file.function_names(program, tables),
    )


# --- A stage's regions as a reader would write them down: single calls, and loops over equal layers ------------------


@dataclass(frozen=True)
class Segment:
    """One region, or a loop over several of one variant.

    carried: the activation that each turn hands to the next (its position); -1 for a single region.
    """

    regions: tuple[Region, ...]
    carried: int = -1

    @property
    def loops(self) -> bool:
        return len(self.regions) > 1

    @property
    def first(self) -> Region:
        return self.regions[0]

    @property
    def last(self) -> Region:
        return self.regions[-1]


def segments(index: ProgramNames, stage: Stage) -> list[Segment]:
    """The stage's regions in order; neighbours join a loop if only the carried activation and the parameters differ."""
    runs: list[list[Region]] = []
    carries: list[int] = []
    for name in stage.regions:
        region = index.regions[name]
        if runs:
            carried = _carried(runs[-1], carries[-1], region, index.readers)
            if index.seeds.intersection(region.shared) and not _named_like_module(region, runs[-1][-1]):
                carried = None
            if carried is not None:
                runs[-1].append(region)
                carries[-1] = carried
                continue
        runs.append([region])
        carries.append(-1)
    return [Segment(tuple(run), carried) for run, carried in zip(runs, carries, strict=True)]


def _named_like_module(*regions: Region) -> bool:
    """True if a loop over modules also names the regions, as their seeds ask for."""
    return all(region.name == region.module for region in regions)


def _carried(run: Sequence[Region], carried: int, region: Region, readers: Mapping[str, int]) -> int | None:
    """The position of the activation that joins `region` to the run; None if it does not fit."""
    before = run[-1]
    if region.variant != before.variant or region.kind != "layer" or region.shared != before.shared:
        return None
    if len(before.outputs) != 1 or readers.get(before.outputs[0]) != 1 or before.outputs[0] not in region.activations:
        return None
    position = region.activations.index(before.outputs[0])
    if len(run) > 1 and position != carried:
        return None
    others = [i for i in range(len(region.activations)) if i != position]
    if any(region.activations[i] != before.activations[i] for i in others):
        return None
    if _pattern(region.module)[0] != _pattern(before.module)[0] or _locals(region) != _locals(before):
        return None
    return position


def _pattern(module: str) -> tuple[str, int]:
    """("model.layers.", 3) for model.layers.3; a path without a number gives itself and -1."""
    match = re.fullmatch(r"(.*\.)?(\d+)", module)
    return (match[1] or "", int(match[2])) if match else (module, -1)


def _locals(region: Region) -> tuple[str, ...]:
    return tuple(name.removeprefix(f"{region.module}.") for name in region.parameters)


def prefixes_source(modules: Sequence[str]) -> str:
    """A list of parameter prefixes: `[f"model.layers.{i}." for i in range(2, 9)]`, or written out."""
    patterns = [_pattern(module) for module in modules]
    numbers = [number for _, number in patterns]
    if len({prefix for prefix, _ in patterns}) == 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        prefix = patterns[0][0]
        if re.fullmatch(r"[\w.]*", prefix, flags=re.ASCII):
            return f'[f"{prefix}{{i}}." for i in range({numbers[0]}, {numbers[-1] + 1})]'
    return "[" + ", ".join(quoted(f"{module}.") for module in modules) + "]"


# --- What the functions of one stage call things ---------------------------------------------------------------------
#
# They name values, gradients, what F saves and B keeps, tables, and lists of prefixes.
#
# Terms: see csc.codegen.rank_file; a *companion* of a variable is its gradient, or what F saves or B keeps of it.


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
        variables = dict(zip(labels, segment.first.shared))
        return [self.table_variables[variables[label]] for label in signature(part).tables]

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


# --- The functions of one stage in a rank file: forward, backward_input, backward_weight, backward, loss_tokens ------
#
# Terms: see csc.codegen.rank_file; a *companion* of a variable is its gradient, or what F saves or B keeps of it. What
# F saves and B keeps of a region is in a list, of one or of a loop's layers: whoever reads it takes it out, and its
# function frees each tensor behind its last use.


def place(program: Program, index: int, seen_from: Stage) -> str:
    """`stage 3`, with a note if the same rank runs it and nothing is sent."""
    same = program.stages[index].rank == seen_from.rank
    return f"stage {index}{' of this rank' if same else ''}"


class StageWriter:
    """Writes the functions of one stage.

    claimed: names that the file's earlier stages have at module level. suffix: what function names end in.
    """

    def __init__(self, index: ProgramNames, stage: Stage, claimed: set[str], suffix: str) -> None:
        self.index = index
        self.program = index.program
        self.stage = stage
        self.suffix = suffix
        self.names = StageNames(index, stage, claimed)
        self.segments = self.names.segments
        self.seeds = self.names.seeds

    def prefixes(self) -> dict[str, str]:
        """Name and source of the list of parameter prefixes of each loop."""
        return {
            self.names.prefixes_name(index): prefixes_source([region.module for region in segment.regions])
            for index, segment in enumerate(self.segments)
            if segment.loops
        }

    def functions(self) -> dict[str, str]:
        """Name and source of each function that the stage needs."""
        has_b, has_w = self.stage.has_b, self.stage.has_w
        sources = {
            "forward": self.forward(),
            "backward_input": self.backward_input() if has_b else "",
            "backward_weight": self.backward_weight() if has_w else "",
            "backward": self.backward() if has_b and has_w else "",
            "loss_tokens": self.loss_tokens() if self.program.loss_tokens in self.stage.shared else "",
        }
        return {f"{name}{self.suffix}": text for name, text in sources.items() if text}

    def forward(self) -> str:
        lines = [
            f"def forward{self.suffix}(batch, received, weights, constants):",
            f'    """F of stage {self.stage.index}."""',
        ]
        for name, role in layer_file.direct(self.stage, self.index.tables).items():
            lines.append(f"    {self.names.table_variables[name]} = {source(role)}")
        wanted = layer_file.computed(self.program, self.stage, self.index.tables)
        if wanted:
            function = self.index.functions[tuple(wanted)]
            closing = "," if len(wanted) == 1 else ""
            lines += wrapped(
                "(",
                [self.names.table_variables[name] for name in wanted],
                f"{closing}) = layers.tables.{function}(batch, constants)",
            )
        for message in self.index.arriving.get(("F", self.stage.index), ()):
            for value in message.values:
                note = f"{self.index.types[value]} from {place(self.program, message.source, self.stage)}"
                lines += with_note(f"{self.names.variable(value)} = received[{quoted(value)}]", note)
        for index, segment in enumerate(self.segments):
            lines += self._forward_loop(index, segment) if segment.loops else self._forward_call(index, segment)
        sent = self._sent("F")
        returned = [f"{quoted(value)}: {self.names.variable(value)}" for value in sent]
        if LOSS in self.names.made:
            returned.append(f"{quoted(LOSS)}: {self.names.variable(LOSS)}")
        lines += wrapped("sent = {", returned, "}")
        lines += _packed("saved", self.names.saved_names())
        lines.append("    return sent, saved")
        return "\n".join(lines) + "\n"

    def _sent(self, kind: str) -> list[str]:
        sending = self.index.leaving.get((kind, self.stage.index), ())
        return list(dict.fromkeys(value for message in sending for value in message.values))

    def _arguments(self, segment: Segment, part: fx.Graph | None, weights: str) -> list[str]:
        assert part is not None
        return [*self._given_tables(segment, part), *([weights] if signature(part).takes_w else [])]

    def _given_tables(self, segment: Segment, part: fx.Graph) -> list[str]:
        """The tables as one part of a segment gets them: the seed of random numbers is that of each region."""
        of = "layer" if segment.loops else quoted(f"{segment.first.name}.")
        return [
            f"seed_of({name}, {of})" if name in self.seeds else name for name in self.names.tables_of(segment, part)
        ]

    def _forward_call(self, index: int, segment: Segment) -> list[str]:
        region, variant = segment.first, self.names.variant(segment)
        arguments = [self.names.variable(v) for v in region.activations]
        arguments += self._arguments(segment, variant.forward, self.names.weights_of(region))
        left = one_or_tuple(self.names.variable(value) for value in region.outputs)
        if variant.backward_input is not None:
            left = f"{left}, *{self.names.saved[index]}"
        return wrapped(f"{left} = layers.{variant.name}.forward(", arguments, ")")

    def _forward_loop(self, index: int, segment: Segment) -> list[str]:
        variant, name = self.names.variant(segment), f"{self.names.carried(segment)}"
        arguments = [
            name if i == segment.carried else self.names.variable(v) for i, v in enumerate(segment.first.activations)
        ]
        arguments += self._arguments(segment, variant.forward, "under(weights, layer)")
        saving = variant.backward_input is not None
        lines = [f"    {name} = {self.names.variable(segment.first.activations[segment.carried])}"]
        lines += [f"    {self.names.saved[index]} = []"] if saving else []
        lines.append(f"    for layer in {self.names.prefixes_name(index)}:")
        lines += wrapped(
            f"{name}{', saved' if saving else ''} = layers.{variant.name}.forward(", arguments, ")", indent=8
        )
        lines += [f"        {self.names.saved[index]}.append(saved)"] if saving else []
        lines.append(f"    {self.names.variable(segment.last.outputs[0])} = {name}")
        return lines

    def backward_input(self) -> str:
        lines = [
            f"def backward_input{self.suffix}(saved, received, weights, constants):",
            f'    """B of stage {self.stage.index}."""',
            *self._taken_by_b(),
        ]
        lines += self._backwards()
        lines += self._sent_by_b()
        if self.stage.has_w:
            lines += _packed("stashed", self.names.stashed_names())
            lines.append("    return sent, stashed")
        else:
            lines.append("    return sent, None")
        return "\n".join(lines) + "\n"

    def _taken_by_b(self) -> list[str]:
        """What F saved and the gradients that have come, as variables."""
        lines: list[str] = []
        names = self.names.saved_names()
        if names:
            lines += wrapped("(", names, f"{',' if len(names) == 1 else ''}) = saved; del saved")
        for message in self.index.arriving.get(("B", self.stage.index), ()):
            for value in message.values:
                note = f"{self.index.types[value]} from {place(self.program, message.source, self.stage)}"
                lines += with_note(f"d_{self.names.variable(value)} = received[{quoted(value)}]", note)
        if LOSS in self.names.made:
            note = "weight of this microbatch in the batch's loss"
            lines += with_note(f"d_{self.names.variable(LOSS)} = received[{quoted(LOSS)}]", note)
        return lines

    def _sent_by_b(self) -> list[str]:
        return wrapped(
            "sent = {", [f"{quoted(value)}: d_{self.names.variable(value)}" for value in self._sent("B")], "}"
        )

    def _tangents(self, segment: Segment, region: Region, carried: str = "") -> list[str]:
        """The gradients that B of a region takes: of outputs, then those of threaded activations so far."""
        template, variant = self.names.template(segment), self.names.variant(segment)
        assert variant.backward_input is not None
        by_label: dict[str, str] = {}
        for i, label in enumerate(template.outputs):
            by_label[label] = carried or f"d_{self.names.variable(region.outputs[i])}"
        for i in template.threaded:
            by_label.setdefault(template.activations[i], f"d_{self.names.variable(region.activations[i])}")
        return [by_label[label] for label in signature(variant.backward_input).tangents]

    def _gradients(self, segment: Segment, carried: str) -> list[str]:
        """What B of a segment returns of activations."""
        region, variant = segment.first, self.names.variant(segment)
        return [
            carried if carried and i == segment.carried else f"d_{self.names.variable(v)}"
            for i, v in enumerate(region.activations) if variant.dx[i]
        ]  # fmt: skip

    def _backwards(self, at_once: bool = False) -> list[str]:
        """B of all regions, last first. at_once: with W of each right after it."""
        lines: list[str] = []
        for index, segment in reversed(list(enumerate(self.segments))):
            variant = self.names.variant(segment)
            write = self._backward_loop if segment.loops else self._backward_call
            if variant.backward_input is not None:
                lines += write(index, segment, at_once and variant.backward_weight is not None)
        return lines

    def _backward_call(self, index: int, segment: Segment, at_once: bool) -> list[str]:
        kept, saved = self.names.stashed_name(index), self.names.saved[index]
        weights = self.names.weights_of(segment.first)
        lines, rest = self._backward_of(segment, segment.first, f"{saved}.pop()", weights, at_once, kept)
        return [*lines, *rest]

    def _backward_loop(self, index: int, segment: Segment, at_once: bool) -> list[str]:
        variant, name = self.names.variant(segment), f"d_{self.names.carried(segment)}"
        keeping = variant.backward_weight is not None and not at_once
        lines = [f"    {name} = d_{self.names.variable(segment.last.outputs[0])}"]
        lines += [f"    {self.names.stashed_name(index)} = []"] if keeping else []
        lines.append(f"    for layer in reversed({self.names.prefixes_name(index)}):")
        saved, weights = f"{self.names.saved[index]}.pop()", "under(weights, layer)"
        first, rest = self._backward_of(segment, segment.last, saved, weights, at_once, "stashed", carried=name)
        lines += [f"    {line}" for line in (*first, *rest)]
        lines += [f"        {self.names.stashed_name(index)} += stashed"] if keeping else []
        if variant.dx[segment.carried]:
            lines.append(f"    d_{self.names.variable(segment.first.activations[segment.carried])} = {name}")
        return lines

    def _backward_of(
        self, segment: Segment, region: Region, saved: str, weights: str, at_once: bool, kept: str, carried: str = ""
    ) -> tuple[list[str], list[str]]:
        """B of a region, and then its W if that is to run at once; where they are one function, that, and what becomes
        of its gradients. kept: the list of what B alone keeps for W.
        """
        variant = self.names.variant(segment)
        both = variant.backward if at_once else None
        part, name = (variant.backward_input, "backward_input") if both is None else (both, "backward")
        arguments = [saved, *self._arguments(segment, part, weights if both is None else "w")]
        arguments += self._tangents(segment, region, carried)
        gradients, call = self._gradients(segment, carried), f"layers.{variant.name}.{name}("
        left = one_or_tuple(gradients) if gradients else ""
        if both is not None:
            lines = wrapped(f"{', '.join(filter(None, (left, 'gradients')))} = {call}", arguments, ")")
            return [f"    w = {weights}", *lines], ["    yield from w.full_names(gradients)", "    del gradients"]
        if variant.backward_weight is None:
            return wrapped(f"{left} = {call}", arguments, ")"), []
        stashed = "stashed" if at_once else kept
        lines = (
            wrapped(f"{left}, *{stashed} = {call}", arguments, ")") if gradients else
            wrapped(f"{stashed} = [{call}", arguments, ")]")
        )  # fmt: skip
        return lines, self._weights(segment, weights, "stashed.pop()") if at_once else []

    def backward_weight(self) -> str:
        lines = [
            f"def backward_weight{self.suffix}(stashed, weights, constants):",
            f'    """W of stage {self.stage.index}: (parameter name, gradient) pairs, last region first."""',
        ]
        names = self.names.stashed_names()
        lines += wrapped("(", names, f"{',' if len(names) == 1 else ''}) = stashed; del stashed")
        for index, segment in reversed(list(enumerate(self.segments))):
            variant = self.names.variant(segment)
            if variant.backward_weight is None:
                continue
            if segment.loops:
                lines.append(f"    for layer in reversed({self.names.prefixes_name(index)}):")
                taken = self._weights(segment, "under(weights, layer)", f"{self.names.stashed_name(index)}.pop(0)")
                lines += [f"    {line}" for line in taken]
            else:
                weights, stashed = self.names.weights_of(segment.first), f"{self.names.stashed_name(index)}.pop()"
                lines += self._weights(segment, weights, stashed)
        return "\n".join(lines) + "\n"

    def backward(self) -> str:
        """B and W region by region: what B keeps for W is gone before the next region runs."""
        lines = [
            f"def backward{self.suffix}(saved, received, weights, constants):",
            f'    """BW of stage {self.stage.index}: B and W, region by region; returns what is sent."""',
            *self._taken_by_b(),
        ]
        lines += self._backwards(at_once=True)
        return "\n".join([*lines, *self._sent_by_b(), "    return sent"]) + "\n"

    def _weights(self, segment: Segment, weights: str, stashed: str) -> list[str]:
        """W of a region. Its gradients have no name here: they are gone before those of the next are made."""
        variant = self.names.variant(segment)
        left = f"yield from w.full_names(layers.{variant.name}.backward_weight("
        arguments = [stashed, *self._arguments(segment, variant.backward_weight, "w")]
        return [f"    w = {weights}", *wrapped(left, arguments, "))")]

    def loss_tokens(self) -> str:
        name = self.index.functions[(self.program.loss_tokens,)]
        return "\n".join(
            [
                f"def loss_tokens{self.suffix}(batch, constants):",
                '    """Labels that the loss of this microbatch is a mean over."""',
                f"    return layers.tables.{name}(batch, constants)",
                "",
            ]
        )


def _packed(name: str, items: Sequence[str]) -> list[str]:
    """`name = (a, b)`, over several lines where it is long."""
    return wrapped(f"{name} = (", items, ",)" if len(items) == 1 else ")")


# --- rank_R.py: what one rank holds, receives, computes and sends, top to bottom -------------------------------------
#
# `position_P.py` is what several ranks share.
#
# Terms: a *position* is an index on the pp axis. Its ranks, a replica and a shard of a sequence each, run the same
# functions. A rank that is alone at its position has them in its own file; else they stand once, in the file of the
# position, and the files of its ranks import them from there.
#
# The work is linear in ranks, stages, regions and messages.


def rank_path(rank: int) -> str:
    """The file of a rank."""
    return f"rank_{rank}.py"


def position_path(position: int) -> str:
    """The file of what the ranks of a position share; there is none if it has one rank."""
    return f"position_{position}.py"


def rank_sources(index: ProgramNames, mesh: Mesh) -> dict[str, str]:
    """The text of each rank's file, and of the files that ranks share. Where a rank has several stages, names of
    functions end in the stage.
    """
    stages: list[list[Stage]] = [[] for _ in range(mesh.pp)]
    for stage in index.program.stages:
        stages[stage.rank].append(stage)
    files: dict[str, str] = {}
    for position, (stages_here, ranks) in enumerate(zip(stages, mesh.groups(Group.POSITION), strict=True)):
        written = _position(index, position, stages_here, mesh)
        shared = len(ranks) > 1
        if shared:
            opening = f'"""Position {position} of {mesh.pp}: {_held(written, index.program)}, for {len(ranks)} ranks.'
            files[position_path(position)] = _file([opening, "", *written.docstring], written.imports, written.code)
            names = ["STAGES", *sorted(written.functions)]
            note = f"# {len(ranks)} ranks share these; what is defined below is this rank's own."
            line = f"from .position_{position} import {', '.join(names)}"
            wide = wrapped(f"from .position_{position} import (", names, ")", indent=0)
            code = "\n".join([note, *([line] if len(line) <= WIDTH else wide), ""])
        for rank in ranks:
            docstring = [*_opening(index.program, mesh, rank, written), *written.docstring]
            parts = [code] if shared else [written.imports, written.code]
            files[rank_path(rank)] = _file(docstring, *parts)
    return files


@dataclass(frozen=True)
class _Position:
    """What is the same on all ranks of a position: lines of the docstring, then the code."""

    stages: tuple[int, ...]
    functions: tuple[str, ...]
    docstring: tuple[str, ...]
    imports: str
    code: str


def _position(index: ProgramNames, position: int, stages: Sequence[Stage], mesh: Mesh) -> _Position:
    claimed: set[str] = set()
    writers = []
    for stage in stages:
        writers.append(StageWriter(index, stage, claimed, f"_{stage.index}" if len(stages) > 1 else ""))
        claimed |= set(writers[-1].prefixes())
    docstring = []
    for writer in writers:
        docstring += [f"Stage {writer.stage.index}"] if len(writers) > 1 else []
        docstring += _contents(index, writer.stage, writer.segments, mesh)
    functions = {name: text for writer in writers for name, text in writer.functions().items()}
    return _Position(
        tuple(stage.index for stage in stages),
        tuple(functions),
        (*docstring, *_order(index.program, position, mesh.sharers(position))),
        imports(writers),
        "\n\n".join(functions.values()),
    )


def _file(docstring: Sequence[str], *parts: str) -> str:
    return "\n".join([*docstring, '"""', "", ""]) + "\n\n".join(parts)


def imports(writers: Sequence[StageWriter]) -> str:
    """What a file of these stages begins with."""
    stages = [writer.stage.index for writer in writers]
    lines = [
        "from csc.runtime.weight_names import under",
        *(["from csc.runtime.executor import seed_of"] if any(writer.seeds for writer in writers) else []),
        "",
        "from . import layers",
        "",
        f"STAGES = ({', '.join(map(str, stages))}{',' if len(stages) == 1 else ''})",
    ]
    lines += [f"{name} = {source}" for writer in writers for name, source in writer.prefixes().items()]
    return "\n".join(lines) + "\n"


def _held(position: _Position, program: Program) -> str:
    *first, last = map(str, position.stages)
    return (f"stages {', '.join(first)} and {last}" if first else f"stage {last}") + f" of {len(program.stages)}"


def _opening(program: Program, mesh: Mesh, rank: int, position: _Position) -> list[str]:
    """The first lines of a rank's docstring: what no other rank's says."""
    coordinates = mesh.coordinates(rank)
    first, *more = mesh.replicas_of(rank)
    replicas = f"replicas {first} to {more[-1]}" if more else f"replica {first}"
    axes = f", cp rank {coordinates.cp} of {mesh.cp}" if mesh.cp > 1 else ""
    axes += f", tp rank {coordinates.tp} of {mesh.width(coordinates.pp)}" if mesh.sizes(Group.TENSOR) != (1,) else ""
    return [
        f'"""Rank {rank} of {mesh.size}: {_held(position, program)}, {replicas} of {mesh.dp}{axes}, '
        f"{comment(program.name)}.",
        "",
        *_copies(mesh, rank),
        *_token_shards(program, mesh, rank),
    ]


def _copies(mesh: Mesh, rank: int) -> list[str]:
    """Which part the rank has of components whose layers fewer tp ranks divide."""
    tp_ranks = mesh.width(mesh.coordinates(rank).pp)
    lines: list[str] = []
    for component in [component for component in mesh.held_in_copies if mesh.extent_of(component).width == tp_ranks]:
        (part, copy), parts = mesh.part(component, rank), mesh.dividing(component)
        lines.append(
            f"{'' if lines else 'Divided':<9} part {part} of {parts} of {comment(component)}, copy {copy} of "
            f"{tp_ranks // parts}"
        )
    return lines


def _token_shards(program: Program, mesh: Mesh, rank: int) -> list[str]:
    """Which part of the tokens of each component the rank has, where they are spread."""
    rows = [
        f"shard {mesh.place(group_over(spec.axis), rank) % spec.ranks} of {spec.ranks} of {comment(spec.component)}: "
        f"{spec.shard} slots for {spec.tokens} tokens"
        for spec in program.contexts
    ]
    return [f"{'Tokens' if not i else '':<9} {row}" for i, row in enumerate(rows)]


def _contents(index: ProgramNames, stage: Stage, parts: Sequence[Segment], mesh: Mesh) -> list[str]:
    """What a stage holds, receives and sends."""
    lines = []
    for number, segment in enumerate(parts):
        name = comment(segment.first.name)
        if segment.loops:
            name += f" ... {comment(segment.last.name)} ({len(segment.regions)} layers)"
        parameters = [p for region in segment.regions for p in region.parameters]
        trained = sum(p in index.trainable for p in parameters)
        state = (
            "no parameters"
            if not parameters
            else "frozen"
            if not trained
            else "trained"
            if trained == len(parameters)
            else (f"{trained} of {len(parameters)} parameters trained")
        )
        lines.append(f"{'Holds' if not number else '':<9} {name}: {state}")
    for title, messages, other in (
        ("Receives", index.arriving, "source"),
        ("Sends", index.leaving, "destination"),
    ):
        rows = [
            f"{'' if kind == 'F' else 'gradient of '}{comment(value)} {index.types[value]} "
            f"{'from' if other == 'source' else 'to'} {place(index.program, getattr(message, other), stage)}"
            f"{_counterparts(mesh, index.program, message)}"
            for kind in "FB"
            for message in messages.get((kind, stage.index), ())
            for value in message.values
        ]
        lines += [f"{title if not i else '':<9} {row}" for i, row in enumerate(rows or ["nothing"])]
    return lines


def _counterparts(mesh: Mesh, program: Program, message: Message) -> str:
    """Who of the tp ranks sends, and to how many, where one end has fewer of them."""
    source, destination = (mesh.extent(program.stages[stage].rank) for stage in (message.source, message.destination))
    several = f", {destination[0] // source[0]} replicas for each" if source[0] < destination[0] else ""
    several = f", each from {source[0] // destination[0]} replicas" if source[0] > destination[0] else several
    here, destination_ranks = source[1], destination[1]
    if here < destination_ranks:
        return f"{several}, {destination_ranks // here} ranks for each of {here}"
    return (
        f"{several}, by tp rank{f's 0 to {destination_ranks - 1}' if destination_ranks > 1 else ' 0'} alone"
        if here > destination_ranks
        else several
    )


ORDER_LINES = 6


def _order(program: Program, position: int, replicas: int) -> list[str]:
    """The rank's actions as in schedule.txt, the first lines of them where there are many."""
    assert program.schedule is not None
    text = ""
    for action in program.schedule.ranks[position]:
        text += f"{' | ' if text else ''}{action}"
        if len(text) > (ORDER_LINES + 1) * WIDTH:  # more than can be shown
            break
    rows = textwrap.wrap(text, WIDTH - 10)
    if len(rows) > ORDER_LINES:
        rows = [*rows[: ORDER_LINES - 1], f"... and so on: see 'rank {position}' in schedule.txt"]
    rows += ["each action once for every replica, in turn"] if replicas > 1 else []
    return [f"{'Order' if not i else '':<9} {row}" for i, row in enumerate(rows)]


# --- features.py: what the step takes of a frozen encoder, made by no step -------------------------------------------


def features_source(index: ProgramNames, features: Features) -> str:
    """The text of the file."""
    writer = StageWriter(index, replace(features.stage, index=BESIDE), set(), "")
    values = ", ".join(f"{comment(value)} {index.types[value]}" for value in features.values)
    regions = f"{comment(features.regions[0].name)} ... {comment(features.regions[-1].name)}"
    opening = [
        '"""What the frozen encoder makes of a batch: no step runs it, and its results are kept on disk.',
        "",
        f"Holds     {regions} ({len(features.regions)} regions): frozen",
        f"Makes     {values}",
        '"""',
    ]
    return "\n".join([*opening, "", ""]) + "\n\n".join([imports([writer]), writer.forward()])
