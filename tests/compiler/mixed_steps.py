"""Models that are right in every microbatch alone, and wrong as soon as microbatches of two kinds meet in a step; and
one process of two that brings samples of its own to such a step.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import csc
from csc.errors import CscError


class Scored(nn.Module):
    """Tokens to classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.hidden, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.images = nn.Linear(5, 4)

    def loss(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.hidden(states))).flatten(0, 1), ids.flatten())


class DividedByLongest(Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids), ids) / max(lengths.tolist())


class ThresholdOfLongest(Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids) * (2.5 if max(lengths.tolist()) > 3 else 1.0), ids)


class SumOfLongest(Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        logits = self.out(self.embed(ids) * (2.5 if max(lengths.tolist()) > 3 else 1.0))
        counted = (ids > 1).float()
        each = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), reduction="none")
        return torch.dot(each, counted.flatten()) / counted.sum()


class SlightlyOfLongest(Scored):
    """What the longest sample decides moves gradients by a percent: in 16 bits rounding moves them by more."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids) * (1.02 if max(lengths.tolist()) > 3 else 1.0), ids)


class SlightlyOfAll(Scored):
    """A hundredth of what is computed with belongs to the whole batch."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states = self.embed(ids)
        return self.loss(states + 0.05 * states.mean(0, keepdim=True), ids)


class PositionsOfLongest(Scored):
    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1]) / max(lengths.tolist())
        return self.loss(self.embed(ids) + places[None, :, None], ids)


class PenaltyOfImages(Scored):
    def forward(self, input_ids: torch.Tensor, pixel_values: torch.Tensor | None = None) -> torch.Tensor:
        states, penalty = self.embed(input_ids), 0.0
        if pixel_values is not None:
            states = states.masked_scatter((input_ids == 0)[..., None], self.images(pixel_values))
            penalty = self.images.weight.pow(2).sum()
        return self.loss(states, input_ids) + penalty


class LabelsOfLongest(Scored):
    """Tells lengths beside labels of its own, of which a microbatch may have none."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.loss(self.embed(ids) * (2.5 if max(lengths.tolist()) > 3 else 1.0), labels)


class EitherWay(Scored):
    """Takes another way for long samples, to the same result: right however microbatches meet."""

    def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states = self.embed(ids)
        return self.loss(states * 2.0 if max(lengths.tolist()) > 3 else states + states, ids)


def lengths_batch(*lengths: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {"ids": torch.randint(0, 9, (len(lengths), 5)), "lengths": torch.tensor(lengths)}


def images_batch(*images: int) -> dict[str, torch.Tensor]:
    """So many images of each sample."""
    torch.manual_seed(2)
    ids = torch.randint(1, 9, (len(images), 5))
    for sample, count in enumerate(images):
        ids[sample, :count] = 0
    found = {"input_ids": ids}
    return found | {"pixel_values": torch.randn(sum(images), 5)} if sum(images) else found


def main(directory: Path) -> None:
    """Steps of two processes with a replica's samples each: both long, both short, then one of each; what each said."""
    rank, said = int(os.environ["RANK"]), []
    whole = lengths_batch(5, 2, 5, 2), lengths_batch(3, 2, 3, 2), lengths_batch(5, 2, 3, 2)
    compiled = csc.compile(ThresholdOfLongest(), mesh="dp=2", example=whole[0], cache=False)
    for batch in whole:
        try:
            share = {name: entry[2 * rank : 2 * rank + 2] for name, entry in batch.items()}
            said.append(float(compiled.train_step(share, local=True)))
        except CscError as error:
            said.append(f"{type(error).__name__}: {error}")
    (directory / f"result_{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()
