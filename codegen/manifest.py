"""program.json: the facts that the runtime needs, and those that a reader wants."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from csc.codegen.layer_file import seeds
from torch import fx

import csc
from csc.ir import graph as g
from csc.ir.program import (
    BatchLoss,
    Context,
    Options,
    Program,
    compute_dtypes,
    gradient_placement,
    loss_stage,
    weight_placement,
)

FORMAT = 6


def manifest(
    program: Program, options: Options, files: Mapping[str, str], tensors: Mapping[str, bytes] = MappingProxyType({})
) -> dict[str, Any]:
    """The content of program.json. files: text by path, of everything emitted beside it; it may be edited. tensors: the
    same of what may not.

    The fingerprint is a hash of all the rest: two ranks with the same one run the same program.
    """
    fixed = program.guards.values if program.guards is not None else {}
    content: dict[str, Any] = {
        "format": FORMAT,
        "csc": csc.__version__,
        "torch": torch.__version__.split("+")[0],
        "name": program.name,
        "mesh": options.mesh.to_dict(),
        "device": program.device,
        "microbatches": options.microbatches,
        **({"zero": options.zero} if options.zero else {}),
        "inputs": [
            {
                "name": item.name, "shape": list(item.shape), "dtype": _dtype(item.dtype),
                **({"whole": True} if item.name in program.combination.whole else {}),
                **({"table": {"name": item.table[0], "rows": item.table[1]}} if item.table else {}),
                **({"classes": dict(zip(("count", "ignored", "first"), item.classes))} if item.classes else {}),
            }
            for item in program.inputs
        ],
        **({"fixed": {name: tensor.tolist() for name, tensor in fixed.items()}} if fixed else {}),
        **_weights(program),
        "messages": _messages(program),
        **_features(program),
        "stages": [
            {
                "stage": stage.index, "rank": stage.rank, "regions": list(stage.regions),
                "inputs": list(stage.inputs), "forward": True,
                "backward_input": stage.has_b, "backward_weight": stage.has_w,
                **({"context": list(stage.contexts)} if program.contexts else {}),
                **({"weighs": True} if program.loss_weight == "terms" and program.loss_tokens in stage.shared else {}),
            }
            for stage in program.stages
        ],
        **_context(program),
        **({"random": _draws(program)} if seeds(program) else {}),
        "loss": {"stage": loss_stage(program), "weight": program.loss_weight, **_loss_count(program)},
        "frozen": [p.name for p in program.parameters if not p.trainable],
        "plan": {
            "schedule": program.schedule.name if program.schedule is not None else "",
            "freeze": list(options.freeze) if options.freeze is not None else None,
            "cuts": list(options.cuts) if options.cuts is not None else None,
            "flops": _flops(program),
            **_expected(program),
        },
        "files": {path: hashlib.sha256(text.encode()).hexdigest() for path, text in sorted(files.items())},
        "tensors": {path: hashlib.sha256(content).hexdigest() for path, content in sorted(tensors.items())},
    }  # fmt: skip
    content["fingerprint"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return content


def _weights(program: Program) -> dict[str, Any]:
    """Parameters and constants, with the stages that read them."""
    holders: dict[str, list[int]] = {}
    constant_holders: dict[str, list[int]] = {}
    for stage in program.stages:
        for name in stage.parameters:
            holders.setdefault(name, []).append(stage.index)
        for name in stage.constants:
            constant_holders.setdefault(name, []).append(stage.index)
    computed, repeated = compute_dtypes(program), _repeated(program)
    reached = {
        name
        for region in program.regions
        for name, gradient in zip(region.parameters, region.dw, strict=True)
        if gradient
    }
    return {
        "parameters": [
            {
                "name": p.name, "shape": list(p.shape), "dtype": _dtype(p.dtype), "trainable": p.trainable,
                **({"compute": _dtype(computed[p.name])} if computed[p.name] != p.dtype else {}),
                "stages": holders[p.name], "weight": weight_placement(p).to_dict(),
                **({"gradient": gradient_placement(p).to_dict()} if p.trainable else {}),
                **({"reached": False} if p.trainable and p.name not in reached else {}),
                **({"boxes": p.boxes} if p.boxes else {}),
                **({"repeated": True} if p.name in repeated else {}),
            }
            for p in program.parameters if p.name in holders
        ],
        "unused": [p.name for p in program.parameters if p.name not in holders],
        "constants": [{"name": name, "stages": stages} for name, stages in constant_holders.items()],
    }  # fmt: skip


def _features(program: Program) -> dict[str, Any]:
    """What makes the features that come with the batch, and how these lie in memory."""
    features = program.features
    if features is None:
        return {}
    computed, stored = compute_dtypes(program), {parameter.name: parameter.dtype for parameter in program.parameters}
    producers = {value: region for region in features.regions for value in region.outputs}
    values = [
        (v, g.outputs(features.templates[producers[v].template].graph)[producers[v].outputs.index(v)])
        for v in features.values
    ]
    return {
        "features": {
            "values": [
                {"name": v, "entry": e, **_layout(node.meta["val"])} for e, (v, node) in zip(features.entries, values)
            ],
            "inputs": list(features.stage.inputs),
            "constants": list(features.stage.constants),
            "parameters": {name: _dtype(computed.get(name, stored[name])) for name in features.stage.parameters},
        }
    }


def _repeated(program: Program) -> set[str]:
    """Parameters to which several regions of a stage give a gradient."""
    of_region = {region.name: region for region in program.regions}
    repeated = set[str]()
    for stage in program.stages:
        counts = Counter(name for region in stage.regions for name in set(of_region[region].parameters))
        repeated |= {name for name, count in counts.items() if count > 1}
    return repeated


def _messages(program: Program) -> list[dict[str, Any]]:
    """What stages send each other, with the layout of each value."""
    values = {
        value: g.outputs(program.templates[region.template].graph)[i].meta["val"]
        for region in program.regions
        for i, value in enumerate(region.outputs)
    }
    gradients = _gradients(program)
    return [
        {
            "kind": message.kind, "source": message.source, "destination": message.destination,
            "values": [
                {"name": v, **_layout(values[v] if message.kind == "F" else gradients[message.source, v])}
                for v in message.values
            ],
        }
        for message in program.messages
    ]  # fmt: skip


def _context(program: Program) -> dict[str, Any]:
    """How tokens are spread, by component; nothing if none are."""
    rows = [
        {
            "component": context.component, "ranks": context.ranks, "tokens": context.tokens, "block": context.block,
            "shard": context.shard, "tile_seconds": context.tile_seconds, "block_seconds": context.block_seconds,
            "inputs": _inputs(context), "masks": [{"layers": mask.layers} for mask in context.masks],
            **({"axis": context.axis} if context.axis != "cp" else {}),
        }
        for context in program.contexts
    ]  # fmt: skip
    return {"context": rows} if rows else {}


def _draws(program: Program) -> list[dict[str, Any]]:
    """The random numbers that a microbatch draws, in the order of the model's code; p: of dropout, else null; samples:
    as of csc.kernels.dropout; once: for all samples of a step.
    """
    draws = []
    graphs = [
        ("", program.shared),
        *((region.name, program.templates[region.template].graph) for region in program.regions),
    ]
    for region, graph in graphs:
        for node in g.calls(graph) if graph is not None else ():
            if g.op_name(node) in g.SEEDED:
                bound = g.bind(node)
                samples, once = bound.get("samples", 0), {"once": True} if _of_step(bound["seed"]) else {}
                row = {"region": region, "index": bound["index"], "p": bound.get("p"), "samples": samples}
                draws.append({**row, **once})
    return draws


def _of_step(seed: fx.Node) -> bool:
    """Whether a seed is that of the step, which pass `dropout` cuts out of those that come with a microbatch."""
    return seed.op == "call_function" and g.op_name(seed) == "aten::slice"


def _inputs(context: Context) -> list[str]:
    """The entries of the batch that a component's masks are made of."""
    roles = [node.meta["role"] for node in g.placeholders(context.graph)]
    return [name for kind, name in roles if kind == "input"]


def _expected(program: Program) -> dict[str, Any]:
    """What the planner decided and expects; times in seconds, sizes in bytes."""
    plan = program.plan
    assert plan is not None
    return {
        "layout": plan.layout,
        "costs": plan.costs,
        "pipeline": plan.pipeline,
        "makespan": plan.makespan,
        "bound": plan.bound,
        "shared_bound": plan.shared_bound,
        "peak_memory": list(plan.peak_memory),
        "peak_flops": plan.peak_flops,
        **({"ahead": [sorted(order.items()) for order in plan.ahead]} if plan.ahead is not None else {}),
    }


def _flops(program: Program) -> list[list[int]]:
    """FLOPs of F, B and W of every stage, for one microbatch."""
    of_region = {region.name: program.variants[region.variant].flops for region in program.regions}
    return [[sum(of_region[name][part] for name in stage.regions) for part in range(3)] for stage in program.stages]


def _gradients(program: Program) -> dict[tuple[int, str], torch.Tensor]:
    """(stage, value) -> the value's gradient as it leaves that stage: as the value's first reader there makes it."""
    home = {name: stage.index for stage in program.stages for name in stage.regions}
    gradients: dict[tuple[int, str], torch.Tensor] = {}
    for region in reversed(program.regions):
        template = program.templates[region.template]
        assert template.joint is not None
        for value, gradient in zip(region.activations, g.outputs(template.joint)[len(template.outputs) :]):
            if gradient is not None:
                gradients[home[region.name], value] = gradient.meta["val"]
    return gradients


def _loss_count(program: Program) -> dict[str, Any]:
    """See `_divided`; and whether ranks that share tokens have parts of a loss."""
    summed = {"summed": True} if program.combination.summed else {}
    return {**_divided(program), **summed, **_over_batch(program.batch_loss)}


def _over_batch(loss: BatchLoss | None) -> dict[str, Any]:
    """What of the loss is computed once a step."""
    if loss is None:
        return {}
    return {
        "over_batch": {
            "values": [
                {
                    "name": value.name, "dims": len(value.shape), "dtype": _dtype(value.dtype), "kind": value.kind,
                    **({"dim": value.dim, "groups": value.groups} if value.kind == "rows" else {}),
                    **({"samples": value.samples} if value.samples else {}),
                }
                for value in loss.values
            ],
            "sizes": [{"size": size.size, "adds": size.adds} for size in loss.sizes],
            "parameters": list(loss.parameters), "constants": list(loss.constants), "factor": loss.factor,
        }
    }  # fmt: skip


def _divided(program: Program) -> dict[str, Any]:
    """What tells how much a microbatch's loss weighs: the entry whose rows count, and along which dimension, or what is
    added to a count; of a loss of several terms that of each."""
    combination = program.combination
    if program.loss_weight == "mean":
        along = next((item.samples for item in program.inputs if item.name == combination.rows), 0)
        return {**({"rows": combination.rows} if combination.rows else {}), **({"along": along} if along else {})}
    if program.loss_weight == "terms":
        return {
            "divisors": [
                {
                    "counts": f"rows of {divisor.rows}" if divisor.rows else divisor.counted,
                    "added": divisor.added,
                    "least": divisor.least,
                }
                | ({"for_zero": divisor.for_zero} if divisor.for_zero else {})
                for divisor in combination.divisors
            ]
        }
    if program.loss_weight == "sum" or (combination.added, combination.least) == (0, 0):
        return {}
    return {"added": combination.added, "least": combination.least}


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _layout(val: torch.Tensor) -> dict[str, Any]:
    return {"shape": list(val.shape), "stride": list(val.stride()), "dtype": _dtype(val.dtype)}
