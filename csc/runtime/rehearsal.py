"""A rank's functions run once on tensors without values: what they call is seen before any of it computes.

    rehearse(rank, microbatch, weights)       F, B and W (or BW) of each stage, on one microbatch; any error of theirs

What comes from other ranks is as program.json says. Nothing is sent, no memory is taken, no random number is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from csc.ir.groups import RANDOM, WEIGHTS
from csc.runtime import context_group
from csc.runtime.rank import Rank
from csc.runtime.seeds import NO_CHANCE
from csc.runtime.specs import StageSpec

Tensors = dict[str, torch.Tensor]


def rehearse(rank: Rank, microbatch: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """weights: as the rank holds them; those that it has shards of stand here for whole ones."""
    from csc.torch_private.traces import FakeTensorMode  # imports a second's worth that ranks do not need otherwise

    given = dict(context_group.attach(rank, microbatch))
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(tensor, static_shapes=True)

    batch = {name: fake(value) if isinstance(value, torch.Tensor) else value for name, value in given.items()}
    batch |= {name: met.number for name, met in rank.met.items()}
    if rank.program.manifest.random:
        batch[RANDOM] = NO_CHANCE
    if rank.program.manifest.loss.divisors:
        batch[WEIGHTS] = fake(torch.ones(len(rank.program.manifest.loss.divisors), dtype=torch.float64))
    constants = {name: fake(tensor) for name, tensor in rank.constants.items()}
    whole = _whole(rank, weights, fake)
    with torch.no_grad(), mode:
        saved = {stage.stage: _forward(rank, stage, batch, whole, constants) for stage in rank.stages}
        for stage in reversed(rank.stages):
            _backward(rank, stage, saved[stage.stage], whole, constants)


def _whole(
    rank: Rank, weights: Mapping[str, torch.Tensor], fake: Callable[[torch.Tensor], torch.Tensor]
) -> Tensors:  # fmt: skip
    found = {}
    for spec in rank.program.manifest.parameters:
        if spec.name in weights:
            own = fake(weights[spec.name])
            found[spec.name] = own if own.shape == spec.local.shape else own.new_empty(spec.local.shape)
    return found


def _received(rank: Rank, kind: str, stage: int) -> Tensors:
    return {
        value.name: torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=rank.device)
        for message in rank.program.manifest.messages
        if (message.kind, message.destination) == (kind, stage)
        for value in message.values
    }


def _forward(rank: Rank, stage: StageSpec, batch: Mapping[str, Any], weights: Tensors, constants: Tensors) -> Any:
    """(saved, the loss if it is computed here)."""
    received = _received(rank, "F", stage.stage)
    sent, saved = rank.functions[stage.stage].forward(batch, received, weights, constants)
    return saved, sent.get("loss")


def _backward(rank: Rank, stage: StageSpec, forward: Any, weights: Tensors, constants: Tensors) -> None:
    functions, (saved, loss) = rank.functions[stage.stage], forward
    received = _received(rank, "B", stage.stage)
    if rank.program.manifest.loss.stage == stage.stage and loss is not None:
        received["loss"] = torch.empty((), dtype=loss.dtype, device=loss.device)
    if functions.backward is not None:
        for _ in functions.backward(saved, received, weights, constants):
            pass
    if functions.backward_input is not None:
        _, kept = functions.backward_input(saved, received, weights, constants)
        if functions.backward_weight is not None:
            for _ in functions.backward_weight(kept, weights, constants):
                pass
