"""Capture: a PyTorch model and one example microbatch become a Program with the whole forward graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx, nn
from torch.func import functional_call

from csc import devices
from csc.analysis.batch_limits import class_limits, table_limits
from csc.analysis.operators.table import OF_VALUES
from csc.capture.batch import another, device_of, dynamic_dimensions, placed, sample_axis, split_batch, twice
from csc.capture.dedup.layers import CannotRepeat, Layers, NotHidden
from csc.capture.diagnostics import untraceable
from csc.capture.guards import Guards, frozen_in, plain_texts
from csc.capture.lower.flatten import Flattened, flatten
from csc.capture.module_tree import describe
from csc.capture.quantised_weights import stand_ins
from csc.capture.trace.export import Exported, Undecided, export, sizes_of, training, without_kv_cache
from csc.capture.trace.meta_init import standing_in
from csc.capture.trace.mutations import Changes, Slot, refuse_if_computed_with
from csc.capture.trace.replay import replay
from csc.capture.trace.traced_model import HostFunctionFound, loss_of, sizes_among
from csc.capture.values.hoist import Hoisted
from csc.capture.watches import opaque_reads, refuse_shared_tensors
from csc.errors import CscError, InputError
from csc.ir import graph as g
from csc.ir.capture_guards import CaptureGuards, FlagsAsked, Miss, alike, capture_guards, exactly
from csc.ir.program import Input, Parameter, Program, Record
from csc.torch_private.process_state import process_state_kept
from csc.torch_private.symbolic_sizes import conditions_of_models, one_is_no_special_size

log = logging.getLogger("csc")


COPIED = 2**30  # bytes of weights, of which a run with others has a copy


def name_of(program: Program) -> str:
    """Of what a captured Program assumed."""
    assert program.guards is not None
    return program.guards.name


def with_sizes_of(program: Program, tensors: Mapping[str, torch.Tensor]) -> Program:
    """A captured Program, its inputs of the sizes of a microbatch that it is for."""
    return replace(
        program, inputs=tuple(replace(entry, shape=tuple(tensors[entry.name].shape)) for entry in program.inputs)
    )


def capture(model: nn.Module, example: Any, guards: Guards | None = None, whole: bool = False) -> Program:
    """Trace `loss = model(**example)` in training mode, numbers of samples and lengths symbolic.

    model: any module whose forward takes the batch's entries as keyword arguments and returns a loss.
    example: one microbatch, a mapping; its tensors are traced, other values are baked in. One that has a single sample
    or image is traced with two of each if that makes a Program which serves it.
    guards: what earlier captures of the model assumed; this one adds to them.
    whole: trace every layer, equal ones too (see csc.capture.dedup.layers); the Program is the same.
    Raises CscError (a sentence with the source line) if the model cannot be traced.
    """
    guards = Guards() if guards is None else guards
    with process_state_kept(), devices.forked(device_of(model)), one_is_no_special_size(), stand_ins(model):
        tensors, extra = split_batch(example)
        doubled = twice(tensors, guards.axes)
        if doubled is not None:
            before = guards.captures, guards.replayed, guards.moves
            try:
                with conditions_of_models(_holds_for_one):
                    program = _steady(model, {**doubled, **extra}, guards, whole)
                match = guards.of(name_of(program)).match(model, example)
                if match.capture is not None:
                    return with_sizes_of(program, split_batch(match.batch)[0])
                reason = f"what two of each do is not what one does: {match.why}"
            except CscError as error:
                reason = str(error)
            log.info("a batch with one sample or image is traced as it is: %s", reason)
            guards.captures, guards.replayed, guards.moves = before  # nobody has the Program
        return _steady(model, example, guards, whole)


def _holds_for_one(condition: Any, sizes: Mapping[Any, int]) -> None:
    """End the trace of a batch with two samples, made of one, where the model's code asks which of both there are."""
    if condition.subs({symbol: 1 if size == 2 else size for symbol, size in sizes.items()}) == sympy.false:
        raise NumberAsked("the model asks for the number of samples", "model", "trace it with as many as there are")


class NumberAsked(CscError):
    """Ends the trace of a doubled batch."""


def _steady(model: nn.Module, example: Any, guards: Guards, whole: bool) -> Program:
    """A capture that is the same for every step. InputError if the model computes with what it wrote a step before."""
    program, changes, beside = _captured(model, example, guards, whole)
    tensors, extra = split_batch(example)

    def run(other: bool = False) -> float:
        entries = placed(another(tensors) if other else tensors, device_of(model))
        with training(model), without_kv_cache(model), torch.random.fork_rng():
            torch.manual_seed(0)
            weights = dict(model.named_parameters())
            if other and sum(weight.nbytes for weight in weights.values()) <= COPIED:
                others = {name: weight.detach() * 1.25 for name, weight in weights.items()}
                return float(loss_of(functional_call(model, others, kwargs={**entries, **extra})))
            return float(loss_of(model(**entries, **extra)))

    def again() -> tuple[Program, Changes]:
        return _captured(model, example, replace(guards, deciding=set()), whole)[:2]

    refuse_if_computed_with(model, run, changes, beside, program, again)
    guards.written |= changes.keys()
    return program


def _captured(
    model: nn.Module, example: Any, guards: Guards, undivided: bool
) -> tuple[Program, Changes, frozenset[Slot]]:
    """The Program, what the model's forward wrote to it, and beside it."""
    device = device_of(model)
    with standing_in(model, device), opaque_reads(model) as read:
        paths = () if undivided else [path for path, info in describe(model).items() if info.role == "layer"]
        layers = Layers.of(model, paths)
        flat, tensors, traced, history = _traced(model, example, guards, device, layers)
    guards.opaque_reads |= read
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    parameters = tuple(
        Parameter(name, tuple(p.shape), p.dtype, p.requires_grad, tuple(a for a in aliases[id(p)] if a != name))
        for name, p in model.named_parameters()
    )
    graph = flat.graph
    taken = {node.meta["role"][1] for node in g.placeholders(graph) if node.users}
    refuse_shared_tensors(model, {name: constant for name, constant in flat.constants.items() if name in taken})
    assumed = _assumed(guards, model, example, tensors, traced, graph, taken)
    guards.add(assumed)
    entries = split_batch(example)[0].keys()
    hoisted = _entries_of(_hoisted(guards), tensors)
    program = Program(
        name=type(model).__name__,
        inputs=_inputs(graph, tensors, guards.axes),
        parameters=parameters,
        constants=flat.constants,
        modules=describe(model),
        device=device.type,
        graph=graph,
        fake_mode=g.outputs(graph)[0].meta["val"].fake_mode,
        guards=replace(assumed, calls=None),
        made=tuple(sorted((taken & tensors.keys() - entries) | hoisted)),
        statistics={
            name: call.line
            for call in _hoisted(guards)
            if call.is_statistic
            for name in sorted(_entries_of([call], tensors))
        },
        reads=traced.deciding,
        sizes=tuple(sorted(taken & sizes_among(tensors, entries, guards.host))),
        checkpoints=flat.checkpoints,
        history=history,
    )
    return program, traced.changes, traced.written_beside


def _hoisted(guards: Guards) -> list[Hoisted]:
    return [call for call in guards.host.calls if isinstance(call, Hoisted)]


def _entries_of(calls: Sequence[Hoisted], names: Iterable[str]) -> set[str]:
    """Those of the names that entries made by these calls have."""
    return {name for name in names if any(name.startswith(f"{call.prefix}_") for call in calls)}


def _inputs(graph: fx.Graph, tensors: Mapping[str, torch.Tensor], axes: Mapping[str, int]) -> tuple[Input, ...]:
    """The entries that a graph has, as they are in a microbatch."""
    used = {node.meta["role"] for node in g.placeholders(graph)}
    tables, classes = table_limits(graph), class_limits(graph)
    samples = {name: sample_axis(name, tensors, axes) for name in tensors}
    return tuple(
        Input(
            name, tuple(tensor.shape), tensor.dtype, dynamic_dimensions(tensor, samples[name]), tables.get(name),
            classes.get(name), samples[name],
        )
        for name, tensor in tensors.items()
        if ("input", name) in used
    )  # fmt: skip


def _assumed(
    guards: Guards,
    model: nn.Module,
    example: Any,
    tensors: Mapping[str, torch.Tensor],
    traced: Exported,
    graph: fx.Graph,
    taken: Set[str],
) -> CaptureGuards:
    """What a trace assumed of its batch: with its calls, if a replay of this batch makes them too. taken: entries that
    the graph reads.
    """
    sizes = sizes_of(graph, traced.asked)
    if not sizes.allow(tensors):
        sizes = exactly(tensors)
    values = {name: tensors[name] for name in sorted(traced.deciding)}
    plain = plain_texts(split_batch(example)[1])
    if isinstance(capture_guards(sizes, values, traced.decisions, plain, None).match(tensors, plain, None), Miss):
        raise InputError(
            "the model takes a Python decision that has another answer each time it is asked: "
            f"{', '.join(decision.text() for decision in traced.decisions)}",
            "model",
            "take decisions from the batch alone, without random numbers; or compute them in the data loader and pass "
            "plain Python values in the batch",
        )
    calls = None
    if guards.replayed and not values.keys() & taken:
        run = guards.with_rows(model, example)[2]
        symbols = sizes.match(tensors)
        if run is not None and not isinstance(symbols, Miss) and alike(traced.calls, run.calls, symbols):
            calls = traced.calls
        elif values:
            log.info("what the model does with other values of %s is traced again", ", ".join(values))
    flags = FlagsAsked(traced.asked_flags, frozen_in(model)) if traced.asked_flags else None
    return capture_guards(sizes, values, traced.decisions, plain, calls, flags)


def _traced(
    model: nn.Module, example: Any, guards: Guards, device: torch.device, layers: Layers
) -> tuple[Flattened, dict[str, torch.Tensor], Exported, tuple[Record, ...]]:
    """(the graph, the batch's tensors, the trace, times), equal ones of the layers traced once if they can be;
    functions found to run on the host are added to the guards.
    """
    start = time.perf_counter()
    while True:
        tensors, extra, run = guards.with_rows(model, example)
        rows = run is not None and guards.moves
        try:
            exported = export(
                model, placed(tensors, device), extra, guards.host, layers, rows, guards.decides, guards.axes
            )
            guards.host = replace(exported.host, asking=())
            guards.deciding |= exported.deciding.keys()
            guards.written |= exported.written_beside
            guards.files = {**exported.files, **guards.files}
            if exported.deciding and guards.replayed is None:
                first = replay(model, tensors, extra, guards.host, layers, True, guards.decides)
                guards.replayed = first is not None
                guards.moves = first is not None and bool(first.rows)
                if guards.moves:
                    continue
            traced = time.perf_counter()
            flat = _flat(exported, model)
            times = (
                Record("capture", traced - start, f"{len(exported.program.graph.nodes)} nodes"),
                Record("normalise", time.perf_counter() - traced, f"{len(flat.graph.nodes)} nodes"),
            )
            return flat, tensors, exported, times
        except HostFunctionFound as found:
            guards.host = found.host
        except NumberAsked:
            raise
        except Undecided as reason:
            log.info("the model takes decisions by values of its batch: %s", reason.__cause__)
            guards.decides = True
        except CscError:
            if not rows:
                raise
            guards.replayed = guards.moves = False  # it can be traced for one batch at a time, or says why not
        except NotHidden as needed:
            layers = layers.without_hidden(needed.paths)
        except CannotRepeat as reason:
            log.info("equal layers are traced one by one: %s", reason)
            layers = Layers.of(model, ())


def _flat(exported: Exported, model: nn.Module) -> Flattened:
    try:
        flat = flatten(exported.program, model)
        left = next((node for node in g.calls(flat.graph) if exported.undecided and g.op_name(node) in OF_VALUES), None)
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
        raise untraceable(error, model, gradients=exported.gradients, transformed=exported.transformed) from error
