"""Rivals whose encoders and language model have meshes of their own, on ranks of their own.

Terms
  share     ranks, tp, pp and dp of a component; ranks = tp pp dp. Projectors stand with their encoders
  C(tp)     seconds of F, B and W of a component for one sample on tp ranks
  theta     the shares of both

    FORMULAS                  name -> seconds by a formula: of them
    DistTrain                 arXiv 2408.04275: the least warm-up + max(T_llm, T_enc) (n - 1), where each of n rounds
                              takes T = dp_llm tp C(tp) / ranks, for each number of ranks and each tp
    DFLOP                     arXiv 2603.25120: the least (n + stages - 1) max(E, L), E and L the time of a stage

n is the number of microbatches of a replica of the language model. Both leave out what does not fit by the mean bytes
of a rank, as both papers do; parameters are held as with ZeRO-1, and all is computed again if nothing fits else.

    of_formula(name, settings, ..)   the formula's best theta, priced
    of_simulation(settings, ..)      the fastest of the TRIED best thetas of each formula, once they are priced: about
                                     what meshes by component can bring

csc cannot run such a theta; its price is that of a pipeline in which the encoder's ranks take dp_llm / dp_enc times as
long and as many bytes for a microbatch, on csc's costs and simulator, under 1F1B.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from csc.passes.step_end import seconds_behind

from benchmarks.mesh.uniform import MeshRival, Settings, contiguous_split
from csc.driver.mesh_search import EFFORT, LIMIT
from csc.errors import CscError
from csc.ir.mesh import Mesh
from csc.planning.meshes import MeshLayout
from csc.planning.plan import plan
from csc.planning.problem import Problem, Unit, pipeline
from csc.planning.schedules import SCHEDULES
from csc.simulation.pipeline import peaks
from csc.simulation.simulate import simulate

SIZES = (1, 2, 4, 8)  # of tp
ENCODER_STAGES = (1, 2, 3, 4)
TRIED = 8


@dataclass(frozen=True)
class Share:
    tp: int
    pp: int
    dp: int

    @property
    def ranks(self) -> int:
        return self.tp * self.pp * self.dp

    def __str__(self) -> str:
        return f"dp={self.dp},pp={self.pp},tp={self.tp}"


@dataclass(frozen=True)
class Component:
    """Of one tp and recomputation: seconds of a sample, bytes saved of it; state of the whole by dp, see `held`."""

    seconds: float
    forward: float
    saved: float
    working: float
    state: float
    optimizer: float

    def held(self, share: Share, depth: int, ratio: float) -> float:
        """Mean bytes of a rank. depth: microbatches in flight."""
        state = self.state - self.optimizer * (1 - 1 / share.dp)
        return (state + self.saved * ratio * depth) / share.pp + self.working * ratio


Formula = Callable[[Component, Component, Share, Share, int], float]


def disttrain_seconds(llm: Component, encoder: Component, large: Share, small: Share, rounds: int) -> float:
    """Its formula; the warm-up is one sample's way forward."""
    t_llm = large.dp * large.tp * llm.seconds / large.ranks
    t_encoder = large.dp * small.tp * encoder.seconds / small.ranks
    return llm.forward + encoder.forward * large.dp / small.dp + max(t_llm, t_encoder) * (rounds - 1)


def dflop_seconds(llm: Component, encoder: Component, large: Share, small: Share, rounds: int) -> float:
    """Its theta's objective, for samples of one size."""
    slowest = max(llm.seconds / large.pp, encoder.seconds * (large.dp / small.dp) / small.pp)
    return (rounds + large.pp + small.pp - 1) * slowest


def thetas(ranks: int, step: int, most: int) -> Iterator[tuple[Share, Share]]:
    """(of the language model, of the encoders): all ranks and all samples. most: stages of the language model."""
    for tp in SIZES:
        for pp in range(1, min(most, ranks // tp) + 1):
            for dp in range(1, (ranks - 1) // (tp * pp) + 1):
                if step % dp:
                    continue
                rest = ranks - tp * pp * dp
                for small_tp in SIZES:
                    for stages in ENCODER_STAGES:
                        if rest % (small_tp * stages) == 0:
                            small = Share(small_tp, stages, rest // (small_tp * stages))
                            if dp % small.dp == 0 or small.dp % dp == 0:
                                yield Share(tp, pp, dp), small


FORMULAS: Mapping[str, Formula] = {"DistTrain": disttrain_seconds, "DFLOP": dflop_seconds}


@dataclass(frozen=True)
class Theta:
    """known: the settings by tp."""

    large: Share
    small: Share
    recompute: str
    known: Mapping[int, Any]


def of_formula(name: str, settings: Settings, ranks: int, step: int, memory: float) -> MeshRival:
    """With recomputation where nothing else fits."""
    last = MeshRival(name, None)
    for recompute in ("none", "full"):
        for theta in _best(name, settings, ranks, step, memory, recompute, 1):
            last = price(name, theta, step, memory, False)
        if last.fits:
            break
    return last


def of_simulation(settings: Settings, ranks: int, step: int, memory: float) -> MeshRival:
    """With and without recomputation; of the fastest under 1F1B, the order of work is searched as csc does."""
    name = "by component"
    tried = [
        (price(name, theta, step, memory, False), theta)
        for formula in FORMULAS
        for recompute in ("none", "full")
        for theta in _best(formula, settings, ranks, step, memory, recompute, TRIED)
    ]
    fitting = [each for each in tried if each[0].fits]
    if not fitting:
        return MeshRival(name, None)
    best, theta = min(fitting, key=lambda each: each[0].seconds or 0.0)
    again = price(name, theta, step, memory, True)
    return again if again.fits and (again.seconds or 0.0) < (best.seconds or 0.0) else best


def _best(
    name: str, settings: Settings, ranks: int, step: int, memory: float, recompute: str, many: int
) -> list[Theta]:
    """The first `many` by a formula."""
    formula = FORMULAS[name]
    known = {tp: found for tp in SIZES if (found := _setting(settings, tp, recompute)) is not None}
    parts = {tp: _components(found[2]) for tp, found in known.items()}
    most = sum(unit.component == "llm" for unit in next(iter(known.values()))[2].units) if known else 0
    rated: list[tuple[float, int, Share, Share]] = []
    for large, small in thetas(ranks, step, most):
        if large.tp not in parts or small.tp not in parts:
            continue
        llm, encoder, ratio = parts[large.tp][1], parts[small.tp][0], large.dp / small.dp
        rounds = step // large.dp
        depth = min(rounds, large.pp + small.pp)
        held = max(llm.held(large, min(rounds, large.pp), 1.0), encoder.held(small, depth, ratio))
        if held <= memory:
            rated.append((formula(llm, encoder, large, small, rounds), len(rated), large, small))
    return [Theta(large, small, recompute, known) for _, _, large, small in heapq.nsmallest(many, rated)]


def _setting(settings: Settings, tp: int, recompute: str) -> Any:
    return settings.of(MeshLayout(Mesh(tp=tp, dp=2), 1, 1), 1, recompute)


def _components(whole: Problem) -> tuple[Component, Component]:
    """(encoders with their projectors, language model). State at dp=2 and ZeRO-1: half of the optimizer's."""
    return _component(whole, False), _component(whole, True)


def _component(whole: Problem, llm: bool) -> Component:
    units = [unit for unit in whole.units if (unit.component == "llm") == llm]
    trained = [unit for unit in units if unit.has_w]
    optimizer = sum(_optimizer(unit) for unit in trained)
    return Component(
        sum(unit.work for unit in units), sum(unit.forward for unit in units),
        sum(unit.saved for unit in units if unit.has_b), max(unit.working for unit in units),
        sum(unit.state for unit in units) + optimizer / 2, optimizer,
    )  # fmt: skip


def _optimizer(unit: Unit) -> float:
    """Of AdamW in the parameter's dtype: parameters, gradients, and half of two moments are the unit's state."""
    return unit.state * 2 / 3


def price(name: str, theta: Theta, step: int, memory: float, searched: bool) -> MeshRival:
    """On csc's costs and simulator. searched: csc looks for the order of work, else it is 1F1B."""
    large, small = theta.large, theta.small
    ratio, rounds = large.dp / small.dp, step // large.dp
    big, little = theta.known[large.tp], theta.known[small.tp]
    units = tuple(
        _held(own, large.dp, 1.0) if own.component == "llm" else _held(other, small.dp, ratio)
        for own, other in zip(big[2].units, little[2].units, strict=True)
    )
    whole: Problem = replace(
        big[2], units=units, ranks=small.pp + large.pp, microbatches=rounds, memory=memory,
        network=replace(big[2].network, places=()),
    )  # fmt: skip
    first = [u for u, unit in enumerate(units) if unit.component != "llm"]
    second = [u for u, unit in enumerate(units) if unit.component == "llm"]
    if len(first) < small.pp or len(second) < large.pp:
        return MeshRival(name, None)
    stages = (
        *contiguous_split(first, [units[u].work for u in first], small.pp),
        *contiguous_split(second, [units[u].work for u in second], large.pp),
    )
    home = tuple(range(len(stages)))
    numbers = pipeline(whole, stages, home)
    if searched:
        with suppress(CscError):  # nothing fits: 1F1B says by how much
            return _theta_row(name, theta, *_planned(whole, stages, home), memory, stages)
    schedule = SCHEDULES["1f1b"](numbers, home, rounds)
    timeline = simulate(numbers, schedule)
    held = max(peaks(numbers, schedule, timeline))
    return _theta_row(name, theta, timeline.makespan, held, memory, stages)


def _planned(whole: Problem, stages: Sequence[Sequence[int]], home: Sequence[int]) -> tuple[float, float]:
    found = plan(whole, stages=stages, placement=home, effort=EFFORT, limit=LIMIT)
    return found.makespan, max(found.peak_memory)


def _theta_row(
    name: str, theta: Theta, makespan: float, held: float, memory: float, stages: Sequence[Sequence[int]]
) -> MeshRival:
    large, small = theta.large, theta.small
    big, little = theta.known[large.tp], theta.known[small.tp]
    ends = [
        _end(little, Mesh(dp=small.dp, pp=small.pp, tp=small.tp), stages[: small.pp]),
        _end(big, Mesh(dp=large.dp, pp=large.pp, tp=large.tp), stages[small.pp :]),
    ]
    text = f"llm {large}; encoders {small}; recompute={theta.recompute}"
    return MeshRival(name, makespan + max(ends), held, held <= memory, text)


def _held(unit: Unit, dp: int, ratio: float) -> Unit:
    """A unit of dp=2 as it is with another dp, for `ratio` samples at a time."""
    state = unit.state
    if unit.has_w:  # p + p + 2 p / 2 at dp=2 are 3 p
        state = unit.state * (2 + 2 / dp) / 3
    return replace(
        unit, state=state, forward=unit.forward * ratio, backward_input=unit.backward_input * ratio,
        backward_weight=unit.backward_weight * ratio, saved=unit.saved * ratio, stashed=unit.stashed * ratio,
        working=unit.working * ratio,
    )  # fmt: skip


def _end(setting: Any, mesh: Mesh, stages: Sequence[Sequence[int]]) -> float:
    program, options, _ = setting
    own = replace(options, mesh=mesh, zero=1 if mesh.dp > 1 else 0)
    return seconds_behind(program, own, stages, range(len(stages)))
