"""The masks of a program's dropout, for eager PyTorch: then a training step itself can be compared with eager's.

Terms: a program lists what a microbatch draws in the order of the model's code, and each draw follows from a seed and
the place of the draw (csc.kernels.dropout). Eager PyTorch runs the whole batch, so its mask is that of one microbatch
after the other, along the first dimension.

    masks = SameMasks(draws, drawn, microbatches)
    masks.take(shape, p, device) -> [shape], bool       of the next dropout that eager PyTorch makes
    masks.fit                                           whether eager made the program's draws, and no others
    masks.once_more() -> SameMasks                      from the first one on; what was made is not made again

Of several microbatches that is a guess: samples need not stand together in what is dropped out. A step that differs
from eager's then says nothing; one that does not says as much as with one microbatch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from csc.kernels.dropout import kept
from csc.runtime import executor
from csc.runtime.specs import DrawSpec

ROUNDING = 1e-6  # between p and 1 - (1 - p)


class SameMasks:
    """draws: of a microbatch, all of them dropout; drawn: the seed of the step; microbatches: in the global batch."""

    def __init__(self, draws: Sequence[DrawSpec], drawn: int, microbatches: int) -> None:
        self.microbatches = microbatches
        self._asked = (draws, drawn, microbatches)
        self._made, self._left = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
        self._draws = draws
        self._seeds = [executor.of_microbatch(drawn, index) for index in range(microbatches)]
        self._taken = 0
        self._strange = False

    def take(self, shape: Sequence[int], p: float, device: torch.device) -> torch.Tensor:
        """What the program leaves, where eager's dropout has probability p; everything once they do not fit."""
        place, self._taken = self._taken, self._taken + 1
        draw = self._draws[place] if place < len(self._draws) else None
        parts = self.microbatches
        if draw is None or draw.p is None or abs(draw.p - p) > ROUNDING or not shape or shape[0] % parts:
            self._strange = True
            return torch.ones(list(shape), dtype=torch.bool, device=device)
        mask = self._made.pop(place, None)
        if mask is None or mask.shape != shape:
            sizes = [shape[0] // parts, *shape[1:]]
            ours = [executor.seed_of(seed, f"{draw.region}.") for seed in self._seeds]
            masks = [kept(sizes, draw.p, seed, draw.index, device) for seed in ours]
            mask = self._left[place] = masks[0] if parts == 1 else torch.cat(masks)
        return mask

    def once_more(self) -> SameMasks:
        """From the first one on."""
        again = SameMasks(*self._asked)
        again._made, self._left = self._left, {}
        return again

    def refuse(self) -> None:
        """Eager PyTorch draws something that is no dropout."""
        self._strange = True

    @property
    def fit(self) -> bool:
        """Whether each was taken once, and nothing else was drawn."""
        return not self._strange and self._taken == len(self._draws)
