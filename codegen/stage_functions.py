"""The functions of one stage in a rank file: forward, backward_input, backward_weight, backward, loss_tokens.

Terms: see csc.codegen.segments; a *companion* of a variable is its gradient, or what F saves or B keeps of it. What F
saves and B keeps of a region is in a list, of one or of a loop's layers: whoever reads it takes it out, and its
function frees each tensor behind its last use.

    StageWriter(index, stage, claimed, suffix).functions() -> {name: source}      .prefixes() -> {name: source}
    place(program, stage, seen_from) -> "stage 3"
"""

from __future__ import annotations

from collections.abc import Sequence

from csc.codegen import tables_file
from csc.codegen.index import ProgramNames
from csc.codegen.layer_file import signature
from csc.codegen.python import one_or_tuple, quoted, source, with_note, wrapped
from csc.codegen.segments import Segment, prefixes_source
from csc.codegen.stage_names import StageNames
from torch import fx

from csc.ir.program import LOSS, Program, Region, Stage


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
        there = {
            "forward": self.forward(),
            "backward_input": self.backward_input() if has_b else "",
            "backward_weight": self.backward_weight() if has_w else "",
            "backward": self.backward() if has_b and has_w else "",
            "loss_tokens": self.loss_tokens() if self.program.loss_tokens in self.stage.shared else "",
        }
        return {f"{name}{self.suffix}": text for name, text in there.items() if text}

    def forward(self) -> str:
        lines = [
            f"def forward{self.suffix}(batch, received, weights, constants):",
            f'    """F of stage {self.stage.index}."""',
        ]
        for name, role in tables_file.direct(self.stage, self.index.tables).items():
            lines.append(f"    {self.names.table_variables[name]} = {source(role)}")
        wanted = tables_file.computed(self.program, self.stage, self.index.tables)
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
