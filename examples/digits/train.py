"""Both phases of the recipe on one rank of their emitted programs. Started by demo.py:

    torchrun --nproc-per-node 4 examples/digits/train.py --program DIR --weights FILE --output DIR

Neither the compiler nor transformers is imported: the program directories are all that a rank needs. Leaves the weights
after each phase, and when each action of a warm step ran (measured.json, for `csc timeline`).
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from data import Scans, split_scans
from progress import showing
from recipe import PHASES, phase_batches, run_phase

from csc.runtime.launch import setup_distributed
from csc.runtime.loaded_program import load
from csc.runtime.timelines import Traces, record
from csc.runtime.trainer import Trainer

WARM = 20  # last steps whose timelines are kept


def train(number: int, directory: Path, weights: Path, scans: Scans, seed: int) -> tuple[Trainer, Sequence[Traces]]:
    """One phase, by its number. Returns its trainer, and when each action of the last steps ran."""
    phase = PHASES[number]
    program = load(directory / phase.folder)
    launch = setup_distributed(program.manifest.device)
    trainer = Trainer(program, weights=weights, device=launch.device, trace=True)
    warm: deque[Traces] = deque(maxlen=WARM)
    with showing(quiet=launch.rank != 0) as show:

        def report(name: str, step: int, steps: int, loss: float) -> None:
            warm.append(trainer.timeline)
            show(name, step, steps, loss)

        run_phase(trainer, phase, phase_batches(phase, scans, seed=10 * seed + number), report)
    return trainer, warm


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="where csc wrote phase1 and phase2")
    parser.add_argument("--weights", type=Path, required=True, help="safetensors to start from")
    parser.add_argument("--output", type=Path, required=True, help="directory for the trained weights")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    scans, _ = split_scans()
    weights = arguments.weights
    for number, phase in enumerate(PHASES):
        trainer, warm = train(number, arguments.program, weights, scans, arguments.seed)
        weights = arguments.output / f"weights_{phase.folder}"
        trainer.save(weights)
        dist.barrier()  # the next phase reads what all have written
    name = f"measured, median of {WARM} warm steps"
    record(arguments.output / "measured.json", warm, trainer.program.manifest, name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
