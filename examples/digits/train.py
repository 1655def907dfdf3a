"""Both phases of the recipe on one rank of their emitted programs. Started by demo.py:

    torchrun --nproc-per-node 4 examples/digits/train.py --program DIR --weights FILE --output DIR

Neither the compiler nor transformers is imported: the program directories are all that a rank needs. Leaves the weights
after each phase, and when each action of the last step ran (measured.json, for `csc timeline`).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch.distributed as dist
from data import split_scans
from progress import showing
from recipe import PHASES, phase_batches, run_phase

from csc.runtime.launch import setup_distributed
from csc.runtime.loaded_program import load
from csc.runtime.timelines import record
from csc.runtime.trainer import Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=Path, required=True, help="where csc wrote phase1 and phase2")
    parser.add_argument("--weights", type=Path, required=True, help="safetensors to start from")
    parser.add_argument("--output", type=Path, required=True, help="directory for the trained weights")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    training, _ = split_scans()
    weights = arguments.weights
    with showing(quiet=os.environ.get("RANK", "0") != "0") as report:
        for number, phase in enumerate(PHASES):
            program = load(arguments.program / phase.folder)
            launch = setup_distributed(program.manifest.device)
            trainer = Trainer(program, weights=weights, device=launch.device, trace=True)
            batches = phase_batches(phase, training, seed=10 * arguments.seed + number)
            run_phase(trainer, phase, batches, report)
            weights = arguments.output / f"weights_{phase.folder}"
            trainer.save(weights)
            dist.barrier()  # the next phase reads what all have written
    record(arguments.output / "measured.json", trainer.timeline, program.manifest, f"measured, step {phase.steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
