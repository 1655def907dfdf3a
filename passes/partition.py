"""Passes `partition` and `schedule`: regions to stages, stages to ranks, the messages between them, and the order of
work.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import ClassVar

from csc.passes import pipeline_problem as numbers
from csc.passes.pipeline_problem import encoded_ahead

from csc.analysis.costs import basis
from csc.analysis.hardware import Hardware
from csc.errors import InputError, ScheduleError
from csc.ir import graph as g
from csc.ir.groups import LOSS_WEIGHTS
from csc.ir.mesh import Mesh
from csc.ir.program import (
    LOSS,
    Context,
    Message,
    Options,
    Pass,
    Plan,
    Program,
    Region,
    Stage,
    compute_dtypes,
    loss_stage,
)
from csc.ir.schedule import Schedule, check_whole_forward, parse, part, verify
from csc.planning.partition import at_cuts, own_stages
from csc.planning.plan import PipelinePlan as Decided
from csc.planning.plan import plan
from csc.planning.problem import Lumped, Problem, channels, orders, together
from csc.simulation.page import bytes_text
from csc.simulation.pipeline import to_json

# --- A schedule that the user wrote or edited, given as a file instead of a name -------------------------------------


def given_schedule(options: Options) -> Schedule | None:
    """The schedule that the options hold, or name the file of; None if they name a kind of schedule."""
    if isinstance(options.schedule, Schedule):
        return options.schedule
    if options.schedule.endswith(".txt") or "/" in options.schedule:
        return from_file(Path(options.schedule), options)
    return None


def from_file(path: Path, options: Options) -> Schedule:
    """The schedule of a file. InputError if it cannot be read; ScheduleError, with the line, for text that is none."""
    try:
        schedule = parse(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read it: {error}", str(path), "give the path of a schedule file") from None
    except ScheduleError as error:
        raise ScheduleError(error.what, f"{path}, {error.where}", error.remedy) from None
    if len(schedule.ranks) != options.mesh.pp:
        raise InputError(
            f"it lists {len(schedule.ranks)} ranks, the mesh has pp={options.mesh.pp}", str(path), "make them equal"
        )
    return schedule


# --- Pass `partition`: regions to stages, stages to ranks, and the messages between stages ---------------------------


FEWEST_CHUNKS = 2  # that schedules with several stages on a rank are made for


@dataclass(frozen=True)
class PartitionPass(Pass):
    """Decide which rank runs what: with `stages` or `cuts` as the user says, else the plan with the least makespan.

    Ensures   every region is in one stage, every stage on one rank; values go from lower to higher stages, straight to
              every stage that reads them; a gradient visits the readers of its value from the last to the first; no
              message for a gradient that nobody needs; the plan, with the times it expects, is in `plan`.
    Before    regions: embed, layers.0, layers.1, head
    After     stage 0: embed, layers.0;  stage 1: layers.1, head;  F 0>1: layers.0;  B 1>0: layers.0
    """

    requires: ClassVar = ("regions", "frozen", "split")
    establishes: ClassVar = ("stages",)

    cuts: tuple[str, ...] | None = None
    stages: tuple[tuple[str, ...], ...] | None = None
    placement: tuple[int, ...] | None = None
    schedule: str | Schedule = "auto"
    chunks: int | None = None

    def __call__(self, program: Program, options: Options) -> Program:
        options = self.over(options)
        if program.batch_loss is not None and options.microbatches > 1:
            options = replace(options, schedule=_whole_forward(options))
        problem = numbers.problem(program, options)
        program = replace(program, contexts=tuple(_priced(context, program, options) for context in program.contexts))
        if options.part:
            options = replace(options, schedule=_of_part(program, problem, options))
        try:
            decided = decide(program, problem, options)
        except ScheduleError as error:
            if not options.part:
                raise
            raise InputError(
                f"a microbatch that lacks entries of the batch needs other messages between the stages than one that "
                f"has them all ({error.what})",
                "stages",
                "use fewer chunks (chunks=1), or stages= in which what takes features into the text is where they are "
                "read",
            ) from error
        home = [0] * len(program.regions)
        for index, members in enumerate(decided.stages):
            for unit in members:
                home[unit] = index
        built = tuple(
            stage_of(
                program,
                index,
                decided.placement[index],
                [program.regions[unit] for unit in sorted(members)],
                decided.pipeline.divided[index],
            )
            for index, members in enumerate(decided.stages)
        )
        assert {stage.rank for stage in built} == set(range(options.mesh.pp))
        _refuse_uneven(program, built, options.mesh)
        profiles = numbers.profiles(program, options)
        divided = replace(program, stages=built, messages=_messages(program, problem, home))
        ahead = encoded_ahead(divided, decided, options)
        record = Plan(
            schedule=decided.schedule,
            costs=_basis(program, profiles, options.fuse),
            layout=decided.layout,
            pipeline=to_json(decided.pipeline),
            makespan=decided.makespan,
            bound=decided.bound,
            shared_bound=decided.shared_bound,
            peak_memory=tuple(decided.peak_memory),
            peak_flops=sum(_peak(program, profile) for profile in profiles) / len(profiles),
            ahead=ahead.orders if ahead is not None else None,
        )
        return replace(divided, plan=record, notes=(*program.notes, *_over_batch(program, options)))


def _over_batch(program: Program, options: Options) -> list[str]:
    """What a user should know of a loss over the whole batch."""
    if program.batch_loss is None:
        return []
    parts, kept = options.microbatches * options.mesh.dp, numbers.batch_loss_bytes(program, options)
    return [
        f"the loss is over the whole batch: samples meet in {program.batch_loss.meets}; values of all {parts} "
        f"microbatches are brought together there, F of all comes before any B, and each rank of the loss' stage holds "
        f"{bytes_text(kept)} for it"
    ]


ALL_FORWARD = "gpipe"  # the schedule with F of all microbatches before any B


def _whole_forward(options: Options) -> str | Schedule:
    """The schedule of a program whose loss needs F of all microbatches before any B. InputError for one of another
    name; one that is given whole is checked by `csc.ir.schedule.check_whole_forward`.
    """
    schedule = given_schedule(options)
    if schedule is not None:
        return schedule
    if options.schedule in ("auto", ALL_FORWARD):
        return ALL_FORWARD
    raise InputError(
        f"the loss is over the whole batch, so that F of all microbatches comes before any B, and {options.schedule!r} "
        "is no such schedule", "schedule", f"leave schedule= out, or say schedule={ALL_FORWARD!r}",
    )  # fmt: skip


def _refuse_uneven(program: Program, stages: Sequence[Stage], mesh: Mesh) -> None:
    """InputError for a component at a position with another number of ranks than the mesh gives it, and for a parameter
    of stages with different numbers of ranks, which no two of these hold alike.
    """
    if not mesh.in_front:
        return
    held: dict[str, tuple[int, int]] = {}
    component = {region.name: region.component for region in program.regions}
    for stage in stages:
        extent = mesh.extent(stage.rank)
        for name in stage.regions:
            own = mesh.extent_of(component.get(name, ""))
            if name in component and own != extent:
                raise InputError(
                    f"{name} of {component[name]}, which the mesh puts on {_ranks(own)}, is at position {stage.rank}, "
                    f"which has {_ranks(extent)}", "schedule",
                    "leave the schedule out, or give it the stages of components on another number of ranks at the "
                    "first positions",
                )  # fmt: skip
        for name in stage.parameters:
            if held.setdefault(name, extent) != extent:
                components = " and ".join(
                    sorted({region.component for region in program.regions if name in region.parameters})
                )
                raise InputError(
                    f"{name} is a parameter of {components}, which are on different numbers of ranks", "mesh",
                    "put both on as many: leave dp of the one on another number out of the mesh",
                )  # fmt: skip


def _ranks(extent: tuple[int, int]) -> str:
    replicas, tp = extent
    return f"{tp} tp ranks for each of {replicas} replicas" if replicas > 1 else f"{tp} tp ranks"


def _basis(program: Program, profiles: Sequence[Hardware], fuse: bool) -> str:
    """Where the seconds of each pipeline rank come from."""
    ranks: dict[str, list[int]] = {}
    for rank, profile in enumerate(profiles):
        ranks.setdefault(basis(program, profile, fuse), []).append(rank)
    if len(ranks) == 1:
        return next(iter(ranks))
    return "; ".join(f"{text} on ranks {', '.join(map(str, ranks_of_text))}" for text, ranks_of_text in ranks.items())


def _peak(program: Program, profile: Hardware) -> float:
    """FLOP/s of a device in the dtype that most numbers of the model are computed in, packed weights aside; 0: the
    profile does not say.
    """
    sizes: dict[str, int] = {}
    dtypes = compute_dtypes(program)
    for parameter in program.parameters:
        dtype = dtypes.get(parameter.name, parameter.dtype)
        if not dtype.is_floating_point:
            continue
        name = str(dtype).removeprefix("torch.")
        sizes[name] = sizes.get(name, 0) + math.prod(parameter.shape)
    most = max(sizes, key=lambda name: sizes[name], default="")
    return float(profile.peak.get(most, 0.0))


def decide(program: Program, problem: Problem, options: Options, effort: float = 1.0) -> Decided:
    """The plan of the program's problem as the options ask for it. effort, InputError: as of csc.planning.plan."""
    if options.mesh.pp > len(program.regions):
        raise InputError(
            f"the mesh asks for {options.mesh.pp} stages, and {program.name} has {len(program.regions)} regions",
            "mesh",
            f"use pp={len(program.regions)} or less",
        )  # fmt: skip
    stages = _given(program, options)
    own, in_front = options.mesh.own("pp"), options.mesh.in_front
    if stages is None and own:
        stages = own_stages(problem, tuple(own.items()), tuple(in_front.items()))
    placement = tuple(range(options.mesh.pp)) if in_front else options.placement
    written = given_schedule(options)
    if written is not None:
        placement = tuple(written.placement.values())
    lumps = searched(program, problem, options) if stages is None else together(problem, range(len(problem.units)))
    planned = plan(
        lumps.problem,
        schedule=written if written is not None else options.schedule,
        chunks=options.chunks,
        stages=stages,
        placement=placement,
        effort=effort,
    )
    return replace(planned, stages=lumps.stages(planned.stages))


def searched(program: Program, problem: Problem, options: Options) -> Lumped:
    """The problem in which csc looks for stages: regions that stay together are one unit of it."""
    return together(problem, _homes(program, problem, options))


def _homes(program: Program, problem: Problem, options: Options) -> list[int]:
    """For each region the one that it stays with: what joins values and has no parameters, such as what puts features
    into the text, stays with the first that reads it. A microbatch without features goes straight there, and so needs
    no message that others have not. Where all regions are wanted as stages of their own, or another has to run between
    the two, each is alone.
    """
    maker = {value: unit for unit, region in enumerate(program.regions) for value in region.outputs}
    read = [{maker[value] for value in region.activations} for region in program.regions]
    first_reader: dict[int, int] = {}
    for unit in reversed(range(len(read))):
        first_reader |= dict.fromkeys(read[unit], unit)
    home = list(range(len(read)))
    earlier: list[list[int]] = [[] for _ in read]
    for a, b in orders(problem):
        earlier[b].append(a)
    for unit in reversed(home):
        if not program.regions[unit].parameters and len(read[unit]) > 1 and unit in first_reader:
            last = home[first_reader[unit]]
            if not _parted(earlier, home, unit, last):
                home[unit] = last
    wanted = max(len(options.placement or ()), options.mesh.pp * (options.chunks or FEWEST_CHUNKS))
    return home if len(set(home)) >= wanted else list(range(len(home)))


def _parted(earlier: Sequence[Sequence[int]], home: Sequence[int], unit: int, last: int) -> bool:
    """Whether something that stays elsewhere comes after `unit` and before one that stays with `last`."""
    between = {unit}
    for other in range(unit + 1, last + 1):
        if between.intersection(earlier[other]):
            if home[other] != last:
                between.add(other)
            elif any(unit_read in between and unit_read != unit for unit_read in earlier[other]):
                return True
    return False


def _given(program: Program, options: Options) -> list[list[int]] | None:
    """The regions of each stage as the user wants them; None: csc decides."""
    if options.cuts is not None and options.stages is not None:
        raise InputError("both cuts and stages are given", "cuts", "give one of them")
    names = [region.name for region in program.regions]
    if options.stages is not None:
        return _in_part(program, options) if options.part else _matching(names, options.stages)
    if options.cuts is None:
        return None
    starts = at_cuts(names, options.cuts)
    count = len(options.placement) if options.placement is not None else options.mesh.pp * (options.chunks or 1)
    if len(starts) != count:
        raise InputError(
            f"{len(options.cuts)} cuts make {len(starts)} stages, and the mesh has pp={options.mesh.pp}", "cuts",
            f"name {count - 1} regions, each the first of a stage",
        )  # fmt: skip
    bounds = [*starts, len(names)]
    return [list(range(bounds[i], bounds[i + 1])) for i in range(len(starts))]


def _in_part(program: Program, options: Options) -> list[list[int]]:
    """The regions of each stage of a larger program that are there. What has no parameters may be called otherwise in
    both (one of two places where features are put into the text), and hand on what the larger program hands on by way
    of a region that is not there: it goes to the first stage between what it reads and what reads it whose messages
    the larger program has too.
    """
    assert isinstance(options.schedule, Schedule)
    stages, placement = options.stages or (), options.schedule.placement
    sent = {action.channel for actions in options.schedule.ranks for action in actions if action.kind == "SEND"}

    def goes(source: int, destination: int) -> bool:
        return placement[source] == placement[destination] or ("F", source, destination) in sent

    named = {name: stage for stage, members in enumerate(stages) for name in members}
    maker = {value: unit for unit, region in enumerate(program.regions) for value in region.outputs}
    reads = [[maker[value] for value in region.activations] for region in program.regions]
    read_by: list[list[int]] = [[] for _ in reads]
    for unit, read in enumerate(reads):
        for value in dict.fromkeys(read):
            read_by[value].append(unit)
    home = [named.get(region.name, 0) for region in program.regions]
    for unit in reversed(range(len(home))):
        readers = [home[other] for other in read_by[unit]]
        if program.regions[unit].parameters or not readers:
            continue
        stages_above = [home[value] for value in reads[unit]]
        first, last = max(stages_above, default=home[unit]), min(readers)
        fitting = [
            stage
            for stage in range(first, last + 1)
            if all(goes(stage_above, stage) for stage_above in stages_above)
            and all(goes(stage, reader) for reader in readers)
        ]
        if home[unit] not in fitting:
            home[unit] = fitting[0] if fitting else last if home[unit] < first else home[unit]
    return [[unit for unit, stage_of_unit in enumerate(home) if stage_of_unit == stage] for stage in range(len(stages))]


def _of_part(program: Program, problem: Problem, options: Options) -> Schedule:
    """What of the given schedule there is to do in these stages, some of which may be empty."""
    assert isinstance(options.schedule, Schedule)
    stages = _given(program, options) or []
    home = {unit: index for index, members in enumerate(stages) for unit in members}
    needs = [[program.regions[unit] for unit in members] for members in stages]
    return part(
        options.schedule,
        channels(problem.values, [home[unit] for unit in range(len(program.regions))]),
        [any(region.needs_dx or region.needs_dw for region in members) for members in needs],
        [any(region.needs_dw for region in members) for members in needs],
        [any(problem.units[unit].gathered for unit in members) for members in stages],
    )


def _matching(names: Sequence[str], patterns: Sequence[Sequence[str]]) -> list[list[int]]:
    """For each stage the regions that its names and globs match; every region belongs to exactly one."""
    home: dict[int, int] = {}
    for stage, wanted in enumerate(patterns):
        for pattern in wanted:
            indices = [i for i, name in enumerate(names) if fnmatchcase(name, pattern) or name == pattern]
            if not indices:
                close = difflib.get_close_matches(pattern, names, 3, 0.5) or list(names[:3])
                raise InputError(f"no region is called {pattern!r}", "stages", f"close names: {', '.join(close)}")
            for i in indices:
                if home.setdefault(i, stage) != stage:
                    raise InputError(
                        f"region {names[i]!r} is in stage {home[i]} and in stage {stage}", "stages", "list it once"
                    )
    left = [name for i, name in enumerate(names) if i not in home]
    if left:
        raise InputError(f"region {left[0]!r} is in no stage", "stages", f"{len(left)} regions are left: list them")
    return [[i for i in home if home[i] == stage] for stage in range(len(patterns))]


def _priced(context: Context, program: Program, options: Options) -> Context:
    """How tokens are spread, with the seconds that the dispatch of a batch weighs against each other."""
    hardware = numbers.chosen_hardware(program, options)
    computed = [dtype for dtype in compute_dtypes(program).values() if dtype.is_floating_point]  # not packed weights
    dtype = str(min(computed, key=lambda dtype: dtype.itemsize)).removeprefix("torch.")
    wire = hardware.within if context.ranks <= hardware.ranks_per_node else hardware.between
    return replace(
        context,
        tile_seconds=context.tile_flops / hardware.rate(dtype),
        block_seconds=context.block_bytes / wire.bandwidth,
    )


def _messages(program: Program, problem: Problem, home: Sequence[int]) -> tuple[Message, ...]:
    names = numbers.names(program)
    return tuple(
        Message(*channel, tuple(names[position] for position in carried))
        for channel, carried in channels(problem.values, home).items()
    )


def stage_of(program: Program, index: int, rank: int, regions: Sequence[Region], divided: bool) -> Stage:
    """A stage of these regions, with what they read."""
    tables = list(dict.fromkeys(name for region in regions for name in region.shared))
    if program.loss_tokens and (any(LOSS in region.outputs for region in regions) or _weighs(program, tables)):
        tables.append(program.loss_tokens)
    needed = g.ancestors(shared_outputs(program, tables))
    roles = [n.meta["role"] for n in g.placeholders(program.shared) if n in needed] if program.shared else []
    components = {name.rpartition(".")[0] for kind, name in roles if kind == "context"}
    for context in program.contexts:
        if context.component in components:
            roles += [node.meta["role"] for node in g.placeholders(context.graph)]
    roles = list(dict.fromkeys(roles))
    parameters = tuple(dict.fromkeys(name for region in regions for name in region.parameters))
    return Stage(
        index=index,
        rank=rank,
        regions=tuple(region.name for region in regions),
        inputs=tuple(name for kind, name in roles if kind == "input"),
        constants=tuple(name for kind, name in roles if kind == "constant"),
        parameters=parameters,
        shared=tuple(tables),
        has_b=any(region.needs_dx or region.needs_dw for region in regions),
        has_w=any(region.needs_dw for region in regions),
        contexts=tuple(context.component for context in program.contexts if context.component in components),
        divided=divided,
    )


def _weighs(program: Program, tables: Sequence[str]) -> bool:
    """Whether these tables tell what terms of the loss weigh."""
    if program.loss_weight != "terms":
        return False
    return any(node.meta.get("role") == LOSS_WEIGHTS for node in g.ancestors(shared_outputs(program, tables)))


def shared_outputs(program: Program, tables: Sequence[str]) -> list:
    """The nodes of the shared graph that make the named tables."""
    assert program.shared is not None
    outputs = dict(zip(program.shared.output_node().meta["names"], g.outputs(program.shared)))
    return [outputs[table] for table in tables]


# --- Pass `schedule`: for every rank the order of its F, B, W, sends and receives ------------------------------------


@dataclass(frozen=True)
class SchedulePass(Pass):
    """Lay out one step of `options.microbatches` microbatches.

    Ensures   every F, B and W exactly once per microbatch, no deadlock; stages without B or W have no slot for them;
              with zero=3 what computes with parameters that ranks divide stands between their GATHER and FREE.
    Before    stages, messages and the plan
    After     rank 0: F 0 0 | SEND F 0>1 0 | F 0 1 | ...;  rank 1: RECV F 0>1 0 | F 1 0 | B 1 0 | SEND B 1>0 0 | ...
    """

    requires: ClassVar = ("stages",)
    establishes: ClassVar = ("scheduled",)

    def __call__(self, program: Program, options: Options) -> Program:
        assert program.plan is not None
        channels = [(m.kind, m.source, m.destination) for m in program.messages]
        has_b, has_w = [stage.has_b for stage in program.stages], [stage.has_w for stage in program.stages]
        divided = [stage.divided for stage in program.stages]
        verify(program.plan.schedule, channels, has_b, has_w, options.microbatches, divided)
        if program.batch_loss is not None:
            check_whole_forward(program.plan.schedule, loss_stage(program))
        return replace(program, schedule=program.plan.schedule)
