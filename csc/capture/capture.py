"""Capture: a PyTorch model and one example microbatch become a Program with the whole forward graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx, nn

from csc.capture.batch import (
    device_of,
    dynamic_dimensions,
    placed,
    split_batch,
    twice,
)
from csc.capture.dedup.bodies import CannotRepeat
from csc.capture.dedup.layers import Layers, NotHidden
from csc.capture.diagnostics import untraceable
from csc.capture.guards import DECIDED, Guard, decided, decided_by, equal
from csc.capture.lower.flatten import Flattened, flatten
from csc.capture.module_tree import describe
from csc.capture.trace.export import (
    Exported,
    Host,
    HostFunctionFound,
    Undecided,
    export,
    loss_of,
    training,
    without_kv_cache,
)
from csc.capture.trace.meta_init import standing_in
from csc.capture.trace.mutations import Changes, Slot, refuse_if_computed_with
from csc.capture.trace.replay import Replay, Runs, Way, replay
from csc.capture.trace.size_guards import sizes_of
from csc.capture.values.hoisted import Hoisted
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.ir.program import Input, Parameter, Program, Record
from csc.torch_private import conditions_of_models, one_is_no_special_size

log = logging.getLogger("csc")

# Of what these give, values say the size, or they are values.
OF_VALUES = frozenset(
    f"aten::{name}" for name in ("item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "_unique2")
)


@dataclass
class Learned:
    """What traces of a model have shown about its batches. It only grows.

    host: functions of the model that run on the host, for every batch. consulted: batch entries whose values decide
    what the graph is; a capture holds for the values it was made with, and for those with which the model's code does
    the same, which ways tell. replayed: whether its code runs without data, which shows what it does; None if nobody
    has tried. moves: whether it moves rows of tensors by numbers. decides: whether it takes decisions by its batch
    alone; guards: of each capture from the first that has some. written: attributes and buffers that its forward
    writes, and does not compute with. runs: its latest ones.
    """

    host: Host = field(default_factory=Host)
    consulted: set[str] = field(default_factory=set)
    ways: tuple[Way, ...] = ()
    replayed: bool | None = None
    moves: bool = False
    decides: bool = False
    guards: tuple[Guard, ...] = ()
    written: set[Slot] = field(default_factory=set)
    runs: Runs = field(default_factory=Runs, compare=False)

    def completed(self, model: nn.Module, microbatch: Mapping[str, Any]) -> dict[str, Any]:
        """The microbatch with what the host functions make of it, and the numbers of the rows that the model moves.
        Values that decide are replaced by those of the capture if the model does the same for both. What the batch
        decides (csc.capture.guards) is a further entry.
        """
        tensors, extra, run = self.with_rows(model, microbatch)
        way = next((one for one in self.ways if run is not None and one.serves(run, tensors)), None)
        found = way.decided if way is not None else decided_by(self.guards, tensors) if self.guards else ()
        also = {DECIDED: found} if found else {}
        return {**tensors, **(way.consulted if way is not None else {}), **extra, **also}

    @property
    def replays(self) -> bool:
        """Whether batches are completed by running the model's code without data."""
        return bool(self.replayed and self.consulted)

    def with_rows(
        self, model: nn.Module, microbatch: Mapping[str, Any]
    ) -> tuple[dict[str, torch.Tensor], dict[str, Any], Replay | None]:
        """(tensors, other values, what the model's code does, if that matters); values that decide are as they are."""
        tensors, extra = split_batch(microbatch)
        for call in self.host.calls:
            if call.is_for(tensors):
                tensors |= call.entries(model, tensors)
        if not self.replays:
            return tensors, extra, None
        run = self.runs.of(model, tensors, extra, self.host, self.moves, self.decides)
        return {**tensors, **(run.rows if run is not None else {})}, extra, run


def serves(program: Program, completed: Mapping[str, Any]) -> bool:
    """Whether a captured Program is the model for a completed microbatch: same entries, sizes that it allows, values
    and decisions that it was made for.
    """
    tensors, extra = split_batch(completed)
    if program.sizes is None or not program.sizes.allow(tensors) or program.decided != decided(extra):
        return False
    return equal(program.fixed, tensors)


def with_sizes_of(program: Program, tensors: Mapping[str, torch.Tensor]) -> Program:
    """A captured Program, its inputs of the sizes of a completed microbatch that it serves."""
    return replace(program, inputs=tuple(replace(one, shape=tuple(tensors[one.name].shape)) for one in program.inputs))


def capture(model: nn.Module, example: Any, learned: Learned | None = None, whole: bool = False) -> Program:
    """Trace `loss = model(**example)` in training mode, numbers of samples and lengths symbolic.

    model: any module whose forward takes the batch's entries as keyword arguments and returns a loss.
    example: one microbatch, a mapping; its tensors are traced, other values are baked in. One that has a single sample
    or image is traced with two of each if that makes a Program which serves it.
    learned: what is known from earlier captures of the model; this one adds to it.
    whole: trace every layer, equal ones too (see csc.capture.dedup.layers); the Program is the same.
    Raises CscError (a sentence with the source line) if the model cannot be traced.
    """
    learned = Learned() if learned is None else learned
    with one_is_no_special_size():
        tensors, extra = split_batch(example)
        doubled = twice(tensors)
        if doubled is not None:
            before = learned.ways, learned.replayed, learned.moves, learned.guards
            try:
                with conditions_of_models(_holds_for_one):
                    program = _steady(model, {**doubled, **extra}, learned, whole)
                completed = learned.completed(model, example)
                if serves(program, completed):
                    return with_sizes_of(program, split_batch(completed)[0])
                reason = "what two of each do is not what one does"
            except CscError as error:
                reason = str(error)
            log.info("a batch with one sample or image is traced as it is: %s", reason)
            learned.ways, learned.replayed, learned.moves, learned.guards = (
                before  # nobody has the Programs of its ways
            )
        return _steady(model, example, learned, whole)


def _holds_for_one(condition: Any, sizes: Mapping[Any, int]) -> None:
    """End the trace of a batch with two samples, made of one, where the model's code asks which of both there are."""
    if condition.subs({symbol: 1 if size == 2 else size for symbol, size in sizes.items()}) == sympy.false:
        raise NumberAsked("the model asks for the number of samples", "model", "trace it with as many as there are")


class NumberAsked(CscError):
    """Ends the trace of a doubled batch."""


def _steady(model: nn.Module, example: Any, learned: Learned, whole: bool) -> Program:
    """A capture that is the same for every step. InputError if the model computes with what it wrote a step before."""
    program, changes = _captured(model, example, learned, whole)
    tensors, extra = split_batch(example)

    def run() -> float:
        with training(model), without_kv_cache(model), torch.random.fork_rng():
            torch.manual_seed(0)
            return float(loss_of(model(**placed(tensors, device_of(model)), **extra)))

    def again() -> tuple[Program, Changes]:
        return _captured(model, example, replace(learned, consulted=set()), whole)

    refuse_if_computed_with(model, run, changes, program, again)
    learned.written |= changes.keys()
    return program


def _captured(model: nn.Module, example: Any, learned: Learned, whole: bool) -> tuple[Program, Changes]:
    """The Program, and what the model's forward wrote to it."""
    device = device_of(model)
    with standing_in(model, device):
        paths = () if whole else [path for path, info in describe(model).items() if info.role == "layer"]
        layers = Layers.of(model, paths)
        flat, tensors, traced, history = _traced(model, example, learned, device, layers)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters = tuple(
        Parameter(name, tuple(p.shape), p.dtype, p.requires_grad, tuple(a for a in aliases[id(p)] if a != name))
        for name, p in model.named_parameters()
    )
    graph = flat.graph
    sizes = sizes_of(graph, traced.asked)
    fixed = {name: tensors[name] for name in sorted(traced.consulted)}
    taken = {node.meta["role"][1] for node in g.placeholders(graph) if node.users}
    guard = Guard(sizes, fixed, traced.decisions)
    if learned.replayed and not fixed.keys() & taken:
        _add_way(learned, model, example, Way(traced.calls, sizes, fixed, guard.decided))
    if guard.decisions and not guard.holds(tensors):
        raise InputError(
            f"the model takes a Python decision that has another answer each time it is asked: {guard.decided}",
            "model",
            "take decisions from the batch alone, without random numbers; or compute them in the data loader and pass "
            "plain Python values in the batch",
        )
    if learned.guards or guard.decisions:
        learned.guards = (*learned.guards, guard)
    hoisted = {name for name in tensors if any(name.startswith(f"{one.prefix}_") for one in _hoisted(learned))}
    program = Program(
        name=type(model).__name__,
        inputs=_inputs(graph, tensors),
        parameters=parameters,
        constants=flat.constants,
        modules=describe(model),
        device=device.type,
        graph=graph,
        fake_mode=g.outputs(graph)[0].meta["val"].fake_mode,
        fixed=fixed,
        decided=guard.decided,
        made=tuple(sorted((taken & tensors.keys() - split_batch(example)[0].keys()) | hoisted)),
        sizes=sizes,
        checkpoints=flat.checkpoints,
        history=history,
    )
    return program, traced.changes


def _hoisted(learned: Learned) -> list[Hoisted]:
    return [one for one in learned.host.calls if isinstance(one, Hoisted)]


def _inputs(graph: fx.Graph, tensors: Mapping[str, torch.Tensor]) -> tuple[Input, ...]:
    """The entries that a graph has, as they are in a microbatch."""
    used = {node.meta["role"] for node in g.placeholders(graph)}
    return tuple(
        Input(name, tuple(tensor.shape), tensor.dtype, dynamic_dimensions(tensor))
        for name, tensor in tensors.items()
        if ("input", name) in used
    )


def _add_way(learned: Learned, model: nn.Module, example: Any, way: Way) -> None:
    """Know of a trace's way, if a replay of its own batch goes it too."""
    tensors, _, run = learned.with_rows(model, example)
    if run is not None and way.serves(run, tensors):
        learned.ways = (*learned.ways, way)
    elif way.consulted:
        log.info("what the model does with other values of %s is traced again", ", ".join(way.consulted))


def _traced(
    model: nn.Module, example: Any, learned: Learned, device: torch.device, layers: Layers
) -> tuple[Flattened, dict[str, torch.Tensor], Exported, tuple[Record, ...]]:
    """(the graph, the batch's tensors, the trace, times), equal ones of the layers traced once if they can be;
    functions found to run on the host are added to what is learned.
    """
    start = time.perf_counter()
    while True:
        tensors, extra, run = learned.with_rows(model, example)
        rows = run is not None and learned.moves
        try:
            exported = export(model, placed(tensors, device), extra, learned.host, layers, rows, learned.decides)
            learned.host = replace(exported.host, asking=())
            learned.consulted |= exported.consulted
            learned.written |= exported.written_beside
            if exported.consulted and learned.replayed is None:
                first = replay(model, tensors, extra, learned.host, layers, True, learned.decides)
                learned.replayed = first is not None
                learned.moves = first is not None and bool(first.rows)
                if learned.moves:
                    continue
            traced = time.perf_counter()
            flat = _flat(exported, model)
            times = (
                Record("capture", traced - start, f"{len(exported.program.graph.nodes)} nodes"),
                Record("normalise", time.perf_counter() - traced, f"{len(flat.graph.nodes)} nodes"),
            )
            return flat, tensors, exported, times
        except HostFunctionFound as found:
            learned.host = found.host
        except NumberAsked:
            raise
        except Undecided as reason:
            log.info("the model takes decisions by values of its batch: %s", reason.__cause__)
            learned.decides = True
        except CscError:
            if not rows:
                raise
            learned.replayed = learned.moves = False  # it can be traced for one batch at a time, or says why not
        except NotHidden as needed:
            layers = layers.without_hidden(needed.paths)
        except CannotRepeat as reason:
            log.info("equal layers are traced one by one: %s", reason)
            layers = Layers.of(model, ())


def _flat(exported: Exported, model: nn.Module) -> Flattened:
    try:
        flat = flatten(exported.program, model)
        left = next((one for one in g.calls(flat.graph) if exported.undecided and g.op_name(one) in OF_VALUES), None)
        if left is not None:
            raise InputError(
                f"the size of a result depends on the values in the batch ({g.op_name(left)})",
                left.meta.get("source") or "model",
                "select with torch.where or masked_scatter, or make the selection in the data loader",
            )
        return flat
    except CannotRepeat:
        raise
    except CscError as error:
        if exported.undecided:
            raise Undecided from error
        raise
    except Exception as error:
        raise untraceable(error, gradients=exported.gradients) from error
