"""The LLaVA recipe: phase 1 fits the projector between two finished models, phase 2 tunes the LLM with it.

The vision encoder stays frozen in both. A phase runs over any ``Trainer``, eager or compiled.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from data import ALL_ROWS, KNOWN_ROWS, Batch, Scans, instruction_batches
from pretrain import Report
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR


class Trainer(Protocol):
    """What a phase needs of the model it trains."""

    def train_step(self, batch: Batch, microbatches: int) -> Tensor | float:
        """Add the gradients of the batch's mean loss to the parameters and return that loss."""

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that this process holds, frozen ones included."""


@dataclass(frozen=True)
class Phase:
    """What is trained (prefixes of parameter names), on questions about which rows, and how."""

    name: str
    trained: tuple[str, ...]
    rows_asked: tuple[int, ...]
    steps: int
    learning_rate: float
    batch_size: int = 48
    microbatches: int = 4

    @property
    def folder(self) -> str:
        """Its name in a path."""
        return self.name.replace(" ", "")


PHASE_1 = Phase("phase 1", ("model.multi_modal_projector.",), KNOWN_ROWS, steps=60, learning_rate=3e-3)
PHASE_2 = Phase(
    "phase 2",
    ("model.multi_modal_projector.", "model.language_model.", "lm_head."),
    ALL_ROWS,
    steps=100,
    learning_rate=1.5e-3,
)
PHASES = (PHASE_1, PHASE_2)


def freeze(model: nn.Module, phase: Phase) -> None:
    """Let only the parameters that ``phase`` trains require gradients."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(phase.trained))


def phase_batches(phase: Phase, scans: Scans, seed: int) -> Iterator[Batch]:
    """The batches of a phase; equal seeds give equal batches in every process."""
    return instruction_batches(scans, phase.batch_size, seed, phase.rows_asked)


def run_phase(trainer: Trainer, phase: Phase, batches: Iterator[Batch], report: Report) -> list[float]:
    """Train for one phase and return the loss of each step."""
    trained = [parameter for parameter in trainer.parameters() if parameter.requires_grad]
    # A group of its own, as a pipeline stage may hold no trained parameter and AdamW refuses an empty list.
    optimizer = AdamW([{"params": trained}], lr=phase.learning_rate, weight_decay=0.01)
    schedule = OneCycleLR(optimizer, phase.learning_rate, total_steps=phase.steps, pct_start=0.1)
    losses = []
    for step in range(1, phase.steps + 1):
        loss = float(trainer.train_step(next(batches), phase.microbatches))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss)
        report(phase.name, step, phase.steps, loss)
    return losses
