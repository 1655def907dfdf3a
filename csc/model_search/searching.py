"""csc.search: what is asked is checked, trials are driven by a strategy, pairs are planned, and a result is made.

Under torchrun the processes are divided into teams, each as large as the mesh of a trial, and each with the same
strategy and ledger: of a rung every team trains its share, and waits for the records of the others.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from csc.cache.keys import function_key
from csc.driver.compiled import CompiledModel
from csc.driver.options import changed, closed
from csc.errors import InputError
from csc.ir.mesh import Mesh
from csc.ir.program import Options
from csc.model_search.candidates import Candidates, Part, Parts, SearchedPair, sentence
from csc.model_search.ledger import Ledger, sole
from csc.model_search.pair_plans import PairPlan, joined, planned, power_of, problem_of
from csc.model_search.result import Counts, PairRow, SearchResult
from csc.model_search.strategies import Choice, Pair, Rung, Seen, Space, Strategy, drive, named
from csc.model_search.trials import (
    COMPILED,
    FAILED,
    FEWEST_PROBES,
    TRIAL,
    Batch,
    PairTrials,
    Score,
    Task,
    TrialSettings,
)
from csc.planning.problem import Problem
from csc.runtime.launch import Team, divided_world

PLAN = "plan"  # the kind of a record
SCHEDULED = 10_000  # steps whose rates the ledger's head knows
SHARE = 1 / 12  # of the grid's samples, if no budget is named
ADAMW = partial(torch.optim.AdamW, lr=1e-4)


def search(
    encoders: Mapping[str, Part],
    llms: Mapping[str, Part],
    data: Sequence[Any],
    score: Score,
    *,
    batch: Batch,
    placeholders: int | Mapping[str, int],
    directory: str | Path,
    projector: str | Mapping[str, Any] = "mlp",
    modality: str = "vision",
    feature_layer: int | None = None,
    keep_prefix: bool = False,
    samples: int | None = None,
    budget: int | float | None = None,
    strategy: str | Strategy = "halving",
    batch_size: int = 16,
    freeze: Sequence[str] | None = None,
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer] = ADAMW,
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
    clip: float | None = 1.0,
    perfect: float = 1.0,
    probe: int = 64,
    seed: int = 0,
    save_every: float = 60.0,
    mesh: Mesh | Mapping[str, int] | str | None = None,
    microbatches: int = 1,
    hardware: str | None = None,
    memory: int | str | None = None,
    trial_mesh: Mesh | Mapping[str, int] | str | None = None,
    options: Mapping[str, Any] | None = None,
    tell: Callable[[str], None] | None = None,
) -> SearchResult:
    """Find the pair of encoder and language model that learns a task best, without training every pair to the end.

    Args:
        encoders: By name, encoders as csc.compose takes them, or functions that make them.
        llms: By name, language models as csc.compose takes them, or functions that make them. Both are as they were
            given when the search ends.
        data: Training samples, of any kind: what has a length and gives a sample by number.
        score: From a SearchedPair (`.encoder`, `.llm`: names; `.model`: the composed model with what it has learnt, in
            eval mode) to a number, or to one for each sample that is scored; higher is better.
        batch: From a SearchedPair and a list of samples to its batch, as `candidate.model.processor(...)` makes one.
        placeholders: The token id whose places features take: of all language models, or by name.
        directory: Where checkpoints, features and the ledger are kept. The same call with the same directory goes on
            where it was.
        projector: As for csc.compose, by its kind.
        modality: The name of the encoder's modality.
        feature_layer: As for csc.compose.
        keep_prefix: As for csc.compose.
        samples: Of a training to the end, after which scores are compared; None: all of `data` once.
        budget: Samples that all trials together may take; below 1: a share of the grid, which is every pair to the end.
            None: a twelfth of the grid, and twice `samples` at least.
        strategy: "halving", "mordal", "random" or "grid", or a value of csc.model_search.strategies; docs/search.md.
        batch_size: Samples of a step.
        freeze: Components that do not train; None: the encoder alone. Where encoders train, nothing of theirs is kept,
            and every two kinds of encoders and language models are captured together; docs/search.md.
        optimizer: From parameters to an optimizer.
        scheduler: From an optimizer to a scheduler, which makes a step for each batch; None: rates stay.
        clip: Norm to which gradients are clipped; None: they are not.
        perfect: The score of no error.
        probe: Samples by which candidates are compared for clusters.
        seed: Of projectors, of the order of samples, and of the strategy.
        save_every: Seconds between checkpoints of a trial within a rung.
        mesh: For which the step of each pair is planned; None: none is planned.
        microbatches: Of that step, which has `batch_size` samples a replica.
        hardware: The profile that it is planned for.
        memory: What one rank may hold there.
        trial_mesh: Ranks of one trial; None: one.
        options: Further options of csc.compile for trials: precision, recompute, fuse, check, ...
        tell: Called with a line for each rung and each trial.

    Returns:
        A SearchResult: a row for each pair, the best first; `winner()` is a model that trains on.

    Raises:
        InputError: An argument is wrong, no pair can be composed, the data is too small, or the budget is below the
            strategy's first rung. A pair that fails is no error: its row says why.
    """
    chosen = named(strategy)
    trial = changed(Options(), mesh=trial_mesh if trial_mesh is not None else Mesh()).mesh
    full = _full(data, samples, batch_size)
    frozen = _frozen(freeze, modality)
    _check_probe(chosen, data, probe)
    _check_numbers(seed, perfect)
    wanted = {"mesh": mesh, "microbatches": microbatches, "hardware": hardware, "memory": memory}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    planned_mesh = closed(changed(Options(), **wanted)).mesh  # what is wrong is said before anything is trained
    parts = Parts(projector, placeholders, modality, feature_layer, keep_prefix)
    features = Path(directory) / "features" if f"{modality}_encoder" in frozen else None
    candidates = Candidates(encoders, llms, parts, features)
    allowed = _budget(budget, len(candidates.pairs) * full, full, chosen.name)
    head = {
        "encoders": list(encoders), "llms": list(llms), "samples": full, "batch_size": batch_size, "data": len(data),
        "projector": repr(projector), "freeze": list(frozen), "seed": seed, "feature_layer": feature_layer,
        "keep_prefix": keep_prefix, "strategy": repr(chosen), "budget": allowed, "clip": clip, "probe": probe,
        "options": {name: _told(value) for name, value in sorted((options or {}).items())},
        "code of batch": function_key(batch), "code of score": function_key(score),
        **stepping(optimizer, scheduler, full // batch_size), **candidates.fingerprints(),
    }  # fmt: skip
    settings = TrialSettings(
        batch_size, frozen, optimizer, scheduler, clip, seed, save_every, {**(options or {}), "mesh": trial}
    )
    planned_for = None if mesh is None else str(planned_mesh)
    scope = _Scope(full, allowed, perfect, planned_for, wanted, batch_size * planned_mesh.dp)
    return _driven(chosen, candidates, Task(data, batch, score, probe), settings, scope, Path(directory), head, tell)


def _check_numbers(seed: int, perfect: float) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise InputError(f"seed is {seed!r}", "csc.search", "give a whole number of at least 0")
    if not math.isfinite(perfect):
        raise InputError(f"perfect is {perfect!r}", "csc.search", "give the score of no error")


@dataclass(frozen=True)
class _Scope:
    """full: samples of a training to the end; budget: of all trials; mesh: for which pairs are planned by `options`, in
    a step of `together` samples.
    """

    full: int
    budget: int
    perfect: float
    mesh: str | None
    options: Mapping[str, Any]
    together: int


def _driven(
    chosen: Strategy, candidates: Candidates, task: Task, settings: TrialSettings, scope: _Scope, home: Path,
    head: Mapping[str, Any], tell: Callable[[str], None] | None,
) -> SearchResult:  # fmt: skip
    """The strategy's rungs, each trained by all teams of processes, and what came of them."""
    if len(candidates.pairs) == 1 and not candidates.impossible:
        raise InputError("there is one pair alone", "csc.search", "give several encoders or language models")
    team = divided_world(settings.options["mesh"].size)
    first = team.rank == 0
    say = tell if tell is not None and first and team.number == 0 else _quiet
    with sole(home) if first and team.number == 0 else nullcontext(), torch.random.fork_rng():
        ledger = Ledger(home / "ledger.jsonl", head)
        trials = PairTrials(candidates, task, settings, ledger, home, first)
        space = Space(
            tuple(candidates.encoders), tuple(candidates.llms), scope.full, scope.budget, settings.batch_size,
            scope.perfect, trials.encoder_distances() if chosen.clusters else None, frozenset(candidates.impossible),
        )  # fmt: skip
        choice, seen = drive(chosen, space, settings.seed, partial(_rung, trials, team, say), trials.llm_distances)
        trials.programs.restore()
        if not choice.ranking:
            failed = ledger.records(FAILED)[0]
            raise InputError(
                f"every pair failed; {failed['encoder']} x {failed['llm']}: {failed['why']}", "csc.search",
                f"mend that, and remove the lines of kind {FAILED!r} from {ledger.path}: checkpoints are kept",
            )  # fmt: skip
        plans: dict[Pair, PairPlan] = {}
        if scope.mesh is not None and first and team.number == 0:  # the result is whole in the first process
            plans = _plans(trials, candidates, scope.options, say)
    rows = _rows(candidates, ledger, choice, seen, plans, scope.together)
    counts = _counts(ledger, candidates, len(candidates.pairs) * scope.full)
    return SearchResult(
        rows, chosen.name, scope.budget, scope.full, scope.mesh or "", scope.perfect, counts, trials.model
    )


def _rung(
    trials: PairTrials, team: Team, say: Callable[[str], None], rung: Rung, seen: Seen
) -> dict[Pair, float | None]:
    """Each team trains a run of the rung's pairs, those of a language model together, and waits for the others'."""
    say(f"{rung.why}: {len(rung.pairs)} {'pair' if len(rung.pairs) == 1 else 'pairs'}, {rung.samples:,} samples each")
    order = sorted(rung.pairs, key=lambda pair: pair[1])
    share = math.ceil(len(order) / team.teams)
    pairs_here = order[team.number * share : (team.number + 1) * share]
    for pair in pairs_here:
        score = trials.train(pair, rung.samples)
        text = "failed" if score is None else f"score {score:.4g}"
        say(f"  {' x '.join(pair)}: {text}")
    return {pair: trials.awaited(pair, rung.samples).get("score") for pair in rung.pairs}


def _quiet(_: str) -> None:
    """Tells nobody."""


# --- what is asked ----------------------------------------------------------------------------------------------------


def _full(data: Any, samples: int | None, batch_size: int) -> int:
    """Samples of a training to the end: whole batches. InputError for less than one."""
    for name, value in (("batch_size", batch_size), ("samples", samples)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise InputError(f"{name} is {value!r}", "csc.search", "give a whole number of at least 1")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        raise InputError(
            f"data is a {type(data).__name__} without a length, or whose samples have no numbers", "csc.search",
            "give a list, or a dataset with __len__ and __getitem__",
        )  # fmt: skip
    wanted = len(data) if samples is None else samples
    if len(data) < batch_size or wanted < batch_size:
        least = min(len(data), wanted)
        raise InputError(
            f"a batch has {batch_size} samples, and a training to the end has {least} to learn from", "csc.search",
            "give more data or samples, or a smaller batch_size",
        )  # fmt: skip
    return wanted // batch_size * batch_size


def _frozen(freeze: Sequence[str] | None, modality: str) -> tuple[str, ...]:
    encoder, known = f"{modality}_encoder", (f"{modality}_encoder", f"{modality}_projector", "language_model")
    frozen = (encoder,) if freeze is None else tuple(freeze)
    strange = [name for name in frozen if name.split(".")[0] not in known]
    if strange:
        raise InputError(f"freeze names {strange[0]!r}", "csc.search", f"a pair's components are {', '.join(known)}")
    if set(known) <= set(frozen):
        raise InputError("freeze names all components, so nothing trains", "csc.search", "leave out the projector")
    return frozen


def stepping(
    optimizer: Callable[[Iterable[Any]], torch.optim.Optimizer],
    scheduler: Callable[[torch.optim.Optimizer], Any] | None, steps: int,
) -> dict[str, str]:  # fmt: skip
    """What steps a trial's weights, for the ledger's head: the optimizer that is made of a parameter, by its class and
    settings, and a hash of the rates that its scheduler gives it in so many steps, at most SCHEDULED. What cannot be
    made of one parameter is known by its name alone.
    """
    settings = {"optimizer": _told(optimizer), "scheduler": _told(scheduler)}
    try:
        tried = optimizer([torch.nn.Parameter(torch.zeros(2, 2))])
        groups = [{name: value for name, value in group.items() if name != "params"} for group in tried.param_groups]
        settings["optimizer"] = f"{type(tried).__name__} {_told(groups)}"
        if scheduler is not None:
            schedule = scheduler(tried)
            rates = []
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # steps of the optimizer, which has no gradients, do not precede
                for _ in range(min(steps, SCHEDULED)):
                    rates.append([float(group["lr"]) for group in tried.param_groups])
                    schedule.step()
            settings["scheduler"] = f"{type(schedule).__name__} {hashlib.sha256(repr(rates).encode()).hexdigest()[:16]}"
    except Exception:  # whatever a user's function raises for parameters that are not those of a trial
        return settings
    return settings


def _told(value: Any) -> str:
    """Its repr without addresses, which are others in each process."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _check_probe(strategy: Strategy, data: Sequence[Any], probe: int) -> None:
    count = min(probe, len(data))
    if strategy.clusters and count < FEWEST_PROBES:
        raise InputError(
            f"clusters are told by {count} samples, and need {FEWEST_PROBES} at least", "csc.search",
            "give more data, a larger probe, or strategy='halving', which has no clusters",
        )  # fmt: skip


def _budget(budget: int | float | None, grid: int, full: int, strategy: str) -> int:
    if budget is None:
        return grid if strategy == "grid" else min(grid, max(math.floor(grid * SHARE), 2 * full))
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not 0 < budget < math.inf:
        raise InputError(f"budget is {budget!r}", "csc.search", "give a number of samples, or a share of the grid")
    return math.floor(grid * budget) if budget < 1 else int(budget)


# --- what was found ---------------------------------------------------------------------------------------------------


def _plans(
    trials: PairTrials, candidates: Candidates, options: Mapping[str, Any], say: Callable[[str], None]
) -> dict[Pair, PairPlan]:
    """Of every pair that fits. Each capture is costed once, and pairs of the same captures have the same plan."""
    problems: dict[CompiledModel, Problem] = {}
    by_captures: dict[tuple[CompiledModel | None, CompiledModel, float], PairPlan] = {}

    def problem(compiled: CompiledModel) -> Problem:
        if compiled not in problems:
            problems[compiled] = problem_of(compiled, options)
        return problems[compiled]

    options_text = repr(sorted((name, str(value)) for name, value in options.items()))
    power = power_of(options)
    known = {
        (record["encoder"], record["llm"]): PairPlan(**record["plan"])
        for record in trials.ledger.records(PLAN)
        if record["options"] == options_text
    }
    plans = {}
    for pair in candidates.pairs:
        if pair in known:
            plans[pair] = known[pair]
            continue
        try:
            captures = trials.programs.captures(pair)
            began = time.perf_counter()
            if captures not in by_captures:
                encoder, rest, size = captures
                whole = problem(rest) if encoder is None else joined(problem(encoder), problem(rest), size)
                by_captures[captures] = planned(whole, power)
            plans[pair] = by_captures[captures]
            trials.ledger.add(
                {
                    "kind": PLAN, "encoder": pair[0], "llm": pair[1], "options": options_text,
                    "plan": asdict(plans[pair]), "seconds": time.perf_counter() - began,
                }
            )  # fmt: skip
        except Exception as error:  # batch and encoder are the user's: the other pairs go on
            say(f"no step is planned for {' x '.join(pair)}: {sentence(error)}")
    return plans


def _rows(
    candidates: Candidates, ledger: Ledger, choice: Choice, seen: Seen, plans: Mapping[Pair, PairPlan], together: int
) -> tuple[PairRow, ...]:
    """together: samples of a planned step."""
    records: dict[Pair, list[dict[str, Any]]] = {}
    for record in ledger.records(TRIAL):
        records.setdefault((record["encoder"], record["llm"]), []).append(record)
    failed = {(record["encoder"], record["llm"]): record["why"] for record in ledger.records(FAILED)}
    gone = {pair: why for pair, why in failed.items() if pair in seen.failed}
    pairs = [*choice.ranking, *gone, *candidates.impossible]
    why = {**choice.dropped, **gone, **candidates.impossible}
    rows = []
    for pair in pairs:
        records_here = [record for record in records.get(pair, []) if record["samples"] <= seen.reached(pair)]
        last = records_here[-1] if records_here else {}
        plan = plans.get(pair)
        joules = plan.joules if plan is not None else None
        rows.append(
            PairRow(
                *pair, last.get("score"), last.get("spread"), seen.reached(pair),
                sum(record["seconds"] for record in records_here), seen.curves.get(pair, ()), why.get(pair, ""),
                plan.seconds if plan is not None else None, plan.memory if plan is not None else None,
                joules, None if joules is None else joules * seen.reached(pair) / together,
            )
        )  # fmt: skip
    return tuple(rows)


def _counts(ledger: Ledger, candidates: Candidates, grid: int) -> Counts:
    trials, compiled, plans = (ledger.records(kind) for kind in (TRIAL, COMPILED, PLAN))
    return Counts(
        samples=sum(record["trained"] for record in trials),
        grid=grid,
        captures=sum(record["captures"] for record in compiled),
        encoder_passes={name: encoder.passes for name, encoder in candidates.remembered.items()},
        compile_seconds=sum(record.get("seconds", 0.0) for record in (*compiled, *plans)),
        train_seconds=sum(record["seconds"] for record in trials),
        score_seconds=sum(record["scoring"] for record in trials),
    )


__all__ = ["SearchedPair", "search"]
