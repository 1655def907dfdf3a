"""Parameters of which each data-parallel rank steps a shard: the state of its optimizer is that of shards (ZeRO).

Terms
  shard      what this process steps of a parameter that it trains (csc.runtime.zero_shards): an nn.Parameter of its
             own that lies in the memory of the whole one, with the gradient of its entries alone. *Apart* (zero=3) it
             has memory of its own, and the process keeps no whole one
  stale      the whole parameters lack what other ranks have stepped, from the optimizer's step to the next `gather`
  proven     an optimizer that works entry by entry, which `optimizer` has made

    shards = DataShards(mesh, rank, apart)
    shards.add(specs, weights)                     those that train get their shards, once
    shards.of(name) -> nn.Parameter | None         what an optimizer steps
    shards.stale                                   whether `gather` is due, as far as this rank knows
    shards.gather(transport)                       all ranks call it
    shards.replaced = True                         other shards train from now on: a step of these is an InputError
    shards.check_steps(where)                      InputError if something else than such an optimizer wrote to a shard
    shards.known()                                 but for what csc has written itself

A number without dimensions stays whole: all ranks step it alike.
A process that runs all ranks has no use for it: it holds every parameter once, and any optimizer steps all of it.
See Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (2020).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from csc.errors import InputError
from csc.ir.groups import Group
from csc.ir.mesh import Mesh
from csc.runtime.buckets import filled
from csc.runtime.specs import ParameterSpec
from csc.runtime.transport import Transport
from csc.runtime.zero_shards import Shard, seen, shard_of


@dataclass
class Stepped:
    """A parameter of this process: its spec as one rank has it, the whole one (or again what is stepped, apart), its
    shard, and the version of that as csc left it.
    """

    spec: ParameterSpec
    whole: nn.Parameter
    shard: Shard
    parameter: nn.Parameter
    version: int


class DataShards:
    """Of one process with one rank."""

    def __init__(self, mesh: Mesh, rank: int, apart: bool = False) -> None:
        self.ranks = mesh.group(Group.DATA, rank)
        self.apart = apart
        self._index = self.ranks.index(rank)
        self._held: dict[str, Stepped] = {}
        self.stale = False
        self.replaced = False  # programs that train the same parameters have no use for these shards

    def add(self, specs: Iterable[ParameterSpec], weights: Mapping[str, nn.Parameter]) -> None:
        """Divide what trains. A parameter whose memory is that of a shard keeps it: an optimizer knows it."""
        for spec in specs:
            whole, before = weights[spec.name], self._held.get(spec.name)
            if not spec.trainable or not spec.shape or (before is not None and before.whole is whole):
                continue
            shard = shard_of(spec.local.shape, len(self.ranks), self._index)
            parameter = whole if self.apart else nn.Parameter(seen(whole.data, shard))
            self._held[spec.name] = Stepped(spec.local, whole, shard, parameter, parameter._version)

    def of(self, name: str) -> nn.Parameter | None:
        """What this process steps of a parameter; None if it is none of these."""
        found = self._held.get(name)
        return None if found is None else found.parameter

    def shard(self, name: str) -> Shard:
        """What this rank holds of a parameter."""
        return self._held[name].shard

    @torch.no_grad()
    def take(self, name: str, gradient: torch.Tensor) -> None:
        """Add this rank's entries of a whole gradient to the `.grad` of its shard. Whoever steps it, other ranks' steps
        are gathered before the next forward.
        """
        held = self._held[name]
        self.take_shard(name, seen(gradient, held.shard).clone(memory_format=torch.contiguous_format))

    @torch.no_grad()
    def take_shard(self, name: str, gradient: torch.Tensor) -> None:
        """The same of a gradient of this rank's entries alone, which nobody else holds."""
        parameter = self._held[name].parameter
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self.stale = not self.apart

    def check_current(self) -> None:
        """Before a step of a proven optimizer. InputError if other shards train now, or something else has written to
        these: `stepped` would take it for this optimizer's.
        """
        if self.replaced:
            raise InputError(
                "the optimizer steps shards of parameters that the programs of now divide in another way",
                "optimizer",
                "make a new one with compiled.optimizer(...) after with_options",
            )
        self.check_steps("optimizer")

    def stepped(self) -> None:
        """A proven optimizer has made a step."""
        self.stale = not self.apart
        self.known()

    def known(self) -> None:
        """What was written to shards until now was right."""
        for held in self._held.values():
            held.version = held.parameter._version

    def check_steps(self, where: str) -> None:
        """Nobody else writes to shards: other ranks' shards would be stepped in another way."""
        for name, held in self._held.items():
            if held.parameter._version != held.version:
                raise InputError(
                    f"this process' shard of {name!r} was written to by something that is not known to work entry by "
                    "entry",
                    where,
                    "make the optimizer with compiled.optimizer(torch.optim.AdamW, lr=...), and bring weights in with "
                    "compiled.load(directory)",
                )

    @torch.no_grad()
    def gather(self, transport: Transport) -> None:
        """Bring every rank's shards into the whole parameters. All ranks of the group call it."""
        for number, held in enumerate(self._buckets()):
            why = f"parameters over {' and '.join(Group.DATA.along)}, bucket {number}"
            sizes = [sum(self._seen(one, place).numel() for one in held) for place in range(len(self.ranks))]
            flat = held[0].whole.new_zeros(max(sizes))
            own = [one.parameter.reshape(-1) for one in held]
            torch.cat(own, out=flat[: sizes[self._index]])
            for place, part in enumerate(transport.gathered(flat, self.ranks, why)):
                if place != self._index:
                    self._put(held, place, part)
        self.stale = False

    def _put(self, held: list[Stepped], place: int, flat: torch.Tensor) -> None:
        at = 0
        for one in held:
            target = self._seen(one, place)
            target.copy_(flat[at : at + target.numel()].view(target.shape))
            at += target.numel()

    def _seen(self, held: Stepped, place: int) -> torch.Tensor:
        """What the rank at a place of the group steps, in the memory of the whole parameter."""
        return seen(held.whole.data, shard_of(held.spec.shape, len(self.ranks), place))

    def _buckets(self) -> list[list[Stepped]]:
        """Parameters of one dtype whose shards go together."""
        return [bucket for _, bucket in filled(self._held.values(), lambda held: held.spec.dtype, self._bytes)]

    def _bytes(self, held: Stepped) -> int:
        """Of a shard."""
        return held.whole.numel() * held.whole.element_size() // len(self.ranks)
