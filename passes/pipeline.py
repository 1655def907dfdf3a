"""Which passes run, in which order: csc's own, users' own between them, and what each may count on.

A pipeline is a tuple of passes. Each pass says which facts it requires of the Program that it is given, which it
establishes and which it breaks; a pipeline in which something is missing is refused before anything is traced.

Terms
  fact       something that holds of a Program from one pass on until another breaks it: those of csc are in FACTS, each
             pass may have names of its own besides
  own        csc's own passes, whose fields are options of csc.compile
  tracing    the passes before the one that establishes `frozen`: they run once for all frozen sets
  dividing   from there to the one that establishes `stages`: what they give is costed
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from csc.passes.attention import AttentionOrderPass, AttentionPass
from csc.passes.context import ContextPass
from csc.passes.data_parallel import DataParallelPass
from csc.passes.differentiate import DifferentiatePass
from csc.passes.dropout import DropoutPass
from csc.passes.features import FeaturesPass
from csc.passes.freeze import FreezePass
from csc.passes.head import HeadPass
from csc.passes.in_place import InPlacePass
from csc.passes.line import check_fields, place_of, read, text_of
from csc.passes.loss import LossPass
from csc.passes.overlap import OverlapPass
from csc.passes.partition import PartitionPass, SchedulePass
from csc.passes.precision import PrecisionPass
from csc.passes.prune import PrunePass
from csc.passes.recompute import RecomputePass
from csc.passes.regions import RegionsPass
from csc.passes.sequence import SequencePass
from csc.passes.shapes import ShapesPass
from csc.passes.simplify import SimplifyPass
from csc.passes.split import SplitPass
from csc.passes.tensor import TensorPass
from csc.passes.views import ViewsPass

from csc.errors import InputError
from csc.ir import graph as g
from csc.ir.mesh import Mesh
from csc.ir.program import CAPTURED, Options, Pass, Program

PLACE = "passes"
TAKEN = ("capture", "normalise")  # what the records of a Program call its capture

# --- Facts ------------------------------------------------------------------------------------------------------------


class Fact(NamedTuple):
    """What it says of a Program, and whether a Program is as it says; always, where nothing in it shows that."""

    meaning: str
    holds: Callable[[Program], bool] = lambda program: True


def _joints(program: Program) -> bool:
    return bool(program.templates) and all(template.joint is not None for template in program.templates.values())


def _in_numbers(program: Program) -> bool:
    values = [node.meta.get("val") for node in g.placeholders(program.graph)]
    return all(type(size) is int for value in values for size in getattr(value, "shape", ()))


FACTS: Mapping[str, Fact] = {
    "captured": Fact("`graph` is the model's forward, which `regions` will cut", lambda program: not program.regions),
    "unweighed": Fact("the loss is the graph's only output"),
    "sized": Fact("every value has a size in numbers", _in_numbers),
    "seeded": Fact("random calls draw from the seed of their microbatch"),
    "precision": Fact("casts are in place"),
    "attention": Fact("attention whose mask can be read is one operator"),
    "context": Fact("with cp, `graph` is that of a rank's own tokens"),
    "data_parallel": Fact("encoders with a dp, cp or tp of their own are on a rank's own samples"),
    "weighed": Fact("how losses of microbatches combine is known", lambda program: bool(program.loss_weight)),
    "head": Fact("large logits are no values"),
    "regions": Fact("the model is cut into regions", lambda program: bool(program.regions and program.templates)),
    "forward": Fact(
        "templates have forward graphs, which `differentiate` will read",
        lambda program: (
            bool(program.templates) and all(template.joint is None for template in program.templates.values())
        ),
    ),
    "tensor": Fact("with tp, templates are those of one rank"),
    "sequence": Fact("with sequence_parallel, tokens are shared out between divided products"),
    "differentiated": Fact("templates have joint graphs, which `prune` will read", _joints),
    "simplified": Fact("joint graphs are shortened"),
    "views": Fact("joint graphs have no view twice"),
    "frozen": Fact("each parameter says whether it trains"),
    "pruned": Fact("variants have pruned graphs, which `split` will read", lambda program: bool(program.variants)),
    "features": Fact("encoders whose features come with the batch are left out"),
    "recompute": Fact("variants say what F keeps for B"),
    "split": Fact("variants have F, B and W, which are emitted", lambda program: bool(program.variants) and all(
        variant.forward is not None for variant in program.variants.values()
    )),
    "unordered": Fact("no call of F, B and W overlaps with another or writes in place: they may still be rewritten"),
    "attention_order": Fact("attention on CPUs adds in the order that takes least time"),
    "overlap": Fact("exchanges of B run beside W"),
    "in_place": Fact("calls that write over their operands are marked"),
    "stages": Fact("regions are in stages, and stages on ranks", lambda program: bool(program.stages)),
    "scheduled": Fact("each rank has its list of actions", lambda program: program.schedule is not None),
}  # fmt: skip
LAST = "scheduled"


def unmet(step: Pass, facts: Iterable[str]) -> list[str]:
    """The facts that a pass requires, and that are not among these."""
    return [fact for fact in step.requires if fact not in facts]


def facts_behind(step: Pass, facts: Iterable[str]) -> tuple[str, ...]:
    """The facts that hold behind a pass where these do before it."""
    return tuple(dict.fromkeys((*(fact for fact in facts if fact not in step.breaks), *step.establishes)))


# --- The pipeline -----------------------------------------------------------------------------------------------------


class Pipeline(tuple[Pass, ...]):
    """Passes in the order they run: a tuple that prints as a line, `csc.pipeline(line)` reads it."""

    __slots__ = ()

    def __str__(self) -> str:
        return ",".join(text_of(step, step.name if of_csc(step) else place_of(type(step))) for step in self)

    def before(self, name: str, *steps: Pass) -> Pipeline:
        """A pipeline with these passes in front of the one of that name. InputError if there is none, or two."""
        place = self._place(name)
        return Pipeline((*self[:place], *steps, *self[place:]))

    def after(self, name: str, *steps: Pass) -> Pipeline:
        """A pipeline with these passes behind the one of that name. InputError if there is none, or two."""
        place = self._place(name) + 1
        return Pipeline((*self[:place], *steps, *self[place:]))

    def replaced(self, name: str, *steps: Pass) -> Pipeline:
        """A pipeline with these passes in place of the one of that name. InputError if there is none, or two."""
        place = self._place(name)
        return Pipeline((*self[:place], *steps, *self[place + 1 :]))

    def without(self, *names: str) -> Pipeline:
        """A pipeline without the passes of these names. InputError if there is none, or two, of a name."""
        left_out = {self._place(name) for name in names}
        return Pipeline(step for place, step in enumerate(self) if place not in left_out)

    def _place(self, name: str) -> int:
        places = [place for place, step in enumerate(self) if step.name == name]
        if len(places) == 1:
            return places[0]
        names = [step.name for step in self]
        if places:
            raise InputError(
                f"pass {name} stands {len(places)} times in the pipeline", PLACE,
                f"take it apart as a tuple: it is at {', '.join(map(str, places))}",
            )  # fmt: skip
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise InputError(f"the pipeline has no pass {name!r}", PLACE, f"{hint}it has {', '.join(names)}")


OWN = Pipeline((
    ShapesPass(), DropoutPass(), PrecisionPass(), AttentionPass(), ContextPass(), DataParallelPass(), LossPass(),
    HeadPass(), RegionsPass(), TensorPass(), SequencePass(), DifferentiatePass(), SimplifyPass(), ViewsPass(),
    FreezePass(), PrunePass(), FeaturesPass(), RecomputePass(), SplitPass(), AttentionOrderPass(), OverlapPass(),
    InPlacePass(), PartitionPass(), SchedulePass(),
))  # fmt: skip
CLASSES: Mapping[str, type[Pass]] = {step.name: type(step) for step in OWN}
OWNERS: Mapping[str, str] = {
    option.name: step.name for step in OWN for option in fields(step)
}  # of options: their passes


def of_csc(step: Pass) -> bool:
    """Whether it is a pass of csc."""
    return CLASSES.get(step.name) is type(step)


def pipeline_of(options: Options) -> Pipeline:
    """The passes that run with these options, and those of csc with what the options say."""
    steps = OWN if options.passes is None else options.passes
    return Pipeline(of_options(step, options) for step in steps)


def of_options(step: Pass, options: Options) -> Pass:
    """A pass of csc with what the options say of it; any other pass as it is."""
    if not of_csc(step):
        return step
    return replace(step, **{option.name: getattr(options, option.name) for option in fields(step)})


def tracing(options: Options) -> Pipeline:
    """The passes that run once for all frozen sets."""
    return until(pipeline_of(options), "frozen")


def planning(options: Options) -> Pipeline:
    """Those behind them."""
    steps = pipeline_of(options)
    return Pipeline(steps[len(until(steps, "frozen")) :])


def dividing(options: Options) -> Pipeline:
    """Those of them before regions become stages."""
    return until(planning(options), "stages")


def until(steps: Sequence[Pass], fact: str) -> Pipeline:
    """The passes in front of the one that establishes a fact; all where none does."""
    return Pipeline(steps[: next((place for place, step in enumerate(steps) if fact in step.establishes), len(steps))])


def traced_by_users(options: Options) -> bool:
    """Whether a pass of a user runs among those that trace: it may look at any option."""
    return options.passes is not None and not all(map(of_csc, tracing(options)))


def first_with(history: Sequence[Program], fact: str) -> Program:
    """The first Program of which a fact holds; the last one before it is cut where none does."""
    return next(
        (program_then for program_then in history if fact in program_then.facts),
        [program_then for program_then in history if "captured" in program_then.facts][-1],
    )


# --- What users give --------------------------------------------------------------------------------------------------


def given(value: Any, load: Callable[[str], Any]) -> Pipeline:
    """The pipeline that a user gives: a line, or passes in any sequence. InputError for anything else.

    load: as for csc.passes.line.read.
    """
    if isinstance(value, str):
        return Pipeline(read(value, CLASSES, load))
    if isinstance(value, Pass) or not isinstance(value, Iterable):
        raise InputError(
            f"passes is a {type(value).__name__}", PLACE, "give a line, or a tuple of passes: csc.pipeline()"
        )
    steps = tuple(value)
    for place, step in enumerate(steps):
        _check_pass(step, place)
    return Pipeline(steps)


def _check_pass(step: Any, place: int) -> None:
    where = f"{PLACE}[{place}]"
    if isinstance(step, type) and issubclass(step, Pass):
        raise InputError(f"{step.__name__} is a class", where, f"make a pass of it: {step.__name__}()")
    if not isinstance(step, Pass):
        kind = "a function" if callable(step) and hasattr(step, "__code__") else f"a {type(step).__name__}"
        name = f" ({step})" if isinstance(step, str) else ""
        raise InputError(
            f"{kind}{name} is no pass", where,
            "make it the __call__ of a frozen dataclass of csc.Pass: docs/writing-a-pass.md",
        )  # fmt: skip
    if type(step).__call__ is Pass.__call__:
        raise InputError(f"pass {step.name} has no __call__", where, "write __call__(self, program, options)")
    if not re.fullmatch(r"[A-Za-z_][\w-]*", step.name) or step.name in TAKEN:
        raise InputError(f"{step.name!r} is no name of a pass", where, "name it with letters, digits, _ and -")
    for field in ("requires", "establishes", "breaks"):
        names = getattr(type(step), field)
        if not isinstance(names, tuple) or not all(isinstance(fact, str) for fact in names):
            raise InputError(f"{field} of pass {step.name} is {names!r}", where, f'write a tuple: {field} = ("split",)')
    check_fields(step, where)


def said_of_options(steps: Iterable[Pass]) -> dict[str, Any]:
    """What csc's own passes among these say of options."""
    by_passes: dict[str, Any] = {}
    for step in steps:
        if of_csc(step):
            by_passes |= {
                option.name: value for option in fields(step)
                if (value := getattr(step, option.name)) != getattr(CLASSES[step.name](), option.name)
            }  # fmt: skip
    return by_passes


def plain(steps: Iterable[Pass]) -> Pipeline | None:
    """The passes without what they say of options; None where they are csc's own in csc's order."""
    bare = Pipeline(type(step)() if of_csc(step) else step for step in steps)
    return None if bare == OWN else bare


def check(options: Options) -> None:
    """InputError if a pass of the options' pipeline requires a fact that does not hold where it stands, or establishes
    one that does; if the pipeline does not lead to a program; or if an option is what a pass does that is left out.
    """
    steps = pipeline_of(options)
    facts: tuple[str, ...] = CAPTURED
    for place, step in enumerate(steps):
        for fact in unmet(step, facts):
            raise InputError(
                f"pass {step.name} requires `{fact}`, {_why_not(fact, steps, place)}", _where(steps, place),
                _remedy(fact, steps, place),
            )  # fmt: skip
        for fact in step.establishes:
            if fact in facts and fact not in step.breaks:
                earlier = next(
                    (before.name for before in reversed(steps[:place]) if fact in before.establishes), "the capture"
                )
                raise InputError(
                    f"pass {step.name} establishes `{fact}`, which {earlier} has established already",
                    _where(steps, place), f"leave one out, or say breaks = ({fact!r},) if {step.name} does it anew",
                )  # fmt: skip
        facts = facts_behind(step, facts)
    for fact, why in _needed(options):
        if fact not in facts:
            raise InputError(f"the passes end without `{fact}`, {why}", PLACE, _remedy(fact, steps, len(steps)))
    _check_owners(steps, options)


def _needed(options: Options) -> list[tuple[str, str]]:
    """Facts that have to hold at the end, with the reason."""
    mesh = options.mesh
    needed = [(LAST, "which every program needs")]
    if mesh != Mesh(dp=mesh.dp, pp=mesh.pp) and not mesh.is_open:
        needed += [(fact, f"which a program for {mesh} needs") for fact in ("context", "data_parallel", "tensor")]
    if options.features:
        needed.append(("features", "which cache_features and encode_ahead need"))
    return needed


def _check_owners(steps: Sequence[Pass], options: Options) -> None:
    names = {step.name for step in steps if of_csc(step)}
    for name, owner in OWNERS.items():
        if owner not in names and getattr(options, name) != getattr(Options(), name):
            raise InputError(
                f"{name} is an option of pass {owner}, which is not among the passes", PLACE,
                f"leave {name} out, or put {owner} back",
            )  # fmt: skip


def _where(steps: Sequence[Pass], place: int) -> str:
    neighbours = [f"behind {steps[place - 1].name}" if place else "at the beginning"]
    return f"{PLACE}: {steps[place].name}, {neighbours[0]}"


def _why_not(fact: str, steps: Sequence[Pass], place: int) -> str:
    broken = next((before.name for before in reversed(steps[:place]) if fact in before.breaks), None)
    if broken is not None:
        return f"which {broken} broke"
    return "which nothing before it establishes"


def _remedy(fact: str, steps: Sequence[Pass], place: int) -> str:
    """Where in the line what should stand."""
    name = steps[place].name if place < len(steps) else "the end"
    breaks = next((before.name for before in reversed(steps[:place]) if fact in before.breaks), None)
    if breaks is not None:
        return f"put {name} in front of {breaks}" if place < len(steps) else f"leave {breaks} out"
    later = next((after.name for after in steps[place + 1 :] if fact in after.establishes), None)
    if later is not None:
        return f"{later} establishes it: put {name} behind {later}"
    own_step = next((known_step.name for known_step in OWN if fact in known_step.establishes), None)
    if own_step is not None:
        return (
            f"{own_step} establishes it: put {own_step} in front of {name}"
            if place < len(steps)
            else f"put {own_step} at the end"
        )
    close = difflib.get_close_matches(fact, FACTS, n=1)
    hint = f"did you mean `{close[0]}`? " if close else ""
    return f"{hint}no pass of csc or of the line establishes it; csc's facts are {', '.join(FACTS)}"


def named_alike(names: Sequence[str], name: str) -> str:
    """A name for one more pass of a history that has passes of these names."""
    count = sum(other == name or other.startswith(f"{name}#") for other in names)
    return f"{name}#{count + 1}" if count else name
