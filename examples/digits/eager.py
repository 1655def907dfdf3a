"""The plain trainer: one process, PyTorch as it comes."""

from collections.abc import Iterator

import torch
from data import Batch
from torch import Tensor, nn


class EagerTrainer:
    """Runs the model's own forward and backward pass, one microbatch after the other."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.to(device)
        self.device = device

    def train_step(self, batch: Batch, microbatches: int) -> Tensor:
        # Every microbatch has the same number of answer tokens, so the mean of means is the batch's mean.
        parts = {name: tensor.to(self.device).chunk(microbatches) for name, tensor in batch.items()}
        total = torch.zeros((), device=self.device)
        for index in range(microbatches):
            loss = self.model(**{name: chunks[index] for name, chunks in parts.items()}).loss / microbatches
            loss.backward()
            total += loss.detach()
        return total

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()
