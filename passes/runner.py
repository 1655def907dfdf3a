"""The pass runner: runs passes in order, times and verifies each, and keeps the Program after every one.

Programs are immutable and share what a pass did not change, so keeping them all is cheap; `csc dump --after` and
`csc diff` are nothing more than printing them. What a pass of a user gives is not trusted: it has to be a Program, of
which the facts hold that the pass establishes, and the Program that it was given has to be as it was.
"""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from csc.passes.line import type_text
from csc.passes.pipeline import FACTS, Pipeline, facts_behind, named_alike, of_csc, unmet
from torch import fx

from csc.analysis.placements import CheckedGraphs, verify_on
from csc.errors import CscError, InputError, user_line
from csc.ir.groups import Group
from csc.ir.program import Options, Pass, Program, Record
from csc.ir.verifier import VerificationError, verify

CAPTURE = "capture"
MEND = "mend the pass: it gives a Program that cannot be right (docs/writing-a-pass.md)"


@dataclass(frozen=True)
class Contract:
    """What a pass says of itself, and its docstring of what it does."""

    name: str
    summary: str
    requires: tuple[str, ...]
    establishes: tuple[str, ...]
    breaks: tuple[str, ...]
    options: tuple[str, ...]
    ensures: str
    before: str
    after: str


def contracts(steps: Pipeline) -> list[Contract]:
    """The contracts of passes, in the order they run."""
    return [_contract(step) for step in steps]


def _contract(step: Pass) -> Contract:
    text = inspect.getdoc(type(step)) or ""
    fields_told = {}
    for field in ("Ensures", "Before", "After"):
        part = re.search(rf"^{field}\s+(.*?)(?=^\w+\s\s|\Z)", text, flags=re.DOTALL | re.MULTILINE)
        fields_told[field.lower()] = re.sub(r"\s+", " ", part[1]).strip() if part else ""
    summary = re.split(r"\n\s*\n|\nEnsures", text)[0]
    options = tuple(f"{option.name}: {type_text(option)}" for option in fields(step))
    return Contract(
        step.name,
        re.sub(r"\s+", " ", summary).strip(),
        step.requires,
        step.establishes,
        step.breaks,
        options,
        **fields_told,
    )


def run(
    history: Sequence[Program],
    passes: Sequence[Pass],
    options: Options,
    progress: Callable[[str], None] = lambda name: None,
) -> list[Program]:
    """`history` and the Program after each of the passes. Raises CscError if a pass or its verification fails."""
    programs = list(history)
    checks = _Checks(options)
    for step in passes:
        before = programs[-1]
        name = named_alike([record.name for record in before.history], step.name)
        progress(name)
        start = time.perf_counter()
        for fact in unmet(step, before.facts):
            raise InputError(
                f"pass {name} requires `{fact}`, which does not hold behind {before.history[-1].name}", "passes",
                "put it where `csc passes` shows that it holds",
            )  # fmt: skip
        program = checks.called(step, name, before)
        record = Record(name, time.perf_counter() - start, _summary(program))
        programs.append(replace(program, history=(*before.history, record)))
    return programs


class _Checks:
    """Of one run: what was looked at before is not looked at again."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._sound: set[tuple[fx.Graph, int]] = set()
        self._placed: dict[str, CheckedGraphs] = {}

    def called(self, step: Pass, name: str, before: Program) -> Program:
        """What a pass gives, sound."""
        if of_csc(step):
            return self._sound_behind(step, name, step(before, self._options))
        state = _state(before)
        try:
            program: Any = step(before, self._options)
        except CscError:
            raise
        except Exception as error:
            raise InputError(
                f"pass {name} raised {type(error).__name__}: {error}",
                user_line(error) or f"pass {name}",
                "mend the pass",
            ) from error
        where = f"pass {name} ({inspect.getsourcefile(type(step)) or type(step).__module__})"
        if not isinstance(program, Program):
            kind_given = "nothing" if program is None else f"a {type(program).__name__}"
            raise InputError(
                f"the pass gave {kind_given}, and not a Program", where,
                "return dataclasses.replace(program, ...), or the program itself where there is nothing to do",
            )  # fmt: skip
        if (changed := _changed(state, _state(before))) is not None:
            raise InputError(
                f"the pass changed {changed} of the Program that it was given", where,
                "copy it before you change it (csc.ir.graph.copy_graph), and return dataclasses.replace(program, ...)",
            )  # fmt: skip
        if program.facts != before.facts or program.history != before.history:
            raise InputError("the pass changed the facts or the history of the Program", where, "the runner keeps them")
        if "frozen" not in (*before.facts, *step.establishes) and _trains(program) != _trains(before):
            raise InputError(
                "the pass changed what trains, before that is decided", where, "put it behind the pass that freezes"
            )
        try:
            return self._sound_behind(step, name, program)
        except VerificationError as error:
            raise VerificationError(error.what, error.where, MEND) from error
        except CscError:
            raise
        except Exception as error:
            raise InputError(
                f"what the pass gave cannot be looked through ({type(error).__name__}: {error})", where, MEND
            ) from error

    def _sound_behind(self, step: Pass, name: str, program: Program) -> Program:
        program = replace(program, facts=facts_behind(step, program.facts))
        verify(program, after=name, sound=self._sound)
        if self._options.mesh.sizes(Group.TENSOR) != (1,):
            verify_on(self._options.mesh, program, name, self._placed)
        for fact in program.facts:
            if fact in FACTS and not FACTS[fact].holds(program):
                promise = "establishes it" if fact in step.establishes else "does not break it"
                raise VerificationError(
                    f"`{fact}` does not hold ({FACTS[fact].meaning}), and the pass says that it {promise}",
                    f"after pass {name}", "report it: a pass of csc is wrong",
                )  # fmt: skip
        return program


def _trains(program: Program) -> dict[str, bool]:
    return {parameter.name: parameter.trainable for parameter in program.parameters}


def _state(program: Program) -> dict[str, Hashable]:
    """What a pass could change in place, by what it is."""
    state: dict[str, Hashable] = {}
    for name, graph in _graphs(program):
        nodes = tuple((node.name, node.op, str(node.target), str(node.args), str(node.kwargs)) for node in graph.nodes)
        state[f"the graph of {name}"] = nodes
    for mapping in ("constants", "modules", "templates", "variants"):
        items = getattr(program, mapping).items()
        state[f"`{mapping}`"] = tuple((key, id(value)) for key, value in items)
    for key, constant in program.constants.items():
        state[f"the constant {key}"] = 0 if constant.is_inference() else constant._version
    return state


def _graphs(program: Program) -> Iterator[tuple[str, fx.Graph]]:
    yield "the model", program.graph
    if program.shared is not None:
        yield "shared values", program.shared
    for template in program.templates.values():
        yield template.name, template.graph
        if template.joint is not None:
            yield f"{template.name}, joint", template.joint
    for variant in program.variants.values():
        yield f"{variant.name}, pruned", variant.pruned
        parts = (variant.forward, variant.backward_input, variant.backward_weight, variant.backward)
        yield from ((f"{variant.name}, {letter}", part) for letter, part in zip("FBWO", parts) if part is not None)


def _changed(before: dict[str, Hashable], now: dict[str, Hashable]) -> str | None:
    return next((name for name in {**before, **now} if before.get(name) != now.get(name)), None)


def after(history: Sequence[Program], name: str) -> Program:
    """The Program after a pass ("capture" for the first). Raises InputError for an unknown name."""
    names = [CAPTURE, *(program.history[-1].name for program in history[1:])]
    if name not in names:
        raise InputError(f"there is no pass {name!r}", "--after", f"choose one of {', '.join(names)}")
    return history[names.index(name)]


def _summary(program: Program) -> str:
    """What the Program holds now, in a few words."""
    if program.schedule is not None:
        ranks = program.schedule.ranks
        return f"{program.schedule.name}: {sum(map(len, ranks))} actions on {len(ranks)} ranks"
    if program.stages:
        return f"{len(program.stages)} stages, {len(program.messages)} messages"
    if program.variants:
        nodes = sum(len(v.pruned.nodes) for v in program.variants.values())
        return f"{len(program.variants)} variants, {nodes} nodes"
    if program.regions:
        return f"{len(program.regions)} regions, {len(program.templates)} templates"
    return f"{len(program.graph.nodes)} nodes"
