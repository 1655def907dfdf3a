"""Of each rank's parameters another one has a copy, where no other rank would have them: a lost rank loses nothing.

Terms
  piece    what a rank holds of a parameter: all of it (a pipeline), or its shard (zero=3)
  keeper   of a rank: that of the same place in the next replica, which holds the same but with zero=3; of one pipeline
           the next rank, of the last the first
  mirror   the pieces of a rank at its keeper, but for those that this one holds itself. Gradients come to it within the
           step, before any rank can know that the step is done, and the keeper's optimizer steps it as it steps its
           own. So neither parameters nor the optimizer's state are ever sent while all is well
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from csc.errors import InputError
from csc.runtime.specs import Box, ParameterSpec, sizes, whole_box
from csc.runtime.transport import Endpoint


class Piece(NamedTuple):
    """holder: the first rank that has it, while none is lost."""

    spec: ParameterSpec
    box: Box
    holder: int


class Mirror:
    """Of one process, whose rank is one of so many, in so many replicas. pieces: of a rank. weights: all of the model,
    of which the mirror is made. known: what this process keeps already, which an optimizer knows.
    """

    def __init__(
        self,
        pieces: Callable[[int], Sequence[Piece]],
        endpoint: Endpoint,
        rank: int,
        ranks: int,
        replicas: int,
        device: torch.device,
        weights: Mapping[str, torch.Tensor],
        known: Mapping[str, tuple[Box, nn.Parameter]],
    ) -> None:
        self._endpoint, self._rank, self._ranks = endpoint, rank, ranks
        self._apart = ranks // replicas if replicas > 1 else 1  # how far a keeper is
        self._before, self._keeper = (rank - self._apart) % ranks, self._keeper_of(rank)
        own, before, keeper = (pieces(one) for one in (rank, self._before, self._keeper))
        self._own = {piece.spec.name: piece for piece in own}
        self.pieces = [piece for piece in before if piece not in own]
        self._sent = [piece.spec for piece in own if piece not in keeper]
        self.values: dict[str, nn.Parameter] = {}
        for piece in self.pieces:
            name = piece.spec.name
            is_known = name in known and known[name][0] == piece.box
            self.values[name] = known[name][1] if is_known else _parameter(weights[name], piece, device)
        self._came: dict[str, torch.Tensor] = {}
        self.lost: int | None = None  # the rank for which its keeper stands in

    def _keeper_of(self, rank: int) -> int:
        return (rank + self._apart) % self._ranks

    def giver(self, piece: Piece) -> int:
        """The rank that counts a piece, saves it and gives it to others: its first holder, or who stands in."""
        return self._keeper_of(piece.holder) if piece.holder == self.lost else piece.holder

    def counts(self, spec: ParameterSpec) -> bool:
        """Whether this rank's own piece of a parameter counts here."""
        return self.giver(self._own[spec.name]) == self._rank

    def is_own(self, piece: Piece) -> bool:
        """Whether this rank has it itself."""
        return self._own.get(piece.spec.name) == piece

    def stands_in(self, piece: Piece) -> bool:
        """Whether a piece of the mirror counts here."""
        return self.giver(piece) == self._rank

    @property
    def trained(self) -> Iterator[tuple[Piece, nn.Parameter]]:
        """What of it an optimizer steps."""
        return ((piece, self.values[piece.spec.name]) for piece in self.pieces if piece.spec.trainable)

    @torch.no_grad()
    def fill(self, values: Mapping[str, torch.Tensor]) -> None:
        """Have what the ranks hold now. values: of this one. All ranks call it."""
        sent = [values[spec.name] for spec in self._sent]
        kept = list(self.values.values())
        for mine, value in zip(kept, self._exchanged(sent, kept, "the values of parameters"), strict=True):
            mine.copy_(value)

    @torch.no_grad()
    def exchange(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the gradients of a step to the keeper, and note those of the rank before this one. What was noted of a
        step that begins again is dropped.
        """
        sent = [spec for spec in self._sent if spec.trainable]
        kept = dict(self.trained)
        (there,) = self._exchanged(
            [torch.tensor([spec.name in gradients for spec in sent], dtype=torch.uint8)],
            [torch.empty(len(kept), dtype=torch.uint8)], "which gradients there are",
        )  # fmt: skip
        coming = {piece: kept[piece] for piece, is_there in zip(kept, there.tolist(), strict=True) if is_there}
        leaving = [gradients[spec.name].to(spec.dtype) for spec in sent if spec.name in gradients]
        came = self._exchanged(leaving, [torch.empty_like(value) for value in coming.values()], "gradients")
        self._came = {piece.spec.name: gradient for piece, gradient in zip(coming, came, strict=True)}

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


def _parameter(weight: torch.Tensor, piece: Piece, device: torch.device) -> nn.Parameter:
    """Of all of a parameter the model's own, which nothing else in this process trains. `fill` brings its values."""
    if weight.is_meta:
        raise InputError(
            f"{piece.spec.name!r} is on the meta device, and what a lost rank had is put together in the model",
            "compile", "make the model with values on every rank, or leave mirror=True out",
        )  # fmt: skip
    is_whole = piece.box == whole_box(piece.spec.shape)
    if is_whole and isinstance(weight, nn.Parameter) and weight.device == device:
        return weight
    values = torch.empty(sizes(piece.box), dtype=weight.dtype, device=device)
    return nn.Parameter(values, requires_grad=piece.spec.trainable)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
