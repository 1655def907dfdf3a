"""Of a single pipeline each rank's parameters are in the memory of another one, too: one lost rank loses nothing.

Terms
  keeper   of a rank: the next one of the pipeline; of the last rank the first
  mirror   what a keeper has of the rank before it, but for what it holds itself. Gradients come to it within the step,
           before any rank can know that the step is done, and the keeper's optimizer steps it as it steps its own. So
           neither parameters nor the optimizer's state are ever sent while all is well
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from csc.errors import InputError
from csc.runtime.specs import Manifest, ParameterSpec
from csc.runtime.transport import Endpoint


class Mirror:
    """Of one process, whose rank is that on the pp axis. weights: all of the model, of which the mirror is made."""

    def __init__(
        self,
        manifest: Manifest,
        endpoint: Endpoint,
        rank: int,
        device: torch.device,
        weights: Mapping[str, torch.Tensor],
    ) -> None:
        self._endpoint, self._rank, self._ranks = endpoint, rank, manifest.mesh.pp
        self._before, self._keeper = (rank - 1) % self._ranks, self._keeper_of(rank)
        self.specs = [p for p in manifest.parameters if self._before in p.ranks and rank not in p.ranks]
        self._sent = [p for p in manifest.parameters if rank in p.ranks and self._keeper not in p.ranks]
        self.values = {spec.name: _parameter(weights[spec.name], spec, device) for spec in self.specs}
        self._came: dict[str, torch.Tensor] = {}
        self.lost: int | None = None  # the rank for which its keeper stands in

    def _keeper_of(self, rank: int) -> int:
        return (rank + 1) % self._ranks

    def first(self, spec: ParameterSpec) -> int:
        """The rank that counts a parameter, saves it and gives it to others: its first holder, or who stands in."""
        return self._keeper_of(spec.owner) if spec.owner == self.lost else spec.owner

    @property
    def trained(self) -> Iterator[tuple[ParameterSpec, nn.Parameter]]:
        """What of it an optimizer steps."""
        return ((spec, self.values[spec.name]) for spec in self.specs if spec.trainable)

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Have what the ranks hold now. values: of this one. All ranks call it."""
        sent = [values[spec.name] for spec in self._sent]
        kept = [self.values[spec.name] for spec in self.specs]
        for mine, value in zip(kept, self._exchanged(sent, kept, "the values of parameters"), strict=True):
            mine.copy_(value)

    @torch.no_grad()
    def exchange(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the gradients of a step to the keeper, and note those of the rank before this one. What was noted of a
        step that begins again is dropped.
        """
        sent = [spec for spec in self._sent if spec.trainable]
        kept = [spec for spec, _ in self.trained]
        (there,) = self._exchanged(
            [torch.tensor([spec.name in gradients for spec in sent], dtype=torch.uint8)],
            [torch.empty(len(kept), dtype=torch.uint8)], "which gradients there are",
        )  # fmt: skip
        coming = [spec for spec, is_there in zip(kept, there.tolist(), strict=True) if is_there]
        leaving = [gradients[spec.name].to(spec.dtype) for spec in sent if spec.name in gradients]
        like = [torch.empty_like(self.values[spec.name]) for spec in coming]
        came = self._exchanged(leaving, like, "gradients")
        self._came = {spec.name: gradient for spec, gradient in zip(coming, came, strict=True)}

    @torch.no_grad()
    def take(self) -> None:
        """Add what has come to `.grad`: the step is done."""
        for name, gradient in self._came.items():
            parameter = self.values[name]
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._came = {}

    def _exchanged(
        self, sent: Sequence[torch.Tensor], like: Sequence[torch.Tensor], what: str
    ) -> list[torch.Tensor]:  # fmt: skip
        """Tensors as those of `like`, of the rank before this one."""
        leaving = [_bytes(tensor) for tensor in sent if tensor.numel()]
        coming = [torch.empty_like(_bytes(tensor)) for tensor in like if tensor.numel()]
        why = f"{what} for copies"
        ticket = self._endpoint.start_exchange({self._keeper: leaving}, {self._before: coming}, why)
        came = iter(self._endpoint.finish_exchange(ticket)[self._before])
        self._endpoint.drain()  # a send that is under way would keep the group, when others wait for its end
        return [
            next(came).view(tensor.dtype).view(tensor.shape) if tensor.numel() else torch.empty_like(tensor)
            for tensor in like
        ]  # fmt: skip


def _parameter(weight: torch.Tensor, spec: ParameterSpec, device: torch.device) -> nn.Parameter:
    """The model's own, which nothing else in this process trains."""
    if weight.is_meta:
        raise InputError(
            f"{spec.name!r} is on the meta device, and a rank keeps the parameters of its neighbour in the model's",
            "compile", "make the model with values on every rank, or leave mirror=True out",
        )  # fmt: skip
    if isinstance(weight, nn.Parameter) and weight.device == device:
        return weight
    return nn.Parameter(weight.detach().to(device), requires_grad=spec.trainable)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
