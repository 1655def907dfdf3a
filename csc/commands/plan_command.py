"""`csc plan`: what limits a plan's step, what else it could be, and what a change would bring."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from csc.commands.model_options import (
    BatchSizeOption,
    LengthsOption,
    MultipleOption,
    Opening,
    PackedOption,
    PipelineOption,
    on_target,
    over,
)
from csc.commands.printing import Column, JsonOption, Rows, console, print_json, table
from csc.commands.simulate_command import ChromeOption, OutputOption, PageOption, SvgOption, write_timelines
from csc.commands.tables import bound_text, memory_table, show_lengths_plan, show_limits, show_meshes, step_text
from csc.driver.search_clock import SECONDS
from csc.errors import InputError
from csc.simulation.page import bytes_text, seconds_text

if TYPE_CHECKING:
    from csc.driver.compiled import CompiledModel
    from csc.reports.advice import Advice, Row
    from csc.reports.forecast import Forecast, RankMemory
    from csc.reports.survival_price import SurvivalPrice
    from csc.runtime.survival import Survive


TIE = 0.005  # of a step: costs are not known more exactly

RanksOption = Annotated[
    int | None,
    typer.Option("--ranks", "--devices", min=1, help="choose the mesh of so many: tp, cp, pp, dp, ZeRO, microbatches"),
]
SurviveOption = Annotated[
    int | None, typer.Option("--survive", min=1, help="ranks that may be killed: which mesh can, and what it takes")
]
CopiesOption = Annotated[
    int, typer.Option("--copies", min=0, help="with --survive: microbatches after which sums of gradients are sent")
]
MirrorOption = Annotated[
    bool, typer.Option("--mirror", help="with --survive 1: all ranks that are left go on as a mesh of one fewer")
]


@on_target
def plan(
    opening: Opening,
    pp: PipelineOption = None,
    ranks: RanksOption = None,
    samples: Annotated[
        int | None, typer.Option("--samples", min=1, help="with --ranks: samples of a step; else the example's")
    ] = None,
    survive: SurviveOption = None,
    copies: CopiesOption = 0,
    mirror: MirrorOption = False,
    limit: Annotated[
        float, typer.Option("--limit", min=0, help="seconds for the choice, or for alternatives and changes")
    ] = SECONDS,
    lengths: LengthsOption = None,
    batch_size: BatchSizeOption = 128,
    batches: Annotated[int, typer.Option("--batches", min=2, help="with --lengths: number of random steps to try")] = 8,
    multiple: MultipleOption = 64,
    packed: PackedOption = False,
    output: OutputOption = None,
    page: PageOption = None,
    svg: SvgOption = None,
    chrome: ChromeOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show what limits the step, alternatives with time and memory, and what changes would bring. With --lengths:
    choose the mesh, microbatches and stages with the least mean step over random batches of such samples.
    """
    if lengths is not None:
        _refuse_both(ranks, survive)
        request = (batch_size, batches, multiple, packed, limit)
        with opening as compiled:
            for_lengths = _for_lengths(over(pp, compiled), lengths, *request)
        print_json(for_lengths.as_dict()) if json_output else show_lengths_plan(for_lengths, batch_size, batches)
        return
    from csc.driver.mesh_candidates import FixedChoices
    from csc.driver.mesh_choice import choose
    from csc.reports.advice import advice
    from csc.reports.forecast import forecast, memory_forecast
    from csc.reports.survival_price import price_of

    if ranks is not None:
        with opening as compiled:
            asked = _asked(compiled, survive, copies, mirror)
            fixed = FixedChoices(failures=0 if asked is None else asked.failures)
            choice = choose(compiled, ranks, samples, limit, compiled.inspected.progress, fixed)
        print_json(choice.as_dict()) if json_output else show_meshes(choice, limit)
        return
    with opening as compiled:
        compiled = over(pp, compiled)
        price = price_of(compiled, _asked(compiled, survive, copies, mirror))
        costs = forecast(compiled, None)
        held = memory_forecast(compiled.program, compiled.options)
        advised = advice(compiled, limit, compiled.inspected.progress)
    title = f"{compiled.program.name}: {costs.layout}"
    write_timelines([costs.plan], title, output, page, chrome, svg, costs.bound, costs.memory)
    if json_output:
        survived = {"survive": price} if price is not None else {}
        print_json({**costs.as_dict(), "memory": [row.as_dict() for row in held], **vars(advised), **survived})
        return
    _tell(costs, held, price)
    _show(advised, costs, limit)


def _tell(costs: Forecast, held: Sequence[RankMemory], price: SurvivalPrice | None) -> None:
    """What each rank holds, what limits the step, and how long it takes."""
    console.print(f"{escape(costs.schedule)}, {escape(costs.layout)}", highlight=False)
    for rank, (device, holds) in enumerate(zip(costs.devices, costs.holds)):
        console.print(f"rank {rank}, {escape(device)}: {escape(holds)}", highlight=False)
    console.print(memory_table(held, costs.memory, costs.devices))
    for line in price.sentences(costs.plan.makespan) if price is not None else ():
        console.print(escape(line), highlight=False)
    show_limits(costs.limits)
    console.print(escape(step_text(costs)), highlight=False)
    console.print(bound_text(costs), highlight=False)


def _asked(compiled: CompiledModel, failures: int | None, copies: int, mirror: bool) -> Survive | None:
    """`survive=` as the command line has it, else as the model was compiled. InputError for its parts alone."""
    if (copies or mirror) and failures is None:
        raise InputError(
            f"--{'copies' if copies else 'mirror'} is given without --survive", "plan",
            "say how many ranks may be killed: --survive 1",
        )  # fmt: skip
    from csc.runtime.survival import Survive

    return compiled.survive if failures is None else Survive(failures, copies, mirror)


def _refuse_both(ranks: int | None, survive: int | None) -> None:
    """InputError for a number of ranks beside --lengths, to be chosen or that may be killed."""
    if survive is not None:
        raise InputError(
            "--lengths and --survive are given", "plan",
            "ask for the price of --survive with the mesh that --lengths has chosen",
        )  # fmt: skip
    if ranks is not None:
        raise InputError(
            "--lengths and --ranks are given", "plan",
            "with --lengths a mesh of as many ranks as --mesh has is chosen: --mesh pp=N in place of --ranks N",
        )  # fmt: skip


def _for_lengths(compiled: Any, file: Path, *request: Any) -> Any:
    """The plan for the lengths in a file."""
    from csc.balance.sample_costs import of_file
    from csc.reports.data import LengthsRequest, plan_for_lengths

    return plan_for_lengths(compiled, of_file(file), LengthsRequest(*request), compiled.inspected.progress)


def order_sentences(orders: Sequence[tuple[str, float]]) -> list[str]:
    """What a step would take if ranks stood otherwise on their nodes; nothing if they cannot."""
    if len(orders) < 2:
        return []
    (_, here), *elsewhere = orders
    listed = ", ".join(f"{seconds_text(seconds)} with --mesh {mesh}" for mesh, seconds in elsewhere)
    best, least = min(elsewhere, key=lambda order: order[1])
    better = least < here * (1 - 1e-3)
    verdict = f"ranks in the order of {best} are {here / least:.2f} times as fast" if better else "none is faster"
    return [f"ranks stand on several nodes; the step takes {seconds_text(here)}, {listed}: {verdict}\n"]


def faster_sentences(rows: Sequence[Row]) -> list[str]:
    """Of the alternative that is faster than the plan and fits: how to take it, or that both are as good as equal."""
    (this,) = [row for row in rows if row.name.endswith(", this plan")]
    seconds_now = this.makespan or 0.0
    faster = [
        (row.makespan, row) for row in rows if row.makespan is not None and row.makespan < seconds_now and row.fits
    ]
    faster = [(seconds, row) for seconds, row in faster if row.stages in ("planned", "given")]
    if not faster:
        return []
    seconds, best = min(faster, key=lambda row: row[0])
    gain = 1 - seconds / seconds_now
    named = f"{best.name} with {best.on_a_rank} {'stage' if best.on_a_rank == 1 else 'stages'} on a rank"
    if gain < TIE:
        return [f"{escape(named)} is {gain:.2%} faster, which is a tie: no cost is known that exactly\n"]
    free = this.stages == "given" and best.stages != "given"
    chosen = f"--schedule {best.name}" + f" --chunks {best.on_a_rank}" * ((best.on_a_rank or 1) > 1)
    how = f"{chosen}, without the stages that were given," if free else chosen
    return [f"{escape(how)} takes the fastest of them, {gain:.1%} faster than this plan\n"]


def _show(advised: Advice, costs: Forecast, seconds: float) -> None:
    """The two tables, and below them why there is no plan of some rows, and what there was no time for."""
    console.print(*order_sentences(advised.orders), sep="", end="", highlight=False)
    memory = "; ".join(dict.fromkeys(costs.devices)) or (None if costs.memory is None else bytes_text(costs.memory))
    above = "" if memory is None else f", memory limit {memory}"
    how = ", planned with auto" if advised.with_auto else ""
    console.print(_table(f"alternatives{above}", "schedule", advised.alternatives, Column("stages", 3)))
    console.print(*faster_sentences(advised.alternatives), sep="", end="", highlight=False)
    if advised.changes:
        title = f"what a change would bring{how} (speed: of a microbatch, relative to this plan)"
        console.print(_table(title, "change", advised.changes))
    for row in (*advised.alternatives, *advised.changes):
        if row.makespan is None:
            several = f", {row.on_a_rank} on a rank" if row.on_a_rank else ""
            console.print(f"no plan for {escape(row.name)}{several}: {escape(row.why)}", highlight=False)
    if any(row.cut for row in (*advised.alternatives, *advised.changes)):
        console.print("*: the search ran out of time, there may be a faster plan", highlight=False)
    if advised.left:
        names = escape(", ".join(dict.fromkeys(advised.left)))
        console.print(f"--limit {seconds:g} left no time for: {names}", highlight=False)


def _table(title: str, first: str, rows: Sequence[Row], *more: Column) -> Rows:
    """The rows that have a plan. speed: of one microbatch."""
    columns = (Column("on a rank", 2), "step", "speed", Column("idle", 1), "peak memory")
    rows_table = table(first, *more, *columns, title=title)
    for row in rows:
        if row.makespan is not None:
            step = seconds_text(row.makespan) + ("*" if row.cut else "")
            idle = f"{max(0.0, row.idle or 0.0):.1%}"
            peak = bytes_text(row.peak_memory or 0.0) + ("" if row.fits else ", above the limit")
            named = [escape(row.name), *([escape(row.stages)] if more else [])]
            rows_table.add_row(*named, str(row.on_a_rank), step, f"{row.speedup:.2f} x", idle, peak)
    return rows_table
